"""Tensors under capture: metadata guards, what an operator did, which calls are operators."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
import torch.overrides

from ladder.capture.python.words import words
from ladder.capture.values import settings
from ladder.capture.values.kinds import is_a
from ladder.runtime.operator import is_differentiated_forward
from ladder.runtime.snapshot import Snapshot

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

METADATA = frozenset(
    words(
        "shape ndim dtype device requires_grad is_leaf layout is_cuda itemsize nbytes is_sparse is_quantized"
        " is_mkldnn is_meta is_cpu is_nested is_mps is_xpu is_complex is_floating_point names name"
        " size dim stride numel nelement element_size is_contiguous storage_offset ndimension"
        " is_signed is_inference is_conj is_neg get_device __len__ type is_same_size is_shared is_pinned"
        " is_distributed is_coalesced has_names is_sparse_csr is_xla is_vulkan is_ipu is_mtia is_maia"
        " is_tensor is_storage result_type can_cast promote_types broadcast_shapes _is_view"
        " _parse_to _has_compatible_shallow_copy_type"
    )
)
"""Attributes and functions whose answer follows from guarded metadata."""

UNGUARDED = frozenset(
    words(
        "storage_offset _is_view is_inference is_shared is_pinned is_conj is_neg names name has_names"
        " is_coalesced is_distributed is_leaf requires_grad is_nested"
    )
)
"""Those whose answer is guarded on its own where it is read."""

VIEWS_BY_ATTRIBUTE = frozenset(words("T mT H mH real imag"))
"""Tensor attributes that are operators."""

READS_NUMBERS = frozenset(words("item __int__ __float__ __bool__ __index__ tolist"))
"""Methods of a tensor that give its one element as a number, or all as lists."""

MOST_NUMBERS = 64
"""Elements that are read from a tensor and compared in each call; the graph breaks where more are read."""

_AUTOCAST = words(
    "set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled autocast_increment_nesting"
    " autocast_decrement_nesting clear_autocast_cache"
)
STATE_WRITES = frozenset(
    getattr(home, name)
    for home, names in (
        (torch._C, ("_set_grad_enabled", "set_anomaly_enabled", *_AUTOCAST)),
        (torch, _AUTOCAST),
        (torch._C._functorch, ("_vmap_increment_nesting", "_vmap_decrement_nesting")),
    )
    for name in names
    if hasattr(home, name)
)
"""Natives that change the global state of torch; they become nodes of the graph, in order."""

CALLS_HOOKS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""Operators that call what programs have registered with autograd, which may look at anything."""

STATE_GUARDED = frozenset(
    {
        *(torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype),
        *(torch.is_autocast_enabled, torch.get_autocast_dtype, torch.is_autocast_cache_enabled),
        *(torch.amp.is_autocast_available, torch.overrides._get_current_function_mode_stack),
        *(getattr(torch.jit, name) for name in ("is_scripting", "is_tracing")),
        torch._jit_internal.is_scripting,
        torch._C._functorch.maybe_current_level,
    }
    | {
        getattr(torch._C, name)
        for name in words(
            "_get_tracing_state _is_tracing _is_torch_function_enabled _len_torch_function_stack"
            " _len_torch_dispatch_stack _is_torch_function_mode_enabled _is_torch_function_all_disabled"
            " _is_grad_enabled _is_inference_mode_enabled _get_autocast_dtype is_autocast_available"
            " _is_autocast_available _is_any_autocast_enabled is_autocast_cpu_enabled"
            " get_autocast_cpu_dtype get_autocast_gpu_dtype"
            " _get_privateuse1_backend_name _accelerator_getAccelerator _get_deterministic_algorithms"
            " _cuda_getDeviceCount _are_functorch_transforms_active"
        )
        if hasattr(torch._C, name)
    }
)
"""Natives and functions that only read the state that `torch_state` guards, or what never changes."""

STATE_READS = STATE_GUARDED | {
    *(torch._C._get_default_device, torch.is_deterministic_algorithms_warn_only_enabled),
    *(torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled, torch._C._autograd._profiler_enabled),
    *filter(None, [getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)]),
    *settings.WRITES,
}
"""Those and others, whose answers are guarded one by one."""


NO_EFFECT = frozenset({torch._C._log_api_usage_once, torch._C._log_api_usage_metadata})
"""Natives that only count uses."""


OVERRIDE_CHECKS = frozenset(
    {torch._C._has_torch_function, torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic}
)


def is_number_or_list(value: Any) -> bool:
    """Say whether `value` is a number, or lists of numbers, as tensors give them."""
    while type(value) is list and value:
        value = value[0]
    return type(value) in (bool, int, float, list)


def autocast_state() -> tuple[Any, ...]:
    """Return all that `torch.autocast` reads and writes."""
    return (
        *(torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES),
        *(torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES),
        torch.is_autocast_cache_enabled(),
    )


_AUTOCAST_DEVICES = ("cpu", "cuda")

