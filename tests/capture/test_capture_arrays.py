"""Tensors that are made of arrays of numpy in a program."""

import numpy as np
import pytest
import torch

from ladder.capture import capture

TABLE = np.random.RandomState(0).randn(5).astype("float32")


def copied_into_tensors(x):
    steps = np.sin(np.arange(x.shape[-1]))
    lower = torch.tensor(np.tril(np.ones((5, 5)))).masked_fill(torch.tensor(np.eye(5, dtype=bool)), 3)
    return x + torch.tensor(steps, dtype=x.dtype), torch.as_tensor(steps, dtype=torch.float32), lower


def copied_and_written(x):
    written = torch.tensor(TABLE)
    written.mul_(x[0, 0])
    return written, torch.tensor(TABLE), torch.tensor(np.arange(4)).add_(1)


def copied_in_other_orders(x):
    odd = (
        torch.tensor(np.arange(6).reshape(2, 3).T),
        torch.tensor(np.array(2)),
        torch.tensor(np.zeros((0, 3))),
    )
    return x * 2, *odd, torch.tensor(np.array([np.nan, -0.0, np.inf]))


@pytest.mark.parametrize("program", [copied_into_tensors, copied_and_written, copied_in_other_orders])
def test_arrays_that_tensors_copy_are_held_by_the_record(program, monkeypatch):
    """Others are guarded; tensors that share memory with an array break the graph."""
    captured = capture(program)
    for turn in range(5):
        if turn == 3:
            monkeypatch.setitem(globals(), "TABLE", TABLE + 1)
        x = torch.randn(5, 5, generator=torch.Generator().manual_seed(turn))
        for found, expected in zip(captured(x), program(x), strict=True):
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
            assert found.stride() == expected.stride()
    assert captured.outcome == "whole", captured.explain()


def test_arrays_that_are_changed_after_a_copy():
    def program(x):
        numbers = np.arange(5.0)
        copied, shared = torch.tensor(numbers), torch.as_tensor(numbers)
        numbers[0] = 7
        return x + copied, shared + 0, torch.tensor(numbers)

    captured = capture(program)
    for _ in range(3):
        for found, expected in zip(captured(torch.ones(5)), program(torch.ones(5)), strict=True):
            torch.testing.assert_close(found, expected)
