"""What the standard library gives under capture is what it gives without, call after call."""

import re

import programs_statements  # noqa: F401 it registers functions
import pytest
import torch
from programs_library import LIBRARY

from ladder.capture import capture


def described(function, number):
    try:
        result = repr(function(number))
    except Exception as error:
        result = repr(error)
    return re.sub("0x[0-9a-f]+", "0x", result)


@pytest.mark.parametrize("function", LIBRARY, ids=lambda function: function.__name__)
def test_same_as_without_capture(function):
    captured = capture(function)
    for number in (1, 2, 2, 3, 2, 1, 1, 3, 4, 5, 2):
        assert described(captured, number) == described(function, number)


@pytest.mark.parametrize("variances", [(4, 5), (4, 1), (4,)])
def test_losses_that_refuse_values_are_followed(variances: tuple[int, ...]) -> None:
    loss = torch.nn.GaussianNLLLoss(full=True)
    fast, x, y = capture(loss), torch.randn(4, 5), torch.randn(4, 5)
    for _ in range(2):
        variance = torch.rand(variances)
        assert torch.equal(fast(x, y, variance), loss(x, y, variance))
    with pytest.raises(ValueError, match="negative"):
        fast(x, y, variance - 1)
    assert "gaussian_nll_loss" not in str(fast.graphs[0].graph)
