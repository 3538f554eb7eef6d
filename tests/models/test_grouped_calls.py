"""Grouped products of programs: calls of ours where the device has kernels, the program's own elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ladder.frontend.torch_fx import import_fx
from ladder.runtime.model.grouped_calls import PRODUCT
from ladder.runtime.model.prepared import prepare
from targets import get_device

grouped_mm = torch.ops.aten._grouped_mm.default
Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def targets_of(program: Program, *given: torch.Tensor, device: str = "cuda/sm_90a") -> list[str]:
    """Return what a program's plan for a device calls."""
    module = torch.fx.symbolic_trace(program)
    parts = prepare(import_fx(module, list(given), join=True), get_device(device)).parts
    calls = (node for part in parts for node in part.graph.nodes if node.operator == "call")
    return [str(dict(node.attributes)["target"]) for node in calls]


def operands(k: int = 64, n: int = 32, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    return torch.randn(6, k).to(dtype), torch.randn(3, n, k).to(dtype), ends


def turned(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped_mm(x, w.transpose(-2, -1), ends) * 2.0


def fallback(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback.default(x, w.transpose(-2, -1), ends) * 2.0


def test_bfloat16_on_gpus_is_ours() -> None:
    assert targets_of(turned, *operands()) == [PRODUCT]
    assert targets_of(turned, *operands(), device="cuda/sm_80") == [PRODUCT]


def test_float16_of_transformers_is_ours() -> None:
    pytest.importorskip("transformers.integrations.moe")
    assert targets_of(fallback, *operands(dtype=torch.float16)) == [PRODUCT]


@pytest.mark.parametrize("device", ["cuda/sm_70", "rocm/gfx942"])
def test_devices_without_kernels_call_the_programs_own(device: str) -> None:
    assert targets_of(turned, *operands(), device=device) == ["aten._grouped_mm.default"]


def test_what_kernels_do_not_read_is_the_programs_own() -> None:
    pytest.importorskip("transformers.integrations.moe")
    own = ["transformers.grouped_mm_fallback.default"]
    assert targets_of(fallback, *operands(dtype=torch.float32)) == own
    assert targets_of(fallback, *operands(k=63)) == own
    assert targets_of(fallback, *operands(n=30)) == own


def test_sums_of_another_type_are_the_programs_own() -> None:
    def wide(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_mm(x, w.transpose(-2, -1), ends, out_dtype=torch.bfloat16) * 2.0

    assert targets_of(wide, *operands()) == ["aten._grouped_mm.default"]
