"""What writes results where others read or show them, and what draws numbers into them, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ladder


def _sum_of_itself(x: Tensor) -> Tensor:
    torch.sum(x, 0, out=x)
    return x + 1


def _product_of_itself(x: Tensor) -> Tensor:
    y = x.reshape(2, 3)[:, :2].contiguous()
    torch.mm(y, y, out=y)
    return y


def _view_gets_another_rank(x: Tensor) -> Any:
    whole = x * 2
    part = whole.unflatten(-1, (1, -1))
    torch.mul(x, 4, out=part)
    return whole, part


def _wide_view_gets_another_rank(x: Tensor) -> Any:
    whole = x.new_zeros(2, 2, 6)[..., ::2]
    part = whole.unflatten(-1, (1, -1))
    torch.mul(x.reshape(2, 3).expand(2, 2, 3), 4, out=part)
    return whole.clone()


def _shown_grows(x: Tensor) -> Any:
    made = functional.celu(x)
    shown = made.view(torch.int32)
    torch.cat([x, x], out=made)
    return made, shown


def _shown_shrinks(x: Tensor) -> Any:
    made = x.exp()
    shown = made.view(2, 3)
    made.resize_(2)
    return made.fill_(1), shown


def _as_another(x: Tensor) -> Any:
    part = (x * 2).unflatten(-1, (1, -1))
    part.resize_as_(x)
    return part


def _first_row_added_to_others(x: Tensor) -> Any:
    rows = x.reshape(6, 1) * 2
    rows[::2] += rows[:1]
    return rows, rows[::2]


def _column_added_to_the_next(x: Tensor) -> Any:
    rows = x.reshape(2, 3) * 2
    rows[:, 1:] += rows[:, :-1]
    return rows + 1


def _fresh(x: Tensor) -> Any:
    return torch.add(x, 1, out=torch.empty(0))


WRITES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "sum of itself": (_sum_of_itself, torch.tensor(3.0)),
    "product of itself": (_product_of_itself, torch.arange(6.0)),
    "another rank": (_view_gets_another_rank, torch.arange(6.0)),
    "another rank, strides": (_wide_view_gets_another_rank, torch.arange(6.0)),
    "grows": (_shown_grows, torch.arange(6.0)),
    "shrinks": (_shown_shrinks, torch.arange(6.0)),
    "as another": (_as_another, torch.arange(6.0)),
    "read in another order": (_first_row_added_to_others, torch.arange(1.0, 7)),
    "read after it was written": (_column_added_to_the_next, torch.arange(1.0, 7)),
    "fresh": (_fresh, torch.arange(6.0)),
}
"""Programs, and their argument."""


def _same(found: Any, expected: Any) -> bool:
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True)
    return all(a.stride() == b.stride() and torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen_as_in_eager(name: str) -> None:
    program, x = WRITES[name]
    fast = ladder.compile(program)
    for _ in range(3):
        assert _same(fast(x.clone()), program(x.clone()))


def _rows_added_to_those_between(x: Tensor) -> Any:
    x = x.exp()
    x[::2] += x[1::2]
    x *= x
    return x


@torch.no_grad()
@pytest.mark.parametrize("program", [_fresh, _rows_added_to_those_between])
def test_what_is_written_apart_is_compiled(program: Callable[[Tensor], Any]) -> None:
    fast = ladder.compile(program)
    for _ in range(2):
        fast(torch.ones(4))
    assert "not compiled" not in fast.explain()


COMPOSED: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch.ops.aten, name)
    for name in ("copysign", "xlogy", "special_xlog1py", "heaviside", "logaddexp", "logaddexp2")
}
"""Operators whose references lay their results otherwise than their kernels."""


@torch.no_grad()
@pytest.mark.parametrize("name", [*COMPOSED, "addcdiv"])
@pytest.mark.parametrize("expanded", [False, True])
def test_draws_follow_the_layout_of_results(name: str, expanded: bool) -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        a = a.expand_as(b) if expanded else a.transpose(0, 1)
        made = torch.addcdiv(a, b, b) if name == "addcdiv" else COMPOSED[name](a, b)
        return made.uniform_()

    a, b = torch.rand(3, 1, 3), torch.rand(3, 3, 3).permute(2, 0, 1)
    fast = ladder.compile(program)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = program(a, b)
        torch.manual_seed(seed)
        assert _same(fast(a, b), expected)


@torch.no_grad()
def test_signs_of_complex_infinities_are_torchs() -> None:
    x = torch.complex(
        torch.tensor([0.0, float("inf"), -0.0, 2.0]), torch.tensor([float("-inf"), 1.0, 0.0, 3.0])
    )
    x = x.repeat(5)  # vectors and the rest of them
    fast = ladder.compile(lambda x: x.sgn())
    for _ in range(2):
        found = torch.view_as_real(fast(x))
    assert torch.equal(found.nan_to_num(7.0), torch.view_as_real(x.sgn()).nan_to_num(7.0))


@torch.no_grad()
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_cast_to_16_bits_and_back_rounds(wide: torch.dtype) -> None:
    x = torch.randn(40)
    fast = ladder.compile(lambda x: (x * 1.1).to(torch.bfloat16).to(wide))
    for _ in range(2):
        found = fast(x)
    assert torch.equal(found, (x * 1.1).to(torch.bfloat16).to(wide))
