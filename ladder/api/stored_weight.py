"""`StoredWeight`: a quantized weight as a tensor that is dequantized when its values are asked for.

Model code asks layers for the type, the shape or the device of their weight more often than for its
values. In graphs that are captured or traced, the weight is one operator, ``ladder::dequantize``, which is
dropped where nothing takes its values.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from ladder.runtime.registered import define
from tile_types import QuantizedTensor
from tile_types.arrays import as_torch
from tile_types.errors import LadderError

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

OF_AUTOGRAD = frozenset({"requires_grad_", "detach_", "share_memory_"})
"""Methods named as those that write, which write no values."""


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
    """The weight ``[N, K]`` of a layer; its values are computed once, where they are first needed."""

    values: Callable[[], torch.Tensor]
    lies_on: torch.device

    @staticmethod
    def __new__(
        cls: type[StoredWeight],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: Callable[[], torch.Tensor],
    ) -> StoredWeight:
        """Return a weight of which `compute` gives the values."""
        # Of a meta tensor, as it has no memory: `parameter.data = weight` would take what is not there.
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, empty, dispatch_device=True)
        made.lies_on = device
        made.values = functools.cache(compute)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for metadata; refuse writes; give everything else the values."""
        written = next(iter((*args, *(kwargs or {}).values())), None)  # torch.nn.init gives all by name
        if _writes(func) and isinstance(written, StoredWeight):
            raise LadderError(
                f"{func.__name__} would write into decoded values, which nobody reads again: give the layer"
                " another weight with set_weight; adapters are merged into dequantized models (transformers'"
                " model.dequantize())"
            )
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_with_values(args), **_with_values(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the operator
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give operators that are called from C++ the values."""
        if func is torch.ops.prim.device.default:
            return args[0].lies_on
        return func(*_with_values(args), **_with_values(kwargs or {}))


def _writes(method: Any) -> bool:
    """Tell whether a method of tensors writes the values of its tensor, by its name."""
    name = method.__name__
    if name == "__set__":  # of a property
        return method.__self__ is _TENSOR.data
    in_place = name[-1] == "_" and name[-2] != "_" and name not in OF_AUTOGRAD
    return in_place or name == "__setitem__" or name in IN_PLACE


def _with_values(given: Any) -> Any:
    return tree_map_only(StoredWeight, lambda weight: weight.values(), given)


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
