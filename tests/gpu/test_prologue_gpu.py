"""Norms as prologues of products, and small chains as one launch, on a GPU: as by kernels of their own."""

from __future__ import annotations

from typing import Any

import pytest

import ladder
from ladder import knobs

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


class Layer(nn.Module):
    """Sums, their norms, and products of these: of four matrices side by side, and of a gate."""

    def __init__(self, width: int, norm: Any) -> None:
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.side = nn.ModuleList([nn.Linear(width, 256, bias=False) for _ in range(4)])
        self.back = nn.Linear(1024, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        rows = self.first(x)
        x = x + self.back(torch.cat([layer(rows) for layer in self.side], -1))
        rows = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))


def compiled(model: Any, given: list[Any], **given_knobs: bool) -> tuple[set[str], list[Any]]:
    """Return the kinds of a plan's steps, and what it gives once it is recorded."""
    with knobs.override(found_graphs=False, **given_knobs), torch.no_grad():
        fast = ladder.compile(model)
        for _ in range(4):
            found = fast(*given)
    kinds = {step.part.kind for step in fast.models[-1].executable.plan.steps}
    return kinds, [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("weight", ["int4", "nf4", "float16"])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("rows", [1, 2])
def test_prologues(weight: str, norm: Any, rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(1024, norm), Layer(1024, norm)).half().eval().cuda().requires_grad_(False)
    if weight != "float16":
        ladder.quantize_(model, weight, group_size=64)
    x = torch.randn(1, rows, 1024, device="cuda").half()
    kinds, (found,) = compiled(model, [x], prologues=True)
    _, (apart,) = compiled(model, [x], prologues=False)
    assert "prologue" in kinds
    assert (found - apart).norm() <= 2e-3 * apart.norm()
