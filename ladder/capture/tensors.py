"""Tensors under capture: metadata guards, what an operator did, which calls are operators."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
import torch.overrides
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.capture.indices import Use, uses
from ladder.capture.kinds import is_a
from ladder.capture.words import words

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

METADATA = frozenset(
    words(
        "shape ndim dtype device requires_grad is_leaf layout is_cuda itemsize nbytes is_sparse is_quantized"
        " is_mkldnn is_meta is_cpu is_nested is_mps is_xpu is_complex is_floating_point names name"
        " size dim stride numel nelement element_size is_contiguous storage_offset ndimension"
        " is_signed is_inference is_conj is_neg get_device __len__ type is_same_size is_shared is_pinned"
        " is_distributed is_coalesced has_names is_sparse_csr is_xla is_vulkan is_ipu is_mtia is_maia"
        " is_tensor is_storage result_type can_cast promote_types broadcast_shapes _is_view"
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

_RISKY = words(
    "index gather scatter embedding take multinomial nll_loss cholesky linalg lu_ inverse bernoulli ctc"
    " _local_scalar_dense nonzero masked repeat_interleave bincount _assert put searchsorted histogram"
    " one_hot"
)
"""Beginnings of the names of aten operators that may raise, or not, depending on values."""

READS_A_NUMBER = frozenset(words("item __int__ __float__ __bool__ __index__"))
"""Methods of a tensor of one element that give it as a number."""

STATE_WRITES = frozenset(
    getattr(torch._C, name)
    for name in (
        "_set_grad_enabled",
        "set_autocast_enabled",
        "set_autocast_dtype",
        "set_autocast_cache_enabled",
        "autocast_increment_nesting",
        "autocast_decrement_nesting",
        "clear_autocast_cache",
        "set_anomaly_enabled",
    )
    if hasattr(torch._C, name)
) | {
    getattr(torch, name)
    for name in (
        "set_autocast_enabled",
        "set_autocast_dtype",
        "set_autocast_cache_enabled",
        "autocast_increment_nesting",
        "autocast_decrement_nesting",
        "clear_autocast_cache",
    )
}
"""Natives that change the global state of torch; they become nodes of the graph, in order."""

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
            " _get_privateuse1_backend_name"
        )
        if hasattr(torch._C, name)
    }
)
"""Natives and functions that only read the state that `torch_state` guards, or what never changes."""

STATE_READS = STATE_GUARDED | {
    *(torch._C._get_default_device, torch._C._get_cudnn_enabled, torch._C._get_mkldnn_enabled),
    torch.is_deterministic_algorithms_warn_only_enabled,
}
"""Those and others, whose answers are guarded one by one."""


NO_EFFECT = frozenset({torch._C._log_api_usage_once, torch._C._log_api_usage_metadata})
"""Natives that only count uses."""


OVERRIDE_CHECKS = frozenset(
    {torch._C._has_torch_function, torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic}
)


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
    getattr(torch._C, "_is_any_autocast_enabled", autocast_state),
)
"""What gives the global state on which the meaning of operators depends; the last, whether autocast is on."""


def torch_state() -> tuple[Any, ...]:
    """Return the answers of `STATE`."""
    return tuple(read() for read in STATE)


def restore_state(grad: bool, autocast: tuple[Any, ...]) -> None:
    """Undo what nodes of an interrupted graph did to the state; `autocast` is of `autocast_state`."""
    torch._C._set_grad_enabled(grad)
    count = len(_AUTOCAST_DEVICES)
    for device, enabled, dtype in zip(_AUTOCAST_DEVICES, autocast, autocast[count:], strict=False):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(autocast[-1])


Memory = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
"""Storages, each with a copy of what it held."""


def saved_memory(written: Sequence[torch.Tensor]) -> Memory:
    """Return what lies in the memory of tensors that a graph writes, so that a failed run can be undone."""
    storages = [tensor.untyped_storage() for tensor in written]
    return [(storage, storage.clone()) for storage in storages]  # type: ignore[no-untyped-call]


def restore_memory(saved: Memory) -> None:
    """Put back what `saved_memory` gave."""
    for storage, before in saved:
        storage.copy_(before)


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


class Strides(NamedTuple):
    """How the elements of a tensor lie.

    `order`: its axes from the outermost to the innermost in memory, where they lie without gaps; else None.
    `repeated`: the axes along which it is one element. `steps`, `offset`, `reach`: strides, the number of the
    first element and of all in its memory.
    """

    order: tuple[int, ...] | None
    repeated: frozenset[int]
    steps: tuple[int, ...]
    offset: int
    reach: int


class Aliasing(NamedTuple):
    """What shares memory among inputs and results, in order, and how results lie.

    `memory`, `objects`: for each the first that lies in the same storage, or is the same object.
    `writes`: whether inputs are written. `strides`: of each result, None for what is no strided tensor.
    `versions`: by how much that of each input grows, then that of each result; None where there is none.
    """

    memory: tuple[int, ...]
    objects: tuple[int, ...]
    writes: bool
    strides: tuple[Strides | None, ...]
    versions: tuple[int | None, ...]


def flat(value: Any) -> list[Any]:
    """Return the items of nested tuples and lists."""
    return [leaf for item in value for leaf in flat(item)] if is_a(value, tuple | list) else [value]


def aliasing_of(
    inputs: Sequence[Any],
    results: Any,
    *,
    writes: bool = False,
    before: Sequence[int | None] | None = None,
    late: Mapping[int, int] | None = None,
) -> Aliasing:
    """Return what shares memory.

    `before`: the versions of the inputs before the results were computed; `late`: how often storages were
    written since.
    """
    given = flat(results)
    values = [*inputs, *given]
    memory, objects = [_memory_of(value) for value in values], [*map(id, values)]
    counts = [*map(version_of, values)]
    missed = [late.get(where, 0) for where in memory] if late else [0] * len(values)
    after = [None if count is None else count - more for count, more in zip(counts, missed, strict=True)]
    grown = [
        None if old is None or new is None else new - old
        for old, new in zip(after[: len(inputs)] if before is None else before, after, strict=False)
    ]
    return Aliasing(
        tuple(map(memory.index, memory)),
        tuple(map(objects.index, objects)),
        writes,
        tuple(map(strides_of, given)),
        (*grown, *after[len(inputs) :]),
    )


def version_of(value: Any) -> int | None:
    """Return how often a tensor was written; None where that is not counted."""
    counted = is_a(value, torch.Tensor) and value.layout is torch.strided and not value.is_inference()
    return value._version if counted else None


def strides_of(value: Any) -> Strides | None:
    """Return how a tensor lies; symbols count as what they were at first."""
    if not is_a(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    shape, steps = [*map(hint_of, value.shape)], tuple(map(hint_of, value.stride()))
    reach = hint_of(value.untyped_storage().nbytes()) // value.element_size()
    repeated = frozenset(axis for axis, step in enumerate(steps) if step == 0 and shape[axis] > 1)
    once = [1 if axis in repeated else size for axis, size in enumerate(shape)]
    return Strides(dense_order(once, steps), repeated, steps, hint_of(value.storage_offset()), reach)


def hint_of(extent: Any) -> int:
    """Return a number, or the one that a symbol stood for at first."""
    return extent if is_a(extent, int) else int(extent.node.hint)


def dense_order(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes of a tensor from the outermost on; None if its elements do not lie side by side."""
    order = sorted(range(len(shape)), key=lambda axis: (-steps[axis], -shape[axis], axis))
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1:
            if steps[axis] != expected:
                return None
            expected *= shape[axis]
    return tuple(order)


