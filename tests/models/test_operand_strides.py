"""Operators of torch and of others get operands that lie as in the program, where that may matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ladder
from ladder.frontend.torch_fx import import_fx


@pytest.fixture(scope="module")
def strides_of() -> Iterator[Callable[[Tensor], Tensor]]:
    """Return an operator registered by somebody else: the strides of its operand."""
    with torch.library._scoped_library("operand_strides_test", "DEF") as library:
        library.define("strides(Tensor x) -> Tensor")
        library.impl("strides", lambda x: torch.tensor(x.stride()), "CPU")
        register = torch.library.register_fake("operand_strides_test::strides", lib=library)
        register(lambda x: torch.empty(x.dim(), dtype=torch.int64))
        yield torch.ops.operand_strides_test.strides


LYING: dict[str, Callable[[Tensor], Tensor]] = {
    "computed": lambda x: x * 2,
    "transposed": lambda x: (x * 2).transpose(0, 2),
    "copied": lambda x: (x * 2).transpose(0, 2).contiguous(),
    "computed of transposed": lambda x: x.transpose(0, 2) * 2,
    "expanded": lambda x: (x[:1] * 2).expand(6, -1, -1),
    "expanded and copied": lambda x: (x[:1] * 2).expand(6, -1, -1).contiguous(),
    "part": lambda x: (x * 2)[:, 1:3],
    "part, copied": lambda x: (x * 2)[:, 1:3].contiguous(),
    "in other shape": lambda x: (x * 2).transpose(0, 1).reshape(4, -1),
    "channels last": lambda x: (x[None] * 2).contiguous(memory_format=torch.channels_last),
    "view of an argument": lambda x: x.permute(1, 2, 0),
    "part of an argument": lambda x: x[:, :3],
}

AS_THEY_ARE = ("computed", "view of an argument", "part of an argument")
"""Those that need no copy: a kernel computes them in the order of their axes, or they are there."""


@pytest.mark.parametrize("how", LYING)
def test_operators_of_others(how: str, strides_of: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = LYING[how](x)
        return strides_of(y), y + 1

    fast = ladder.compile(program)
    for rows in (3, 3, 5, 5):
        x = torch.randn(rows, 4, 5)
        for found, want in zip(fast(x), program(x), strict=True):
            torch.testing.assert_close(found, want)
    assert not fast.refused
    assert ("laid_out" in fast.plan()) == (how not in AS_THEY_ARE)


def test_nothing_is_copied_that_lies_as_asked() -> None:
    x = torch.randn(3, 4)
    assert torch.ops.ladder.laid_out(x, [4, 1]).data_ptr() == x.data_ptr()
    assert torch.ops.ladder.laid_out(x, [1, 3]).stride() == (1, 3)


BEHIND_CONVOLUTIONS: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda y: y * torch.randn_like(y),
    "parts": lambda y: [part.exp() * torch.rand_like(part) for part in y.chunk(2, 1)],
    "in place": lambda y: y.clone().uniform_() + y,
    "by its elements": lambda y: torch.poisson(y.abs()),
    "integers": lambda y: torch.randint_like(y, 9),
    "memory": lambda y: y.as_strided((4,), (3,), 1),
    "wider bits": lambda y: y.view(torch.int16),
    "complex": lambda y: torch.view_as_complex(y.view(2, 8, 8, 4, 2)),
}


@pytest.mark.parametrize("how", BEHIND_CONVOLUTIONS)
def test_behind_convolutions(how: str) -> None:
    """Plans let convolutions in a row have channels last; draws follow the order of the program's memory."""
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1))
    fast = ladder.compile(lambda x: BEHIND_CONVOLUTIONS[how](layers(x)))
    with torch.no_grad():
        for weight in layers.parameters():
            weight.random_(-1, 2)  # sums of whole numbers have the same bits in every order
        for _ in range(2):
            x = torch.randint(-2, 3, (2, 3, 8, 8)).float()
            torch.manual_seed(5)
            found = fast(x)
            torch.manual_seed(5)
            torch.testing.assert_close(found, BEHIND_CONVOLUTIONS[how](layers(x)))
    assert fast.outcome == "whole"
    assert not fast.refused


UNLIKE_TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "rolled": lambda x: torch.rand_like((x * 2).roll(1, 2)),
    "shuffled": lambda x: functional.dropout(functional.channel_shuffle(x * 2, 2), 0.5),
}


@pytest.mark.parametrize("how", UNLIKE_TRACED)
def test_draws_follow_kernels(how: str) -> None:
    """Fake tensors say that what these operators give lies in the order of its axes; channels lie last."""
    program = UNLIKE_TRACED[how]
    fast = ladder.compile(program)
    for images in (2, 2, 3, 3):
        x = torch.randn(images, 4, 3, 5).contiguous(memory_format=torch.channels_last)
        found, want = (drawn(x) for drawn in (seeded(fast), seeded(program)))
        torch.testing.assert_close(found, want)
        assert found.stride() == want.stride()
    assert not fast.refused


