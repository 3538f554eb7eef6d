"""The ways torch has of doing the same work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ladder.cli.measure import Call, copies_for
from tile_types.arrays import torch_dtype

if TYPE_CHECKING:
    import torch

    from ladder.cli.operands import Operands
    from ladder.ir.gemm import Gemm
    from targets import TileDevice
    from tile_types import QuantizedTensor

SIXTEEN_BIT = ("float16", "bfloat16", "float32")
INT4_PACK_GROUPS = (32, 64, 128, 256)
"""Group sizes that torch's int4 kernel takes."""

INNER_K_TILES = 2
INT4_OFFSET = 8
"""torch's int4 kernel computes (code - 8) * scale + zero with unsigned codes."""


def torch_baselines(gemm: Gemm, operands: Operands, device: TileDevice) -> dict[str, list[Call]]:
    """Return calls by name, each on weights that together exceed the cache.

    The linear layer has the decoded weight in the activation's type, bfloat16 if that has 8 bits.
    """
    return dict(_baselines(gemm, operands, device))


def _baselines(gemm: Gemm, operands: Operands, device: TileDevice) -> Iterator[tuple[str, list[Call]]]:
    import torch

    name = gemm.activation if gemm.activation in SIXTEEN_BIT else "bfloat16"
    x = operands.x.to(torch_dtype(name))
    weight = _dense(operands.weight).to(device=x.device, dtype=x.dtype)
    weights = [weight.clone() for _ in range(copies_for(weight.nbytes, device))]
    yield f"{name} F.linear", [partial(torch.nn.functional.linear, x, copy) for copy in weights]
    if _int4_applies(gemm, device):
        yield "_weight_int4pack_mm_for_cpu", _int4_calls(x, operands.weight, device)


def _dense(weight: QuantizedTensor) -> torch.Tensor:
    import torch

    return torch.as_tensor(weight.dequantize("float32"))


def _int4_applies(gemm: Gemm, device: TileDevice) -> bool:
    import torch

    fits = gemm.weight == "int4" and gemm.zero == "none" and gemm.activation == "bfloat16"
    shaped = gemm.group_size in INT4_PACK_GROUPS and gemm.k % gemm.group_size == 0 and gemm.n % 16 == 0
    known = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return fits and shaped and known and not device.is_gpu


def _int4_calls(x: torch.Tensor, weight: QuantizedTensor, device: TileDevice) -> list[Call]:
    import torch

    aten = torch.ops.aten
    codes = torch.as_tensor(weight.codes()).to(torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu((codes + INT4_OFFSET) % 16, INNER_K_TILES)
    scale = torch.as_tensor(weight.scale).T.to(x.dtype)
    scales = torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
    return [
        partial(aten._weight_int4pack_mm_for_cpu, x, packed.clone(), weight.group_size, scales)
        for _ in range(copies_for(packed.nbytes, device))
    ]
