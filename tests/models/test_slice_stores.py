"""Caches that a model writes by slices: in place where nothing reads the old one, always as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder import knobs
from ladder.integrations import dynamo

Program = Callable[[Tensor, Tensor, int], Any]
WAYS = pytest.mark.parametrize("way", ["ladder", "torch"])


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad(), knobs.override(strict=True):
        yield


def _compiled(way: str, program: Any) -> Any:
    return ladder.compile(program) if way == "ladder" else torch.compile(program, backend=dynamo.backend)


class Attention(nn.Module):
    """Attention with two caches of 4 x 32 places, written as Meta's Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.register_buffer("keys", torch.zeros(4, 32, 2, 8))
        self.register_buffer("values", torch.zeros(4, 32, 2, 8))

    def forward(self, x: Tensor, at: int) -> Tensor:
        batch, rows, _ = x.shape
        q, k, v = (part.view(batch, rows, 2, 8) for part in self.qkv(x).chunk(3, -1))
        self.keys[:batch, at : at + rows] = k
        self.values[:batch, at : at + rows] = v
        read = (held[:batch, : at + rows].transpose(1, 2) for held in (self.keys, self.values))
        mixed = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *read)
        return x + mixed.transpose(1, 2).reshape(x.shape)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor, at: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, at)
        return x


