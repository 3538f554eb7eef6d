"""Products of rows with the matrix of their group: PyTorch's own instead of transformers' loop in Python."""

import pytest
import torch

import ladder
from ladder.runtime import grouped

moe = pytest.importorskip("transformers.integrations.moe")
pytestmark = pytest.mark.skipif(grouped.by_torch is None, reason="this torch has no grouped_mm")

OPERATOR = "transformers::grouped_mm_fallback"


def operands(rows: int, k: int, n: int, ends: list[int], *, turned: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + k)
    shape = (len(ends), n, k) if turned else (len(ends), k, n)
    matrices = torch.randn(shape, generator=generator)
    return (
        torch.randn(rows, k, generator=generator),
        matrices.transpose(1, 2) if turned else matrices,
        torch.tensor(ends, dtype=torch.int32),
    )


def product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends) + 1.0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(10, 64, 32), (1, 64, 32), (10, 63, 32), (10, 64, 30)])
def test_products_have_the_bits_of_the_loop(rows: int, k: int, n: int, turned: bool) -> None:
    fast = ladder.compile(product)
    for ends in ([0, rows // 2, rows // 2, rows], [0, 0, 0, rows // 2], [0, 0, 0, 0]):
        given = operands(rows, k, n, ends, turned=turned)
        for _ in range(3):
            assert torch.equal(fast(*given), product(*given))
    assert fast.outcome == "whole"


def test_the_loop_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(8, 64, 32, [2, 4, 4, 8], turned=False)
    fast = ladder.compile(product)
    fast(*given)
    fast(*given)
    calls: list[tuple[int, ...]] = []
    kept = grouped.by_torch

    def counted(*operands: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(operands[0].shape))
        return kept(*operands, **named)  # type: ignore[no-any-return]

    monkeypatch.setattr(grouped, "by_torch", counted)
    assert torch.equal(fast(*given), product(*given))
    assert calls == [(8, 64)]


def test_rows_that_lie_badly_are_the_operators() -> None:
    rows, matrices, ends = operands(8, 64, 32, [2, 4, 4, 8], turned=False)
    assert grouped.serves(rows, matrices, ends)
    assert not grouped.serves(torch.randn(8, 66)[:, :64], matrices, ends)
    assert not grouped.serves(torch.randn(8 * 64 + 1)[1:].view(8, 64), matrices, ends)
    assert not grouped.serves(rows.double(), matrices.double(), ends)
    assert not grouped.serves(rows, matrices, ends.long())
    assert not grouped.serves(rows[:0], matrices, ends)