STATE: tuple[Any, ...] = (
    *(torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack, torch.is_grad_enabled),
    *(torch.is_inference_mode_enabled, torch.get_default_dtype, torch._C._is_torch_function_enabled),
    *(torch._C._get_deterministic_algorithms, torch._C._get_tracing_state),
    *(torch._C._functorch.maybe_current_level, is_differentiated_forward),
    getattr(torch._C, "_is_any_autocast_enabled", autocast_state),
)
"""What gives the global state on which the meaning of operators depends; the last, whether autocast is on."""


def torch_state() -> tuple[Any, ...]:
    """Return the answers of `STATE`."""
    return tuple(read() for read in STATE)


def restore_state(grad: bool, autocast: tuple[Any, ...]) -> None:
    """Undo what nodes of an interrupted graph did to the state; `autocast` is of `autocast_state`."""
    torch._C._set_grad_enabled(grad)
    _set_autocast(autocast)


def _set_autocast(state: tuple[Any, ...]) -> None:
    count = len(_AUTOCAST_DEVICES)
    for device, enabled, dtype in zip(_AUTOCAST_DEVICES, state, state[count:], strict=False):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(state[-1])


@contextmanager
def autocast_at(state: tuple[Any, ...]) -> Iterator[None]:
    """Let autocast be as `autocast_state` gave it: a graph is compiled for where it begins."""
    now = autocast_state()
    _set_autocast(state)
    try:
        yield
    finally:
        _set_autocast(now)


def run_at(inference: bool, run: Callable[[], Any]) -> Any:
    """Run a graph in inference mode or out of it; gradients are recorded afterwards as the graph says."""
    before = torch.is_grad_enabled()
    with torch.inference_mode(inference):
        torch._C._set_grad_enabled(before)
        results = run()
        after = torch.is_grad_enabled()
    torch._C._set_grad_enabled(after)
    return results


RandomStates = list[tuple[torch.Generator, torch.Tensor]]
"""Generators, each with its state."""


def random_states() -> RandomStates:
    """Return the states of the generators from which operators draw: the CPU's, and of GPUs in use."""
    generators = (torch.default_generator, *torch.cuda.default_generators)
    return [(each, each.get_state()) for each in generators]


def restore_random(states: RandomStates) -> None:
    """Set generators back."""
    for generator, state in states:
        generator.set_state(state)


def modes_are_active() -> bool:
    """Say whether a Python mode watches each operator, or none could; capture then leaves the call alone.

    None can where torch works on fakes, amid which a signal handler of the program may call us.
    """
    watched = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(watched or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python))


def are_transformed() -> bool:
    """Tell whether ``torch.func`` or forward-mode differentiation may hold the tensors of a call."""
    return maps_rows() or is_differentiated_forward()


def maps_rows() -> bool:
    """Tell whether the program is inside ``torch.vmap``, where extents are numbers."""
    return torch._C._functorch.maybe_current_level() is not None