def seeded(program: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return program(x)

    return call


class Recurrent(nn.Module):
    """An LSTM whose first states are one for the whole batch."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.layers, self.computed = nn.LSTM(5, 7, 2, bias=False, bidirectional=True), computed
        self.first = nn.Parameter(torch.randn(4, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        states = self.first.expand(-1, x.shape[1], -1)
        result, _ = self.layers(x, (states * 1.5 if self.computed else states, torch.zeros_like(states)))
        return torch.as_tensor(result)


@pytest.mark.parametrize("computed", [False, True])
def test_states_that_a_batch_shares(computed: bool) -> None:
    """OneDNN's layer reads the memory of states."""
    torch.manual_seed(3)
    model = Recurrent(computed).eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for batch in (4, 4, 2, 6):
            x = torch.randn(3, batch, 5)
            torch.testing.assert_close(fast(x), model(x))


def test_what_is_written_by_strides_may_itself_be_a_view() -> None:
    def program(x: Tensor) -> Tensor:
        diagonals = torch.zeros(x.shape[0], 4, 4)
        diagonals.as_strided(x.shape[:2], [diagonals.stride(0), 5]).copy_(x.sum(2))
        return diagonals - x

    fast = ladder.compile(program)
    for rows in (2, 2, 3, 3):
        x = torch.randn(rows, 4, 4)
        torch.testing.assert_close(fast(x), program(x))
    assert not fast.refused


FRAMES = {
    "row": lambda x: x[1],
    "row of a result": lambda x: (x * 2)[1],
    "end of a row": lambda x: x[0, 3:],
    "every other": lambda x: x[0, ::2],
    "all": lambda x: x,
}


@pytest.mark.parametrize("of", FRAMES)
def test_frames_of_a_part_of_a_tensor(of: str) -> None:
    """Frames, overlapping, of a signal that is a part of a tensor are no reason to leave a graph to torch."""

    def program(x: Tensor, gain: float) -> Tensor:
        signal = FRAMES[of](x)
        step = signal.stride(-1)
        return signal.as_strided((3, 16), (5 * step, step)).square().mean(1) * gain

    fast = ladder.compile(program)
    for length, gain in ((60, 1.0), (60, 2.0), (71, 3.0), (75, 4.0)):
        x = torch.randn(2, length)
        torch.testing.assert_close(fast(x, gain), program(x, gain))
    assert not fast.refused
    assert fast.models or of == "every other"


def test_memory_is_read_beside_numbers() -> None:
    traced = torch.fx.symbolic_trace(lambda x, count: (x * 2).as_strided((3, 16), (5, 1)))
    assert import_fx(traced, [torch.randn(60), 3]).graph.outputs


def test_views_that_torch_makes_copy_what_a_plan_lays_otherwise() -> None:
    layer = nn.Conv2d(3, 16, 3)

    def program(x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(layer(x), 6, 1).view(-1, 256) + 1

    fast = ladder.compile(program)
    with torch.no_grad():
        for rows in (4, 4, 8, 8):
            x = torch.randn(rows, 3, 9, 9)
            torch.testing.assert_close(fast(x), program(x))
    assert not fast.refused


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("written", ["argument", "view of an argument", "result"])
def test_diagonals_are_filled(written: str, wrap: bool) -> None:
    """Functionalizing has no form of `fill_diagonal_`: it is traced into what it consists of first."""

    def program(x: Tensor) -> Tensor:
        matrix = {"argument": x, "view of an argument": x.t(), "result": x * 2}[written]
        matrix.fill_diagonal_(3.0, wrap=wrap)
        return matrix + 1

    fast = ladder.compile(program)
    for shape in ((4, 4), (3, 5), (7, 2), (1, 1)):
        given = torch.randn(shape)
        own = given.clone()
        assert torch.equal(fast(given), program(own))
        assert torch.equal(given, own)
    assert fast.outcome == "whole"
    assert not fast.refused


def test_nothing_is_laid_out() -> None:
    """An operand of no elements, expanded, for a write at places that the call before had one of."""

    def program(x: Tensor, chosen: Tensor) -> Tensor:
        out, places = x.clone(), chosen.nonzero()
        given = x[places[:, 0], places[:, 1]]
        out[places[:, 0], places[:, 1]] = given.mean().expand_as(given)
        return out

    fast = ladder.compile(program)
    for columns in ([0], [1], [], [2, 3]):
        x, chosen = torch.rand(4, 4), torch.zeros(1, 4)
        chosen[0, columns] = 1
        assert torch.equal(fast(x, chosen), program(x, chosen))
