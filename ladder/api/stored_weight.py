"""`StoredWeight`: a quantized weight as a tensor that is dequantized when its values are asked for.

Model code asks layers for the type, the shape or the device of their weight more often than for its
values. In graphs that are captured or traced, the weight is one operator, ``ladder::dequantize``, which is
dropped where nothing takes its values.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _is_alias_of, _len_torch_dispatch_stack  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ladder.api.weight_state import DESCRIPTION, state_of
from ladder.runtime.registered import READ_ONLY, ReadOnly, define
from ladder.runtime.words import version_of
from tile_types import QuantizedTensor
from tile_types.arrays import as_torch
from tile_types.errors import LadderError
from tile_types.quantized import ARRAYS

SCHEMA = "dequantize(Tensor[] arrays, str description, ScalarType dtype, Device device) -> Tensor"

TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Types of dequantized weights."""

_TENSOR: Any = torch.Tensor
METADATA = frozenset(
    (
        *(_TENSOR.dtype.__get__, _TENSOR.shape.__get__, _TENSOR.device.__get__),
        *(_TENSOR.layout.__get__, _TENSOR.ndim.__get__, _TENSOR.requires_grad.__get__),
        *(_TENSOR.is_cpu.__get__, _TENSOR.is_cuda.__get__, _TENSOR.is_meta.__get__),
        *(_TENSOR.is_sparse.__get__, _TENSOR.is_quantized.__get__, _TENSOR.grad.__get__),
        *(_TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.element_size),
        *(_TENSOR.stride, _TENSOR.is_contiguous, _TENSOR.get_device, _TENSOR.__len__),
        *(_TENSOR.is_floating_point, _TENSOR.is_complex),
    )
)
"""Operations that a `StoredWeight` answers without its values."""

IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))
"""Operators of Python that write their first operand."""

SETTERS = (_TENSOR.data.__set__,)
"""What gives a tensor other values than those of its memory; no graph of torch's own capture has it."""

OF_AUTOGRAD = frozenset({"requires_grad_", "detach_", "share_memory_"})
"""Methods named as those that write, which write no values."""

REFUSED = (
    "would write into decoded values, which nobody reads again: copy them, or give the layer another weight"
    " with set_weight; adapters are merged into dequantized models (transformers' model.dequantize())"
)


class Stored(NamedTuple):
    """The arrays of a canonical weight as tensors, and the JSON text that says what they are."""

    arrays: list[torch.Tensor]
    description: str

    @classmethod
    def of(cls, weight: QuantizedTensor) -> Stored:
        """Take a weight apart; its arrays are not copied."""
        kept = weight.to_dict()
        described = {"names": list(kept["arrays"]), "metadata": kept["metadata"]}
        return cls([as_torch(array) for array in kept["arrays"].values()], json.dumps(described))