def is_row(value: Any) -> bool:
    """Tell whether a value is a tensor that ``torch.vmap`` gave for a row: it lives as long as that call."""
    return is_a(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def is_plain_tensor(value: Any) -> bool:
    """Say whether operators on `value` run no Python code of the user's."""
    kind = type(value)
    return kind in PLAIN_TENSORS or (
        is_a(value, torch.Tensor)
        and kind.__torch_function__ is torch._C._disabled_torch_function_impl
        and "__torch_dispatch__" not in vars(kind)
    )


def metadata_checks(
    constant: Callable[[Any], str], tensor: torch.Tensor, var: str, left_open: frozenset[int] | None = None
) -> list[tuple[str, str]]:
    """Return the conditions, with descriptions, that the variable `var` has the metadata of `tensor`.

    `constant` names objects. The extents `left_open` may be others, and where these are not None the strides.
    """
    rows = [(f"{var}.layout is {constant(tensor.layout)}", " has the same layout")]
    if tensor.layout is torch.strided and not tensor.is_nested:
        with torch._C.DisableTorchFunctionSubclass():
            shape, stride = tuple(tensor.shape), tensor.stride()
        rows = [
            (f"{var}.dtype is {constant(tensor.dtype)}", f".dtype is {tensor.dtype}"),
            *_shape_checks(constant, shape, stride, var, left_open),
            (f"{var}.device == {constant(tensor.device)}", f".device is {tensor.device}"),
            (f"{var}.requires_grad is {tensor.requires_grad}", f".requires_grad is {tensor.requires_grad}"),
            *rows,
        ]
    return rows


def _shape_checks(
    constant: Any, shape: Any, stride: Any, var: str, left_open: frozenset[int] | None
) -> list[tuple[str, str]]:
    if left_open is None:
        return [
            (f"{var}.shape == {constant(shape)}", f".shape == {shape}"),
            (f"{var}.stride() == {constant(stride)}", f".stride() == {stride}"),
        ]
    fixed = [(dim, extent) for dim, extent in enumerate(shape) if dim not in left_open]
    extents = [(f"{var}.shape[{dim}] == {extent}", f".shape[{dim}] == {extent}") for dim, extent in fixed]
    rank = (f"{var}.dim() == {len(shape)}", f" has {len(shape)} dimensions")
    return [rank, *extents]


def signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the metadata that guards hold a tensor to."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (tensor.layout,)
    with torch._C.DisableTorchFunctionSubclass():
        shape = (tuple(tensor.shape), tensor.stride())
        return (*shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout, type(tensor))


def bulk_check(tensors: list[torch.Tensor], left_open: list[frozenset[int] | None]) -> Any:
    """Return ``check(*tensors)`` in C++, if torch has it and it takes these tensors.

    Of tensors whose `left_open` is not None it checks neither those extents nor strides.
    """
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None or not tensors or any(len(signature(item)) == 1 for item in tensors):
        return None
    try:
        pairs = list(zip(tensors, left_open, strict=True))
        sizes = [
            [None if dim in (left or ()) else extent for dim, extent in enumerate(item.shape)]
            for item, left in pairs
        ]
        strides = [[step if left is None else None for step in item.stride()] for item, left in pairs]
        made = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return made.check if made.check(*tensors) else None
    except (TypeError, RuntimeError):
        return None


class Metadata:
    """The metadata of a guard's tensors; torch's check looks at it only where something about them changed.

    checks: Of `bulk_check`, None of no tensors: of the last tensor alone, which compares the state of the
        thread too; of those that each call gives; of those that stay.
    tensors: Those that stay.
    """

    def __init__(self, checks: Sequence[Any], tensors: tuple[torch.Tensor, ...]) -> None:
        (self.one, self.given, self.stay), self.tensors = checks, tensors
        self.ids = frozenset(map(id, tensors))
        self.given_last, self.stay_last = Snapshot(), Snapshot()

    def hold(self, *given: torch.Tensor) -> bool:
        """Tell whether all are what they were, and no two of them are one object."""
        tensors = self.tensors
        return (
            self.one(*(tensors or given)[-1:])
            and (not given or self.given_last.confirm(given, lambda: self._are_apart(given)))
            and (not tensors or self.stay_last.confirm(tensors, lambda: self.stay(*tensors)))
        )

    def _are_apart(self, given: tuple[torch.Tensor, ...]) -> bool:
        return self.given(*given) and self.ids.isdisjoint(map(id, given))


def scripted(function: Any) -> Any:
    """Return a Python function that calls a scripted one: a graph cannot name the latter."""

    def script_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return script_function


def scanning(function: Any, combine: Any) -> Any:
    """Return ``associative_scan`` of one function, as an operator of tensors.

    On a GPU its mode "pointwise" would have torch's own compiler run; "generic" computes the same.
    """

    def associative_scan(xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
        on_gpu = all(leaf.is_cuda for leaf in torch.utils._pytree.tree_leaves(xs))
        return function(combine, xs, dim, reverse, "generic" if on_gpu else combine_mode)

    return associative_scan


def _python_operators() -> dict[Any, str]:
    """Return the Python functions of torch that are one operator each, with their names.

    Those that read values, to refuse some, are followed, and so are those with state.
    """
    followed: set[Any] = {functional.multi_head_attention_forward, functional.gaussian_nll_loss}
    rows: dict[Any, str] = {}
    for home in (functional, torch.functional, torch.Tensor, torch):
        for function in torch.overrides.get_overridable_functions().get(home, ()):
            if is_a(function, types.FunctionType) and function not in followed:
                rows[function] = function.__name__
    return rows


PYTHON_OPERATORS = _python_operators()

_FACTORIES = words(
    "arange empty zeros ones full eye linspace logspace rand randn randint randperm tensor scalar_tensor"
    " tril_indices triu_indices empty_strided hann_window hamming_window bartlett_window blackman_window"
    " kaiser_window range as_tensor rand_like randn_like randint_like empty_like full_like ones_like"
    " zeros_like bernoulli normal poisson complex polar from_numpy"
)


def _native_operators() -> frozenset[Any]:
    """Return torch's native functions that compute tensors from tensors or make them."""
    homes = torch.overrides.get_overridable_functions()
    overridable = [item for home in homes for item in homes[home] if home is not torch.Tensor]
    factories = [getattr(torch, name) for name in _FACTORIES]
    batching = [torch._C._functorch._add_batch_dim, torch._C._functorch._remove_batch_dim]
    items = (*overridable, *factories, *batching)
    return frozenset(item for item in items if type(item) is types.BuiltinFunctionType)


NATIVE_OPERATORS = _native_operators()
_NATIVE_MODULES = frozenset({"torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special"})


def is_torch_native(function: Any) -> bool:
    """Say whether `function` is a native callable of torch that takes and returns tensors."""
    if is_a(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        return function.__objclass__ is torch._C.TensorBase
    if is_a(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.jit.ScriptFunction):
        return True
    if type(function) is not types.BuiltinFunctionType:
        return False
    if getattr(function, "__qualname__", "").startswith("_VariableFunctionsClass."):
        return hasattr(torch, function.__name__)  # torch.fx cannot write the others
    return function in NATIVE_OPERATORS or function.__module__ in _NATIVE_MODULES
