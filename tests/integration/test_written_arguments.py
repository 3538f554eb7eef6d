"""Operators of others that write arguments: a step of the plan, with the effects that they have in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder import knobs
from ladder.integrations import dynamo

LIBRARY: Any = torch.library.Library("writes", "DEF")


def _operator(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] = lambda *given: None
) -> None:
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"writes::{name}", fake, lib=LIBRARY)


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.add_(x)
    x.copy_(torch.nn.functional.rms_norm(residual, weight.shape, weight, epsilon))


def _rotate(positions: Tensor, q: Tensor, k: Tensor | None) -> None:
    assert q.stride(0) >= q.shape[1]
    q.mul_(positions.unsqueeze(1))
    if k is not None:
        k.sub_(positions.unsqueeze(1))


def _store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache[slots] = k
    v_cache[slots] = v


def _counted(x: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor, list[Tensor]]:
    total = x.sum()
    x.mul_(scale)
    return total, x, [x + 1, x * 2]


def _each(values: list[Tensor]) -> None:
    for at, value in enumerate(values):
        value.add_(at + 1)


def _through(out: Tensor, x: Tensor) -> None:
    out.fill_(2)
    out.add_(x.clone())


_operator("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", _silu_and_mul)
_operator(
    "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float epsilon) -> ()",
    _fused_add_rms_norm,
)
_operator("rotate(Tensor positions, Tensor(a!) q, Tensor(b!)? k) -> ()", _rotate)
_operator("store(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()", _store)
_operator(
    "counted(Tensor(a!) x, float scale=2.0) -> (Tensor, Tensor(a!), Tensor[])",
    _counted,
    lambda x, scale=2.0: (x.new_empty(()), x, [torch.empty_like(x), torch.empty_like(x)]),
)
_operator("each(Tensor(a!)[] values) -> ()", _each)
_operator(
    "through(Tensor x, *, Tensor(a!) into) -> ()", lambda x, into: _through(into, x), lambda x, into: None
)
OPS: Any = torch.ops.writes


@torch.library.custom_op("writes::scaled", mutates_args={"x", "running"})
def scaled(x: Tensor, running: Tensor | None, sizes: list[int], kind: str = "sum") -> tuple[Tensor, Tensor]:
    """Double x, count calls, and return a sum and a number; torch does not see the writes."""
    total = x.sum(sizes)
    x.numpy()[...] *= 2
    if running is not None:
        running.numpy()[...] += 1
    return total, x.new_full((), 3.0)


@scaled.register_fake
def _(x: Tensor, running: Tensor | None, sizes: list[int], kind: str = "sum") -> tuple[Tensor, Tensor]:
    return x.sum(sizes), x.new_empty(())


def between_kernels(x: Tensor, w: Tensor) -> Tensor:
    y = torch.relu(x @ w) + 1
    out = torch.empty(y.shape[0], y.shape[1] // 2)
    OPS.silu_and_mul(out, y)
    return torch.softmax(out * 2 - 1, -1)


def norm_of_argument(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x) * 2
    OPS.fused_add_rms_norm(y, x, w[0, : x.shape[1]], 1e-5)
    return y @ w + x.sum()


def parts_of_one(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).split([8, 8, 16], -1)
    OPS.rotate(x[:, 0], q, k)
    return torch.relu(q * k).sum(-1) + v.sum(-1)


def without_second(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w)[:, ::2]
    OPS.rotate(x[:, 0], q, None)
    return torch.exp(-q * q)


def slots_of_argument(x: Tensor, cache: Tensor) -> Tensor:
    y = torch.relu(x) * 3
    keys, values = cache[0], cache[1]
    OPS.store(y, y + 1, keys, values, torch.tensor([3, 1, 0, 2]))
    return (keys * 2).sum() + torch.sigmoid(values)


def twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    before = x * 2
    OPS.counted(x)
    between = x + 1
    total, same, several = OPS.counted(x[1:3, 2:], 0.5)
    return before, between, x - 1, total, same * 1, several[0], several[1].relu()


def several_in_a_list(x: Tensor, w: Tensor) -> Tensor:
    y = torch.relu(x)
    OPS.each([y[0], w, y[1]])
    return y.exp() @ w


def overlapping(x: Tensor, w: Tensor) -> Tensor:
    y = torch.relu(x)
    OPS.through(y[1:3], into=y[0:2])
    OPS.through(x.t()[:4, :4], into=x[:, :4])
    return y * 2


def loop(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        y = torch.relu(x @ w)[:, : x.shape[1]].contiguous()
        OPS.fused_add_rms_norm(y, x, w[0, : x.shape[1]], 1e-5)
        x = y
    return x


def result_is_written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(x)
    view = out[1:]
    OPS.through(x, into=out)
    return out, view


def of_argument_and_none(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.relu(x)
    total, number = scaled(y, None, [1])
    scaled(w[2:], w[0], [0, 1])
    return total.relu() + number, y @ w


class Counting(nn.Module):
    """A module whose buffers an operator writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        scaled(y, self.calls, [0])
        return torch.sigmoid(y) * self.calls.sum()


PROGRAMS = (
    of_argument_and_none,
    between_kernels,
    norm_of_argument,
    parts_of_one,
    without_second,
    slots_of_argument,
    twice,
    several_in_a_list,
    overlapping,
    loop,
    result_is_written,
)


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad(), knobs.override(strict=True):
        yield