class StoredWeight(torch.Tensor):
    """The weight ``[N, K]`` of a layer; its values are computed once, where they are first needed.

    Its attributes are also what a state dict has of it: `torch.distributed.checkpoint` looks up every key.
    """

    values: Callable[[], torch.Tensor]
    canonical: Callable[[], QuantizedTensor | None]
    lies_on: torch.device

    @staticmethod
    def __new__(
        cls: type[StoredWeight],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: Callable[[], torch.Tensor],
        canonical: Callable[[], QuantizedTensor | None] = lambda: None,
    ) -> StoredWeight:
        """Return a weight of which `compute` gives the values, and `canonical` the canonical storage."""
        # Of a meta tensor, as it has no memory: `parameter.data = weight` would take what is not there.
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, empty, dispatch_device=True)
        made.lies_on, made.canonical = device, canonical
        made.values = functools.cache(torch.inference_mode(False)(compute))  # a write raises their version
        return made

    def __getattr__(self, name: str) -> Any:
        """Return what a state dict has under a name."""
        whole = vars(self)["canonical"]() if name == DESCRIPTION or name in ARRAYS else None
        kept = {} if whole is None else state_of(whole)
        if name not in kept:
            raise AttributeError(f"the weight of a quantized layer has no attribute {name!r}")
        return kept[name]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for metadata; refuse writes; give everything else the values."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _read(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the operator
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give operators that are called from C++ the values."""
        if func is torch.ops.prim.device.default:
            return args[0].lies_on
        return func(*_with_values(args), **_with_values(kwargs or {}))


def _becomes_parameter(values: DecodedValues, _: bool) -> None:
    """Make a parameter of decoded values: `torch.nn.Parameter` marks so what it is given."""
    values.__class__ = torch.nn.Parameter  # type: ignore[assignment]


class DecodedValues(torch.Tensor):
    """Decoded values of a weight, or a view of them, as ``layer.weight.data`` gives them: not to be written.

    All that has memory of its own is a plain tensor, and a parameter that is made of them may be written.
    Tracers of torch that know no subclasses (`torch.export`, ``make_fx``) are given plain tensors.
    """

    _is_param = property(lambda _: False, _becomes_parameter)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse writes."""
        if torch.compiler.is_compiling():
            if func in SETTERS:
                raise LadderError(f"data {REFUSED}")
            traced = torch.compiler.is_dynamo_compiling()  # code that is traced itself
            given, named = (args, kwargs or {}) if traced else _with_values((args, kwargs or {}))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*given, **named)
        return _read(func, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Return a plain tensor's text."""
        return repr(as_plain(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor."""
        memo[id(self)] = made = copy.deepcopy(as_plain(self), memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let a plain tensor be pickled."""
        return as_plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


DECODED = StoredWeight, DecodedValues
"""Classes of tensors whose values are not to be written."""


def as_plain(values: DecodedValues) -> torch.Tensor:
    """Return decoded values as torch's own class; memory is shared."""
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        return values.as_subclass(torch.Tensor)


def _read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with the values of weights; views of them are not to be written either.

    Raises LadderError if it writes them.
    """
    written = tree_leaves(next(iter((*args, *kwargs.values())), None))  # torch.nn.init gives all by name
    if writes(func) and any(isinstance(each, DECODED) for each in written):
        raise LadderError(f"{func.__name__} {REFUSED}")
    given, named = _with_values(args), _with_values(kwargs)
    held = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DECODED)]
    with torch._C.DisableTorchFunctionSubclass():
        values = [each.values() if isinstance(each, StoredWeight) else each for each in held]
        versions = list(map(version_of, values))
        found = func(*given, **named)
        if versions != list(map(version_of, values)):
            raise LadderError(f"{getattr(func, '__name__', func)} {REFUSED}")
        return tree_map_only(torch.Tensor, lambda each: _view(each, values), found)


def _view(found: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a result, marked as not to be written if it is a view of decoded values."""
    known = type(found) is torch.Tensor and found.layout == torch.strided
    if known and not _len_torch_dispatch_stack() and any(_is_alias_of(found, each) for each in values):
        return found.as_subclass(DecodedValues)
    return found


def writes(method: Any) -> bool:
    """Tell whether a method of tensors, or one of a name, writes the values of its tensor, by its name."""
    name = getattr(method, "__name__", str(method)).partition(".")[0]
    if name == "__set__":  # of a property
        return method.__self__ is _TENSOR.data
    in_place = name[-1] == "_" and name[-2] != "_" and name not in OF_AUTOGRAD
    return in_place or name == "__setitem__" or name in IN_PLACE


def _with_values(given: Any) -> Any:
    """Return arguments with the values of weights; for tracers, which know no subclasses, plain tensors."""
    found = tree_map_only(StoredWeight, lambda weight: weight.values(), given)
    return tree_map_only(DecodedValues, as_plain, found) if _len_torch_dispatch_stack() else found


def _dequantize(
    arrays: Sequence[torch.Tensor], description: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the matrix ``[N, K]`` that the arrays of a canonical weight stand for."""
    told = json.loads(description)
    named = dict(zip(told["names"], arrays, strict=True))
    weight = QuantizedTensor.from_dict({"arrays": named, "metadata": told["metadata"]})
    values: torch.Tensor = weight.dequantize(TYPES[dtype])
    return values.to(device)


def _shape(
    arrays: Sequence[torch.Tensor], description: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(json.loads(description)["metadata"]["shape"], dtype=dtype, device=device)


dequantize: Callable[..., torch.Tensor] = define(SCHEMA, _dequantize, _shape, ("CompositeExplicitAutograd",))
"""``dequantize(arrays, description, dtype, device)``: the registered operator."""

READ_ONLY[dequantize] = ReadOnly(REFUSED, DecodedValues)