def _memory_of(value: Any) -> int:
    strided = is_a(value, torch.Tensor) and value.layout is torch.strided
    return storage_of(value) if strided else -id(value)


def modes_are_active() -> bool:
    """Say whether a Python mode watches each operator; capture then leaves the call alone."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def is_plain_tensor(value: Any) -> bool:
    """Say whether operators on `value` run no Python code of the user's."""
    kind = type(value)
    return kind in PLAIN_TENSORS or (
        is_a(value, torch.Tensor)
        and kind.__torch_function__ is torch._C._disabled_torch_function_impl
        and "__torch_dispatch__" not in vars(kind)
    )


def metadata_checks(
    constant: Callable[[Any], str],
    tensor: torch.Tensor,
    var: str,
    left_open: frozenset[int] = frozenset(),
) -> list[tuple[str, str]]:
    """Return the conditions, with descriptions, that the variable `var` has the metadata of `tensor`.

    `constant` names objects. The extents `left_open` may be others; the tensor is contiguous then.
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
    constant: Any, shape: Any, stride: Any, var: str, left_open: frozenset[int]
) -> list[tuple[str, str]]:
    if not left_open:
        return [
            (f"{var}.shape == {constant(shape)}", f".shape == {shape}"),
            (f"{var}.stride() == {constant(stride)}", f".stride() == {stride}"),
        ]
    fixed = [(dim, extent) for dim, extent in enumerate(shape) if dim not in left_open]
    extents = [(f"{var}.shape[{dim}] == {extent}", f".shape[{dim}] == {extent}") for dim, extent in fixed]
    rank = (f"{var}.dim() == {len(shape)}", f" has {len(shape)} dimensions")
    return [rank, *extents, (f"{var}.is_contiguous()", " is contiguous")]


def signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the metadata that guards hold a tensor to."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (tensor.layout,)
    with torch._C.DisableTorchFunctionSubclass():
        shape = (tuple(tensor.shape), tensor.stride())
        return (*shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout, type(tensor))


def bulk_check(tensors: list[torch.Tensor], left_open: list[frozenset[int]]) -> Any:
    """Return ``check(*tensors)`` in C++, if torch has it and it takes these tensors.

    Of tensors with extents in `left_open` it does not check those, nor strides.
    """
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None or not tensors or any(len(signature(item)) == 1 for item in tensors):
        return None
    try:
        pairs = list(zip(tensors, left_open, strict=True))
        sizes = [
            [None if dim in left else extent for dim, extent in enumerate(item.shape)] for item, left in pairs
        ]
        strides = [[None if left else step for step in item.stride()] for item, left in pairs]
        made = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return made.check if made.check(*tensors) else None
    except (TypeError, RuntimeError):
        return None


class Monitor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches which aten operators a call runs.

    ``dynamic``: the shape of a result depends on values. ``risks``: why it may raise depending on values,
    by indices or (None) otherwise.
    ``mutated``: the storages written; ``counted``: how often versions say so.
    ``random``: a generator advanced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dynamic = self.random = self.shape_depends = False
        self.read: list[torch.Tensor] = []
        self.risks: list[list[Use] | None] = []
        self.mutated: set[int] = set()
        self.counted: Counter[int] = Counter()
        self.operators = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the mode undecorated: torch's decorator would import the whole of ``torch._dynamo``."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note `func`, then run it."""
        kwargs = kwargs or {}
        tags, name = func.tags, func._schema.name.removeprefix("aten::")
        self.operators += 1
        depends = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        self.dynamic |= depends and not _takes_numbers(name, args)
        if name == "_local_scalar_dense":
            self.read.append(args[0])
        else:
            self.shape_depends |= depends and not _takes_numbers(name, args)
        self.random |= torch.Tag.nondeterministic_seeded in tags
        if any(name.lstrip("_").startswith(word.lstrip("_")) for word in _RISKY):
            self.risks.append(uses(name, args))
        for place, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or ("batch_norm" in name and argument.name.startswith("running")):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self._note_written(value, int(written))
        return func(*args, **kwargs)

    def _note_written(self, value: Any, times: int) -> None:
        for item in value if is_a(value, list | tuple) else [value]:
            if is_a(item, torch.Tensor) and item.layout is torch.strided:
                self.mutated.add(storage_of(item))
                self.counted[storage_of(item)] += times