def _given(seed: int, program: Callable[..., Any], rows: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    second = torch.randn(2, 5, 16) if program is slots_of_argument else torch.randn(16, 32)
    return torch.randn(rows, 16), second


def _compiled(way: str, program: Callable[..., Any]) -> Any:
    if way == "ladder":
        return ladder.compile(program)
    return torch.compile(program, backend=dynamo.backend, fullgraph=True)


WAYS = pytest.mark.parametrize("way", ["ladder", "torch"])


@WAYS
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_and_arguments_are_those_of_eager(way: str, program: Callable[..., Any]) -> None:
    compiled, refused = _compiled(way, program), len(dynamo.compiler.refused)
    for seed in range(2):
        given, own = _given(seed, program), _given(seed, program)
        found, wanted = compiled(*given), program(*own)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(given, own)
        if program is of_argument_and_none:  # of an operator of torch's decorator versions tell
            assert [value._version for value in given] == [value._version for value in own]
    assert not dynamo.compiler.refused[refused:]
    assert way == "torch" or not compiled.refused


@WAYS
@pytest.mark.parametrize("program", PROGRAMS)
def test_arguments_may_lie_otherwise(way: str, program: Callable[..., Any]) -> None:
    compiled = _compiled(way, program)

    def lying(value: Tensor) -> Tensor:
        wide = torch.zeros(*value.shape[:-2], value.shape[-1], value.shape[-2] + 3)
        return wide[..., 1 : value.shape[-2] + 1].transpose(-1, -2).copy_(value)

    for seed in range(2):
        given, own = ([*map(lying, _given(seed, program))] for _ in range(2))
        torch.testing.assert_close(compiled(*given), program(*own))
        torch.testing.assert_close(given, own)


@WAYS
def test_buffers_of_modules_are_written(way: str) -> None:
    module = Counting()
    own = copy.deepcopy(module)
    compiled = _compiled(way, module)
    before = module.calls._version - own.calls._version
    for seed in range(3):
        x, _ = _given(seed, between_kernels)
        torch.testing.assert_close(compiled(x), own(x))
        torch.testing.assert_close(module.calls, own.calls)
        assert module.calls._version - own.calls._version == before


def test_the_rest_keeps_its_kernels() -> None:
    compiled = ladder.compile(between_kernels)
    for seed in range(2):
        compiled(*_given(seed, between_kernels))
    assert (
        "2 in torch (1 torch.ops.aten.empty.memory_format, 1 torch.ops.ladder_functional"
        in compiled.explain()
    )


def test_sizes_may_be_open() -> None:
    compiled = torch.compile(between_kernels, backend=dynamo.backend, dynamic=True)
    for rows in (4, 7, 1, 12):
        given, own = _given(rows, between_kernels, rows), _given(rows, between_kernels, rows)
        torch.testing.assert_close(compiled(*given), between_kernels(*own))
    assert not dynamo.compiler.built[-1].plan.is_pure()  # what others wrote may do anything


@WAYS
def test_tensors_of_inference_mode_are_written(way: str) -> None:
    compiled = _compiled(way, of_argument_and_none)
    with torch.inference_mode():
        for seed in range(2):
            given, own = _given(seed, between_kernels), _given(seed, between_kernels)
            torch.testing.assert_close(compiled(*given), of_argument_and_none(*own))
            torch.testing.assert_close(given, own)


@WAYS
def test_results_that_were_written_come_without_versions_in_inference_mode(way: str) -> None:
    def program(x: Tensor) -> Tensor:
        v = torch.tanh(x)
        v.bernoulli_(0.5)
        return v + x.bool()

    fast = _compiled(way, program)
    for _ in range(3):
        x = torch.randn(3, 4)
        with torch.inference_mode():
            torch.manual_seed(0)
            found = fast(x)
            torch.manual_seed(0)
            assert torch.equal(found, program(x))


@WAYS
def test_a_cache_is_written_where_it_lies(way: str) -> None:
    """The operator is given the memory of the argument itself, unless the old one is read behind it."""
    seen: list[int] = []

    def note(x: Tensor, rows: Tensor) -> None:
        seen.append(x.data_ptr())
        x[: rows.shape[0]] = rows

    _operator(f"note_{way}(Tensor(a!) x, Tensor rows) -> ()", note)
    operator = getattr(OPS, f"note_{way}")

    def program(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        operator(cache[1], torch.relu(x))
        return torch.sigmoid(cache), cache[1] * 2

    def reads_old(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        old = cache * 2
        operator(cache[1], torch.relu(x))
        return torch.softmax(old, -1), cache[1] + old.sum()

    for run, stays in ((program, True), (reads_old, False)):
        compiled = _compiled(way, run)
        for seed in range(3):
            given, own = _given(seed, slots_of_argument), _given(seed, slots_of_argument)
            seen.clear()
            found, at = compiled(*given), seen[-1]
            torch.testing.assert_close(found, run(*own))
            torch.testing.assert_close(given, own)
            # the first call of `ladder.compile` runs the program itself
            assert (at == given[1][1].data_ptr()) is (stays or (way == "ladder" and not seed))


def test_sizes_are_fixed_where_what_is_written_takes_another():
    def written(x):
        return torch.add(x.t(), 1, out=torch.empty(0)), x.t()[1]

    fast = ladder.compile(written)
    for rows in (3, 5, 5, 7, 7, 5):
        x = torch.randn(rows, 4)
        found, expected = fast(x)[0], written(x)[0]
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