@WAYS
def test_every_layer_writes_its_caches_in_place(way: str) -> None:
    torch.manual_seed(0)
    model = Layers()
    twin = copy.deepcopy(model)
    fast, built = _compiled(way, model), len(dynamo.compiler.built)
    for at in (0, 1, *range(2, 14), 31):
        x = torch.randn(2, 1, 16)
        torch.testing.assert_close(fast(x, at), twin(x, at), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close([*model.buffers()], [*twin.buffers()], atol=1e-5, rtol=1e-5)
    plans = [each.plan for each in (fast.models if way == "ladder" else dynamo.compiler.built[built:])]
    assert 1 <= len(plans) <= 4
    for plan in plans:
        assert len(plan.in_place) == 4
        assert not [one for one in _writers(plan) if one >= 4 * 32 * 16]


def _writers(plan: Any) -> list[int]:
    """Return how many elements steps write that are neither views nor written in place."""
    made = [v for step in plan.steps if step.part.kind != "view" for v in step.part.outputs]
    shapes = [plan.tiles[value].shape for value in made if value not in plan.in_place]
    return [torch.Size(int(n) for n in shape if isinstance(n, int)).numel() for shape in shapes]


def ranges(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[: x.shape[0], at : at + x.shape[1]] = x
    return kept[:2, : at + x.shape[1]].sum(1)


def one_place(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, at] = x[:, 0]
    return kept[:, at] * 2


def fixed_places(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[1:3, 4:5] = x
    kept[-1, -2] = x[0, 0]
    return kept[1:].sum(0)


def steps(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[::2, at : at + 5 : 2, 1::3] = x[:, :, :2]
    return kept * 2


def broadcast(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:, at:] = x[:1, :1]
    return kept.sum()


def numbers(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[1:, : at - 20] = 3
    return kept.sum(0) + x[0]


def from_the_end(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[-3:-1, -at - 1 : -at] = x
    return kept + 1


def beyond_the_end(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[2:99, at : at + 1] = x
    return kept + 1


def nothing(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, 5:5] = x[:, :0]
    kept[3:1] = x[0, 0]
    return kept + x[0]


def other_types(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, at : at + 1] = (x * 9).double()
    kept[2:, at : at + 1] = (x * 9).int()
    return kept.exp()


def one_after_the_other(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, at : at + 1] = x
    kept[1:3, at : at + 1] = x * 2
    kept[:, at + 1] = 7
    return kept.sum(0)


def returned(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, at : at + 1] = x
    return kept, kept[0], x + 1


def cloned(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, at : at + 1] = x
    return kept[:2].clone(), kept[1:2, :at].contiguous(), kept[:2] + 0


def all_of_it(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:] = x[0, 0] + at
    return kept.sum(0)


def of_another_tensor(kept: Tensor, x: Tensor, at: int) -> Any:
    part = torch.zeros(2, 32, 6).slice_scatter(x, 1, at, at + 1)
    kept.copy_(kept.slice_scatter(part, 0, 1, 3))
    return kept.sum(0)


IN_PLACE = (
    ranges, one_place, fixed_places, steps, broadcast, numbers, from_the_end, beyond_the_end, other_types,
    one_after_the_other, returned, cloned, of_another_tensor,
)  # fmt: skip


def read_before(kept: Tensor, x: Tensor, at: int) -> Any:
    before = kept[:, :4] * 2
    kept[:2, at : at + 1] = x
    return before.sum() + kept.sum(0)


def added(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, at : at + 1] += x
    return kept.sum(0)


def moved(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:, 1:9] = kept[:, :8].clone()
    kept[:2, :1] = x
    return kept.sum(1)


def turned(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, :2, 0] = kept[:2, :2, 1].t()
    return kept + x[0]


def read_between(kept: Tensor, x: Tensor, at: int) -> Any:
    kept[:2, at : at + 1] = x
    first = kept[:2].sum(1)
    kept[:2, at : at + 1] = x * first[:, None]
    return first + kept.sum()


def stored_twice(kept: Tensor, x: Tensor, at: int) -> Any:
    other = x.new_zeros(4, 32, 6)
    kept[:2, at : at + 1] = x
    other.copy_(kept)
    other[0] += 1
    return other, kept + 1


def of_another_part(kept: Tensor, x: Tensor, at: int) -> Any:
    kept.copy_(kept.slice_scatter(kept[1:3].slice_scatter(x, 1, at, at + 1), 0, 0, 2))
    return kept.sum(0)


BESIDE = (of_another_part, read_before, added, moved, turned, read_between, stored_twice, nothing, all_of_it)
"""Programs that read what they write, so that plans copy, or write nothing, or all of it."""


def _check(fast: Any, program: Program, kept: Tensor, calls: int = 12) -> None:
    twin, results = kept.clone(), []
    for at in range(8, 8 + calls):
        x = torch.randn(2, 1, 6)
        found, expected = fast(kept, x, at), program(twin, x, at)
        results.append((found, expected))
        for pair in results:  # what calls gave before stays, or shows the cache
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5, equal_nan=True)
        torch.testing.assert_close(kept, twin, atol=1e-5, rtol=1e-5)
        if program is returned:
            assert found[0] is kept
            assert found[1].data_ptr() == kept.data_ptr()


@WAYS
@pytest.mark.parametrize("program", [*IN_PLACE, *BESIDE])
def test_slices_are_written_as_in_eager(way: str, program: Program) -> None:
    torch.manual_seed(0)
    fast, before = _compiled(way, program), len(dynamo.compiler.built)
    _check(fast, program, torch.randn(4, 32, 6))
    plans = [each.plan for each in (fast.models if way == "ladder" else dynamo.compiler.built[before:])]
    assert plans
    if program in IN_PLACE:
        assert all(plan.in_place for plan in plans)


@WAYS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.float16, torch.float64])
@pytest.mark.parametrize("program", [ranges, one_place, other_types, numbers])
def test_caches_of_other_types(way: str, dtype: torch.dtype, program: Program) -> None:
    torch.manual_seed(0)

    def run(kept: Tensor, x: Tensor, at: int) -> Any:
        program(kept, x, at)
        return kept[:, at] * 1

    _check(_compiled(way, run), run, (torch.randn(4, 32, 6) * 4).to(dtype), 5)


@WAYS
def test_caches_that_lie_otherwise(way: str) -> None:
    torch.manual_seed(0)
    fast = _compiled(way, ranges)
    _check(fast, ranges, torch.randn(4, 32, 6), 5)
    wide = torch.randn(6, 32, 9)
    part, before = wide[1:5, :, 2:8], wide.clone()
    twin = before[1:5, :, 2:8]
    turned = torch.randn(32, 4, 6).transpose(0, 1)
    for at in range(5):
        x = torch.randn(2, 1, 6)
        torch.testing.assert_close(fast(part, x, at), ranges(twin, x, at))
        assert torch.equal(wide, before)
    _check(fast, ranges, turned, 5)


@WAYS
def test_rows_that_lie_in_the_cache(way: str) -> None:
    """Two arguments of one memory: what is read is what is written."""
    torch.manual_seed(0)

    def run(kept: Tensor, x: Tensor, at: int) -> Any:
        kept[:2, at : at + 1] = x
        return x + 1, kept.sum(0)

    fast = _compiled(way, run)
    _check(fast, run, torch.randn(4, 32, 6), 5)
    kept = torch.randn(4, 32, 6)
    twin = kept.clone()
    for at in range(5):
        found, expected = fast(kept, kept[1:3, at : at + 1], at), run(twin, twin[1:3, at : at + 1], at)
        torch.testing.assert_close(found, expected)
        assert torch.equal(kept, twin)


@WAYS
@pytest.mark.parametrize("turned", [False, True])
def test_two_arguments_that_take_one_result(way: str, turned: bool) -> None:
    def run(first: Tensor, second: Tensor, x: Tensor, at: int) -> Tensor:
        kept, other = (second, first) if turned else (first, second)
        before = other[0, 0] * 2
        kept[:2, at : at + 1] = x
        other.copy_(kept)
        return x + before

    fast = _compiled(way, run)
    held = [torch.randn(4, 32, 6) for _ in range(2)]
    twins = [value.clone() for value in held]
    for at in range(6):
        x = torch.randn(2, 1, 6)
        assert torch.equal(fast(*held, x, at), run(*twins, x, at))
        for one, other in zip(held, twins, strict=True):
            assert torch.equal(one, other)


@WAYS
def test_rows_that_do_not_fit_are_told(way: str) -> None:
    fast = _compiled(way, ranges)
    kept = torch.randn(4, 32, 6)
    _check(fast, ranges, kept, 4)
    before = kept.clone()
    for at in (31, 32, 40):  # of one row torch makes none
        for x in (torch.randn(2, 3, 6), torch.randn(3, 2, 6)):
            with pytest.raises(RuntimeError):
                ranges(kept.clone(), x, at)
            with pytest.raises(RuntimeError):
                fast(kept, x, at)
            assert torch.equal(kept, before)
        x = torch.randn(2, 1, 6)
        torch.testing.assert_close(fast(kept, x, at), ranges(before, x, at))
        assert torch.equal(kept, before)


def test_a_file_keeps_and_writes_its_cache(tmp_path: Path) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(4, 32, 6))

        def forward(self, x: Tensor) -> Tensor:
            self.kept[:2, 3:4] = x
            self.kept[2:, -1] = x[0] + self.kept.shape[0]
            return self.kept.sum(0)

    model, x = Kept(), torch.randn(2, 1, 6)
    loaded = ladder.load(ladder.compile(copy.deepcopy(model)).export(tmp_path / "kept.ladder", x))
    for _ in range(3):
        x = torch.randn(2, 1, 6)
        torch.testing.assert_close(loaded(x), model(x))
    assert "ladder store" in loaded.plan()
