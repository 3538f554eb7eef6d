"""Linear layers that quantization replaces: torch's own, and transformers' `Conv1D` (GPT-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tile_types.arrays import as_torch
from tile_types.errors import DTypeError, LadderError, ShapeError, require_kind
from tile_types.quantized import QuantizedTensor, check_quantized
from tile_types.shards import ROWS, rows_of

TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")
"""Module and name of the class whose weight is ``[K, N]``: no import of transformers is needed to tell it."""


OTHERS = (("transformers.models.falcon.modeling_falcon", "FalconLinear"),)
"""Classes derived from torch's that compute the same."""

NOT_KEPT = (
    "cannot repack for {} and {}: the canonical weight was not kept, or the packed one was written since;"
    " build the module with keep_canonical=True"
)
NOT_SET = "the weight of a quantized layer is no parameter: give the layer a quantized one with set_weight"


def is_linear(module: torch.nn.Module) -> bool:
    """Tell a layer that is just ``x W^T + b``: of these classes themselves, since others may do more."""
    return type(module) is torch.nn.Linear or _class(module) in (TRANSPOSED, *OTHERS)


def is_transposed(module: torch.nn.Module) -> bool:
    """Tell a linear layer whose weight is ``[K, N]``."""
    return _class(module) == TRANSPOSED


def _class(module: torch.nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def matrix_of(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as a layer stores it as the matrix ``[N, K]``."""
    return weight.T.contiguous() if is_transposed(module) else weight


def matrix_and_bias(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the matrix ``[N, K]`` and the bias of a linear layer.

    Raises DTypeError if a module has none.
    """
    require_kind(module, torch.nn.Module, "from_linear takes a linear layer")
    weight: Any = getattr(module, "weight", None)
    bias: Any = getattr(module, "bias", False)
    biased = bias is None or isinstance(bias, torch.Tensor)
    if not (isinstance(weight, torch.Tensor) and weight.ndim == 2 and biased):
        raise DTypeError(
            "from_linear takes a linear layer, a module that has a matrix `weight` and a `bias`, got"
            f" {type(module).__name__}; ladder.quantize_ replaces the linear layers inside a model"
        )
    return matrix_of(module, weight), bias


def extents_of(module: Any) -> tuple[int, int]:
    """Return N and K, the outputs and inputs of a linear layer."""
    if is_transposed(module):
        return int(module.nf), int(module.nx)
    return int(module.out_features), int(module.in_features)


def on_meta(layer: Any, x: Any) -> torch.Tensor:
    """Return the result of a quantized layer that has no weight: on the meta device it needs none.

    Raises LadderError elsewhere.
    """
    if layer._where.type != "meta" or not isinstance(x, torch.Tensor) or x.device.type != "meta":
        name = type(layer).__name__
        raise LadderError(f"this {name} has no weight yet: call load_state_dict or set_weight first")
    shape = layer.out_features, layer.in_features
    weight = torch.empty(shape, dtype=layer.dtype, device="meta")
    return torch.nn.functional.linear(x, weight)


def on_mesh(layer: Any, x: Any) -> torch.Tensor:
    """Return the result of a quantized layer for a `DTensor`: it lies over the mesh as x does.

    Every process multiplies by the whole weight; features that x has in parts are gathered before.
    `ladder.integrations.distributed.ColwiseLinear` and ``RowwiseLinear`` cut the weight.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    last = x.ndim - 1
    rows = [
        each if isinstance(each, Shard) and each.dim % x.ndim != last else Replicate()
        for each in x.placements
    ]
    local = x.redistribute(placements=rows).to_local()
    y = layer.multiply(local, [*map(_whole, layer.arrays)], _whole(layer.bias), _whole(layer.columns))
    shape = torch.Size((*x.shape[:-1], layer.out_features))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, x.device_mesh, rows, run_check=False, shape=shape, stride=strides)


def _whole(held: Any) -> Any:
    """Return all of a tensor that may lie over a mesh; None stays None."""
    return held.full_tensor() if hasattr(held, "full_tensor") else held


def device_beside_cpu(weight: QuantizedTensor) -> torch.device | None:
    """Return the device that holds a quantized weight; None if that is the CPU."""
    device = as_torch(weight.storage).device
    return None if device.type == "cpu" else device


def require_parts(weight: QuantizedTensor, bias: torch.Tensor | None) -> None:
    """Raise DTypeError, ShapeError unless a weight is quantized and a bias None or one number per output."""
    check_quantized(weight)
    if bias is not None:
        require_kind(bias, torch.Tensor, "bias must be a torch tensor")
        if bias.shape != weight.shape[:1]:
            raise ShapeError(f"bias must have shape [{weight.shape[0]}], got {list(bias.shape)}")


def form_of(weight: QuantizedTensor) -> dict[str, Any]:
    """Return the options of a layer's constructor that say how a quantized weight is stored."""
    return {
        "weight": weight.ttype.name,
        "group_size": min(weight.block[1], weight.shape[1]),
        "zero": weight.zero_kind if weight.offset is None else "float",
    }


def bias_shard(
    bias: torch.Tensor | None, axis: int, index: int, count: int, parts: Sequence[int] | None = None
) -> torch.Tensor | None:
    """Return what device ``index`` of ``count`` adds of a bias [N]; see `ladder.Linear.shard`."""
    if bias is None or axis != ROWS:
        return bias if index == 0 else None
    return bias[rows_of(parts or (bias.shape[0],), index, count)]
