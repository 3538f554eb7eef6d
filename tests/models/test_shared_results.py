"""Results that show one memory in the program show one memory, also where a plan computes them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ladder
from ladder.capture.values.aliasing import aliasing_of


def rows(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.stack([torch.relu(x + 1).sum(1), (y * 2).amax(1)]).unbind(0)


def overlapping(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    whole = torch.cat([x.exp(), y.sin()])
    return whole[1:5], whole[:, ::2], whole[3]


def one_object(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + y
    return z, z, z.view(-1), z.mT


def two_types(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x - y).relu()
    return z, z.view(torch.int32)


def parts(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    whole = torch.softmax(x @ y.mT, -1)
    first, second = whole.chunk(2, -1)
    return first * 2, first, second, whole[0]


def of_an_argument(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.diagonal(1), y.unfold(0, 2, 2), x + 1, y.view(torch.int32)[1::2]


@pytest.mark.parametrize("program", [of_an_argument, rows, overlapping, one_object, two_types, parts])
def test_who_writes_into_one_result_writes_into_the_others(
    program: Callable[..., tuple[Tensor, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    fast = ladder.compile(program)
    with torch.no_grad():
        for shape in ((4, 6), (4, 6), (8, 6), (10, 6)):
            x, y = torch.randn(3, *shape)[1], torch.randn(shape)
            want, found = program(x, y), fast(x, y)
            torch.testing.assert_close(found, want)
            assert aliasing_of([x, y], found)[:2] == aliasing_of([x, y], want)[:2]
            assert [each.stride() for each in found] == [each.stride() for each in want]
            for at in range(len(want)):
                want[at].fill_(at + 7)
                found[at].fill_(at + 7)
                torch.testing.assert_close(found, want)
    assert not fast.refused
    assert "operator by operator" not in caplog.text


@pytest.mark.parametrize("channels_last", [False, True])
def test_who_gets_a_result_may_add_a_parameter_to_it_in_place(channels_last: bool) -> None:
    """Of a view that was made where no gradients were recorded, autograd refuses that."""
    weight, kernel = torch.ones(1, requires_grad=True), torch.ones(2, 2, 1, 1)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.conv2d(x, kernel)
        return y, x.flip(0), x.roll(1, 2), (x * 2).expand(3, 2, 2, 3, 4).clone(), x.reshape(-1) + 1

    fast, x = ladder.compile(program), torch.rand(2, 2, 3, 4)
    for given in (x, x, torch.rand(4, 2, 3, 4)[::2]):
        given = given.to(memory_format=torch.channels_last) if channels_last else given
        with torch.no_grad():
            want, found = program(given), fast(given)
        assert [each._is_view() for each in found] == [each._is_view() for each in want]
        for each, other in zip(found, want, strict=True):
            torch.testing.assert_close(each.mul_(weight), other)
