"""Convolutions whose kernels are checked, on the simulator and on GPUs, with torch's result in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

import ladder
from ladder.api.problem import gemm_for
from ladder.ir.windows import Windows
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import PackedWeight, pack
from schedules.schedule import GpuSchedule, Plan
from targets import get_device
from tile_types.arrays import torch_dtype

MMA = GpuSchedule("mma", 16, stages=2, warps=4)
WGMMA = GpuSchedule("wgmma", 32, stages=3, warps=4)
TCGEN05 = GpuSchedule("tcgen05", 32, 128, stages=3, warps=4)


@dataclass(frozen=True)
class Case:
    """A convolution and the schedule that is simulated."""

    windows: Windows
    channels: int
    outputs: int
    image: tuple[int, int, int]
    schedule: GpuSchedule
    weight: str = "float16"
    device: str = "cuda/sm_90a"
    options: dict[str, Any] = field(default_factory=dict)
    residual: bool = False
    factor: bool = False


CASES = {
    "3x3 wgmma": Case(
        Windows((3, 3), padding=(1, 1)), 64, 40, (2, 5, 7),
        GpuSchedule("wgmma", 32, tile_k=128, stages=2, warps=4),
    ),
    "3x3 stride 2, residual": Case(
        Windows((3, 3), (2, 2), (1, 1)), 128, 64, (2, 7, 5), WGMMA, "int4", residual=True,
        options={"group_size": 64, "bias": True, "epilogue": ("relu",)},
    ),
    "residual in several turns, tiles in turn": Case(
        Windows((1, 1), (2, 2)), 64, 136, (1, 43, 43),
        GpuSchedule("wgmma", 256, 128, stages=4, warps=8, persistent=True), residual=True,
        options={"bias": True, "epilogue": ("relu",)},
    ),
    "residual, N = 2 mod 4": Case(
        Windows((1, 1), (2, 1)), 64, 58, (1, 19, 15), GpuSchedule("wgmma", 128, 64, stages=3, warps=4),
        residual=True, options={"bias": True, "epilogue": ("relu",)},
    ),
    "N = 4 mod 8": Case(
        Windows((1, 1), (2, 1)), 64, 116, (1, 15, 15), GpuSchedule("wgmma", 128, 64, stages=3, warps=4),
        options={"bias": True, "epilogue": ("relu",)},
    ),
    "residual, odd N, float32": Case(
        Windows((1, 1), (2, 1)), 64, 71, (1, 9, 15), GpuSchedule("wgmma", 64, 64, stages=3, warps=4),
        residual=True, options={"output": "float32"},
    ),
    "residual, even N, float32": Case(
        Windows((1, 1), (2, 1)), 64, 70, (1, 9, 15), GpuSchedule("wgmma", 64, 64, stages=3, warps=4),
        residual=True, options={"output": "float32"},
    ),
    "residual, N = 4 mod 8, float32": Case(
        Windows((1, 1), (2, 1)), 64, 76, (1, 9, 15), GpuSchedule("wgmma", 64, 64, stages=3, warps=4),
        residual=True, options={"output": "float32"},
    ),
    "residual, odd N, split K": Case(
        Windows((3, 3), padding=(1, 1)), 64, 79, (1, 9, 9),
        GpuSchedule("wgmma", 64, 64, stages=3, warps=4, split_k=2), residual=True,
    ),
    "residual, split K": Case(
        Windows((3, 3), padding=(1, 1)), 64, 72, (1, 12, 9),
        GpuSchedule("wgmma", 128, 64, stages=3, warps=4, split_k=2), residual=True,
        options={"epilogue": ("relu",)},
    ),
    "residual, shared tiles": Case(
        Windows((1, 1), (2, 1)), 256, 72, (1, 31, 27),
        GpuSchedule("wgmma", 128, 64, stages=4, warps=4, persistent=True, stream_k=True), residual=True,
    ),
    "3x3 dilated, split K": Case(
        Windows((3, 2), (1, 2), (2, 1), (2, 1)), 64, 64, (1, 6, 9),
        GpuSchedule("wgmma", 16, tile_k=128, stages=2, warps=4, split_k=2), "nf4", options={"group_size": 64},
    ),
    "groups, cluster": Case(
        Windows((3, 3), padding=(1, 1), groups=2), 64, 256, (1, 4, 6),
        GpuSchedule("wgmma", 16, 64, stages=3, warps=4, cluster=2), "int8",
    ),
    "persistent, bfloat16": Case(
        Windows((1, 1), (2, 2)), 128, 70, (2, 9, 9),
        GpuSchedule("wgmma", 8, 64, stages=4, warps=4, persistent=True), "int4", factor=True,
        options={"activation": "bfloat16"},
    ),
    "int8 x int8, wgmma": Case(
        Windows((3, 3), padding=(1, 1)), 128, 64, (1, 4, 5),
        GpuSchedule("wgmma", 16, tile_k=128, stages=3, warps=4, placement="accumulator"), "int8",
        options={"activation": "int8", "token_scale": False},
    ),
    "int4 x int8, mma": Case(
        Windows((3, 3), (2, 2), (1, 1)), 32, 64, (1, 7, 5),
        GpuSchedule("mma", 16, stages=2, warps=4, placement="accumulator"), "int4",
        options={"activation": "int8", "token_scale": False, "group_size": 32},
    ),
    "3x3 stride 2 tcgen05, residual": Case(
        Windows((3, 3), (2, 2), (1, 1)), 128, 64, (2, 7, 5), TCGEN05, "int4", "cuda/sm_100a", residual=True,
        options={"group_size": 64, "bias": True, "epilogue": ("relu",)},
    ),
    "groups, tcgen05, cluster": Case(
        Windows((3, 3), padding=(1, 1), groups=2), 64, 512, (1, 4, 6),
        GpuSchedule("tcgen05", 16, 128, 128, stages=2, warps=8, cluster=2), "float16", "cuda/sm_100a",
        factor=True,
    ),
    "7x7 of 8 channels, mma": Case(Windows((7, 7), (2, 2), (3, 3)), 8, 24, (2, 9, 11), MMA),
    "3x3 of 40 channels, sm_80": Case(
        Windows((3, 3), padding=(1, 1)), 40, 64, (1, 5, 6), MMA, "int4", "cuda/sm_80",
        residual=True, factor=True,
        options={"group_size": 48, "bias": True, "epilogue": ("silu",)},
    ),
    "groups of 24 channels and 40 features, mma": Case(
        Windows((3, 3), (2, 1), (1, 1), groups=3, features=40), 24, 192, (2, 6, 7),
        GpuSchedule("mma", 32, tile_k=128, stages=3, warps=4), "bfloat16", residual=True,
        options={"activation": "bfloat16", "output": "bfloat16", "bias": True, "epilogue": ("relu",)},
    ),
    "groups of 72 features by two tiles, mma": Case(
        Windows((3, 3), padding=(1, 1), groups=2, features=72), 72, 256, (1, 5, 6),
        GpuSchedule("mma", 16, 128, stages=2, warps=8),
    ),
    "groups of 16 channels, mma": Case(
        Windows((3, 3), (2, 1), (1, 1), (1, 2), groups=4), 16, 256, (1, 6, 7),
        GpuSchedule("mma", 32, tile_k=128, stages=3, warps=4), "int8",
    ),
}  # fmt: skip

AMD = {
    "3x3, split K": Case(
        Windows((3, 3), padding=(1, 1)), 64, 40, (2, 5, 7),
        GpuSchedule("mfma", 32, 64, 64, stages=2, warps=4, split_k=2), device="rocm/gfx942",
    ),
    "stride 2, residual": Case(
        Windows((3, 3), (2, 2), (1, 1)), 24, 72, (2, 7, 5), GpuSchedule("mfma", 32, 64, stages=2, warps=4),
        "int4", "rocm/gfx90a", residual=True, options={"group_size": -1, "bias": True, "epilogue": ("relu",)},
    ),
    "points, bfloat16": Case(
        Windows((1, 1), (2, 2)), 128, 70, (2, 9, 9), GpuSchedule("mfma", 32, 64, stages=2, warps=4),
        "int4", "rocm/gfx950", {"activation": "bfloat16"}, factor=True,
    ),
    "int8 x int8, dilated": Case(
        Windows((3, 2), (1, 2), (2, 1), (2, 1)), 32, 64, (1, 6, 9),
        GpuSchedule("wmma", 32, 64, stages=2, warps=4, placement="accumulator"), "int8", "rocm/gfx1100",
        {"activation": "int8", "token_scale": False},
    ),
    "groups": Case(
        Windows((3, 3), padding=(1, 1), groups=2), 64, 256, (1, 4, 6),
        GpuSchedule("wmma_split", 32, 64, stages=2, warps=4), "int8", "rocm/gfx1201",
    ),
    "groups, weights padded": Case(
        Windows((3, 3), (2, 1), (6, 6), (2, 1), groups=3), 24, 96, (1, 13, 7),
        GpuSchedule("mfma", 32, 64, 64, stages=2, warps=4, split_k=4, placement="accumulator", warp_rows=32),
        "int4", "rocm/gfx90a", {"group_size": 32},
    ),
    "rows, factor": Case(
        Windows((1, 1)), 96, 40, (2, 3, 4), GpuSchedule("mfma", 32, 64, stages=2, warps=4), "int4",
        "rocm/gfx942", factor=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """Random operands of a case."""

    request: Request
    x: torch.Tensor
    packed: PackedWeight
    bias: torch.Tensor | None
    factor: torch.Tensor | None
    residual: torch.Tensor | None
    expected: torch.Tensor


def draw(case: Case) -> Drawn:
    """Draw the operands and compute the result in float64."""
    torch.manual_seed(0)
    at, device = case.windows, get_device(case.device)
    options = {
        "activation": "float16",
        "windows": None if at.are_rows else at,
        "residual": case.residual,
        **case.options,
    }
    gemm = gemm_for(case.outputs, at.points * case.channels, case.weight, **options)
    gemm = replace(gemm, factor=case.factor)
    matrix = torch.randn(case.outputs, gemm.k) / gemm.k**0.5
    weight = ladder.quantize(matrix, case.weight, group_size=case.options.get("group_size"))
    spread = 40 if gemm.activation == "int8" else 1
    x = (torch.randn(*case.image, case.channels * at.groups) * spread).to(torch_dtype(gemm.activation))
    bias = torch.randn(gemm.columns).to(x.dtype) if gemm.bias else None
    factor = torch.rand(gemm.columns) + 0.5 if gemm.factor else None
    shape = (case.image[0], *at.extents(*case.image[1:]), gemm.columns)
    residual = torch.randn(shape).to(torch_dtype(gemm.output)) if gemm.residual else None
    expected = _expected(case, x, weight, factor, bias, residual)
    request = Request(gemm, device.name, Plan(((ANY_M, case.schedule),)))
    return Drawn(request, x, pack(gemm, device, weight), bias, factor, residual, expected)


def _expected(
    case: Case, x: torch.Tensor, weight: Any, factor: Any, bias: Any, residual: Any
) -> torch.Tensor:
    """Return torch's convolution of the decoded weight in float64, channels last."""
    at = case.windows
    kernel = torch.as_tensor(weight.dequantize()).double().reshape(case.outputs, *at.kernel, case.channels)
    features = at.features or case.outputs // at.groups  # what lies behind those of a group is not multiplied
    kernel = kernel.unflatten(0, (at.groups, -1))[:, :features].flatten(0, 1)
    kernel = kernel if factor is None else kernel * factor.double()[:, None, None, None]
    added = None if bias is None else bias.double()
    y = torch.nn.functional.conv2d(
        x.double().permute(0, 3, 1, 2), kernel.permute(0, 3, 1, 2), added, at.stride, at.padding,
        at.dilation, at.groups,
    ).permute(0, 2, 3, 1)  # fmt: skip
    y = y if residual is None else y + residual.double()
    for name in case.options.get("epilogue", ()):
        y = getattr(torch.nn.functional, name)(y)
    return y
