"""Indices that are broadcast: what is taken, how they are checked, and what stays torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import ladder
from ladder.runtime.model.library import LEAST_ROWS, indexed

INDEX = torch.ops.aten.index.Tensor


def refused(x: torch.Tensor, indices: Any) -> torch.Tensor:
    raise AssertionError("left to torch")


def numbers(extent: int, *shape: int, least: int = 0) -> torch.Tensor:
    return torch.randint(least, extent, shape)


TAKEN: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {
    "two of two": (torch.randn(9, 7), [numbers(9, 80, 1), numbers(7, 1, 70)]),
    "two of four": (torch.randn(9, 7, 3, 2), [numbers(9, 80, 1), numbers(7, 70)]),
    "as torchvision's roi_align": (
        torch.randn(2, 8, 5, 6),
        [
            numbers(2, 4, 1, 1, 1),
            torch.arange(8).view(1, 8, 1, 1),
            numbers(5, 4, 1, 9, 1),
            numbers(6, 4, 1, 1, 9),
        ],
    ),
    "from the end": (torch.randn(9, 7), [numbers(9, 80, 1, least=-9), numbers(7, 1, 70, least=-7)]),
    "int32": (torch.randn(9, 7), [numbers(9, 80, 1, least=-9).int(), numbers(7, 1, 70).int()]),
    "not contiguous": (torch.randn(7, 9).t(), [numbers(9, 80, 1), numbers(7, 1, 70)]),
    "no columns": (torch.randn(9, 7, 4)[..., :1], [numbers(9, 80, 1), numbers(7, 1, 70)]),
    "special values": (
        torch.tensor([[float("nan"), float("inf")], [-0.0, float("-inf")]]),
        [numbers(2, 80, 1), numbers(2, 1, 70)],
    ),
    "truth": (torch.randn(9, 7) > 0, [numbers(9, 80, 1), numbers(7, 1, 70)]),
    "bfloat16": (torch.randn(9, 7).bfloat16(), [numbers(9, 80, 1), numbers(7, 1, 70)]),
    "complex": (torch.randn(9, 7, dtype=torch.complex64), [numbers(9, 80, 1), numbers(7, 1, 70)]),
}


@pytest.mark.parametrize("what", TAKEN)
def test_rows_are_those_of_torch(what: str) -> None:
    x, indices = TAKEN[what]
    want = INDEX(x, indices)
    assert want.numel() >= LEAST_ROWS
    found = indexed(refused)(x, indices)
    assert found.dtype == want.dtype
    assert found.stride() == want.stride()
    assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(
    ("extent", "least"), [(10, 0), (9, -10)], ids=["beyond the last", "before the first"]
)
def test_numbers_outside_of_an_axis_are_refused_as_torch_does(extent: int, least: int) -> None:
    """Also where the place that they would give lies inside of the tensor."""
    rows = numbers(9, 80, 1)
    rows[3] = extent - 1 if least == 0 else least
    for indices in ([rows, numbers(7, 1, 70)], [numbers(7, 1, 70).fill_(3), rows]):
        x = torch.randn(9, 7) if indices[0] is rows else torch.randn(70, 9)
        with pytest.raises(IndexError):
            indexed(INDEX)(x, indices)


LEFT: dict[str, tuple[torch.Tensor, list[Any]]] = {
    "none": (torch.randn(9, 7), [None, numbers(7, 80)]),
    "mask": (torch.randn(9, 7), [torch.randn(9) > 0, numbers(7, 1)]),
    "one": (torch.randn(9, 7), [numbers(9, 3000)]),
    "few": (torch.randn(9, 7), [numbers(9, 8, 1), numbers(7, 1, 7)]),
    "given whole": (torch.randn(9, 7), [numbers(9, 3000), numbers(7, 3000)]),
    "unsigned": (torch.ones(9, 7, dtype=torch.uint16), [numbers(9, 80, 1), numbers(7, 1, 70)]),
    "no numbers": (torch.randn(9, 7), [numbers(9, 0, 1), numbers(7, 1, 70)]),
    "nothing in rows": (torch.randn(9, 7, 0), [numbers(9, 80, 1), numbers(7, 1, 70)]),
}


@pytest.mark.parametrize("what", LEFT)
def test_others_are_left_to_torch(what: str) -> None:
    x, indices = LEFT[what]
    with pytest.raises(AssertionError, match="left to torch"):
        indexed(refused)(x, indices)
    assert torch.equal(indexed(INDEX)(x, indices), INDEX(x, indices))


def test_compiled_functions_take_them() -> None:
    def taken(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)[rows[:, None], columns[None, :]] * 2

    fast = ladder.compile(taken)
    for count in (80, 90, 3, 0):
        given = torch.randn(9, 7), numbers(9, count, least=-9), numbers(7, 70)
        assert torch.equal(fast(*given), taken(*given))
    with pytest.raises(IndexError):
        fast(torch.randn(9, 7), torch.full((80,), 9), numbers(7, 70))


COUNTED = {
    "up": lambda x: x[torch.arange(x.size(0))],
    "twice": lambda x: x[torch.arange(4).view(2, 2)],
    "from the end": lambda x: x[torch.arange(3) - 3],
    "down": lambda x: x[x.size(0) - 1 - torch.arange(x.size(0))],
    "flat": lambda x: torch.take(x, torch.arange(4)),
    "padded": lambda x: x[functional.pad(torch.arange(x.size(0)), (5, 0))],
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("what", COUNTED)
def test_numbers_that_a_program_counts_index_any_tensor(what: str, rank: int) -> None:
    x, fast = torch.randn((8, 4, 2)[:rank]), ladder.compile(COUNTED[what])
    for _ in range(2):
        assert torch.equal(fast(x), COUNTED[what](x))
    assert not fast.refused
    assert fast.calls["eager"] == 0


SPREAD = {
    "apart": ((2, 5), lambda x: x[torch.arange(2)[:, None, None, None], torch.arange(5)[None, None, None]]),
    "a table": ((3, 4, 2), lambda x: x[torch.arange(3)[:, None], torch.arange(4) + 0]),
    "one row": ((1, 4), lambda x: x[torch.arange(1)[:, None], torch.arange(4)]),
}
PICKED = {
    "a diagonal": ((4, 4), lambda x: x[torch.arange(4), torch.arange(4)]),
    "turned": ((4, 4), lambda x: x[torch.arange(4), torch.arange(4)[:, None]]),
    "narrowed between": (
        (300, 2),
        lambda x: x[torch.arange(300).to(torch.int8).long()[:, None], torch.arange(2)],
    ),
    "an offset": ((4, 4), lambda x: x[torch.arange(4)[:, None], torch.arange(4) - 1]),
    "fewer": ((4, 4), lambda x: x[torch.arange(4)[:, None], torch.arange(3)]),
    "one row again": ((1, 4), lambda x: x[torch.arange(1).expand(2)[:, None], torch.arange(4)]),
    "one number again": ((2, 4), lambda x: x[torch.arange(1).expand(2)[:, None], torch.arange(4)]),
}


@pytest.mark.parametrize("case", [*SPREAD, *PICKED])
def test_numbers_that_count_all_in_order_are_no_call(case: str) -> None:
    shape, read = (SPREAD | PICKED)[case]
    fast = ladder.compile(lambda x: read(x) * 2)
    for _ in range(3):
        x = torch.randn(shape)
        assert torch.equal(fast(x), read(x) * 2)
    assert ("aten.index" in str(fast.plan())) == (case in PICKED)
