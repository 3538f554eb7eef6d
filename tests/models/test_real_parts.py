"""Parts of real models, each of a class that was once refused: reduced to what made it so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ladder.api.compiler import Compiler
from ladder.integrations.dynamo import backend, compiler

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def joined(x: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Three joined tensors, the last one transposed: what is known of one boundary decides another."""
    parts = (c.expand(2, -1, -1), d.expand(2, -1, -1), x.transpose(1, 2))
    return torch.cat(parts, dim=1) + 1


def cached(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a cache whose numbers are computed in the chain that computes the rows."""
    places = torch.arange(2) + at
    cache.index_copy_(1, places, (rows * 2).transpose(0, 1))
    return cache.sum(), places * 3


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    """A norm's mean and spread are results too."""
    return torch.native_layer_norm(x, (6,), None, None, 1e-5)


def attended(x: Tensor) -> Tensor:
    """Heads of 8, as few models have."""
    heads = x.reshape(1, 4, 2, 8).transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(heads, heads, heads).transpose(1, 2).reshape(4, 16)


CASES: tuple[tuple[Callable[..., Any], tuple[tuple[int, ...], ...]], ...] = (
    (joined, ((2, 8, 4), (1, 1, 8), (1, 1, 8))),
    (statistics, ((3, 6),)),
    (attended, ((4, 16),)),
)


@pytest.mark.parametrize(("program", "shapes"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_parts(program: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    fast, refused = torch.compile(program, backend=backend), len(compiler.refused)
    values = [torch.randn(shape) for shape in shapes]
    for found, wanted in zip(flat(fast(*values)), flat(program(*values)), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)
    assert len(compiler.refused) == refused


def flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def test_rows_put_where_a_chain_says() -> None:
    fast = torch.compile(cached, backend=backend)
    caches = [torch.zeros(3, 6, 4) for _ in range(2)]
    for number in range(3):
        at, rows = torch.tensor(number), torch.randn(2, 3, 4)
        found, wanted = fast(caches[0], at, rows), cached(caches[1], at, rows)
        assert torch.equal(caches[0], caches[1])
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("size", [0.5, 2.0])
def test_open_products_of_batches(size: float) -> None:
    """``baddbmm`` of open sizes, as positions are added in attention."""

    def program(q: Tensor, k: Tensor) -> Tensor:
        batch, heads, count, width = q.shape
        bias = torch.arange(count).float()[None, None, :].repeat(batch * heads, 1, 1)
        rows, columns = (x.reshape(batch * heads, count, width) for x in (q, k))
        return bias.baddbmm(batch1=rows, batch2=columns.transpose(1, 2), beta=1.0, alpha=size)

    fast, refused = torch.compile(program, backend=backend, dynamic=True), len(compiler.refused)
    for count in (3, 5):
        q, k = torch.randn(2, 3, count, 8), torch.randn(2, 3, count, 8)
        assert torch.allclose(fast(q, k), program(q, k), atol=1e-5)
    assert len(compiler.refused) == refused


def steps_of_a_recurrence(x: Tensor) -> Tensor:
    """Rows of a buffer that are written one by one, as in models that step through time in Python."""
    rows, state = torch.zeros(4, 6), torch.zeros(6)
    for at in range(4):
        state = state * 0.5 + x[at]
        rows[at] = state
    rows[:, 1:3] = 2.0
    return rows * 2


def shifted(x: Tensor) -> Tensor:
    """Rows of the step before, as ``ZeroPad2d((0, 0, 1, -1))`` gives."""
    return torch.nn.functional.pad(x, (0, 0, 1, -1)) - x


def repeated(x: Tensor) -> Tensor:
    return x.repeat(2, 1, 3) + 1


def rounded_up(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ceil(x * 3), torch.sign((x * 2).round()) + torch.sign((x * 2).long())


@pytest.mark.parametrize("program", [steps_of_a_recurrence, shifted, repeated, rounded_up])
def test_operators_that_only_move_values_are_kernels(program: Callable[..., Any]) -> None:
    compiler = Compiler()
    x = torch.randn(4, 6)
    x[0, 0], x[1, 1] = -0.0, torch.inf
    fast = torch.compile(program, backend=compiler)
    found, wanted = flat(fast(x)), flat(program(x))
    assert all(torch.allclose(a, b, equal_nan=True) for a, b in zip(found, wanted, strict=True))
    (built,) = compiler.built
    assert {kind for kind, *_ in built.plan.table()} <= {"chain", "view"}