def _takes_numbers(name: str, args: Sequence[Any]) -> bool:
    """Say whether an operator is ``x[indices]`` by integers, whose shape follows from those of operands."""
    masks = (torch.bool, torch.uint8)
    return name == "index" and not any(index is not None and index.dtype in masks for index in args[1])


def scripted(function: Any) -> Any:
    """Return a Python function that calls a scripted one: a graph cannot name the latter."""

    def script_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return script_function


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key of the memory behind `tensor`."""
    return int(tensor.untyped_storage()._cdata)


def scanning(function: Any, combine: Any) -> Any:
    """Return ``associative_scan`` of one function, as an operator of tensors."""

    def associative_scan(*args: Any, **kwargs: Any) -> Any:
        return function(combine, *args, **kwargs)

    return associative_scan


def _python_operators() -> dict[Any, str]:
    """Return the Python functions of torch that are one operator each, with their names."""
    with_state = {functional.multi_head_attention_forward}
    rows: dict[Any, str] = {}
    for home in (functional, torch.functional, torch.Tensor, torch):
        for function in torch.overrides.get_overridable_functions().get(home, ()):
            if is_a(function, types.FunctionType) and function not in with_state:
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
    return frozenset(item for item in (*overridable, *factories) if type(item) is types.BuiltinFunctionType)


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
    named = getattr(function, "__qualname__", "").startswith("_VariableFunctionsClass.")
    return named or function in NATIVE_OPERATORS or function.__module__ in _NATIVE_MODULES
