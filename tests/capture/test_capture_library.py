"""What the standard library gives under capture is what it gives without, call after call."""

import re

import programs_statements  # noqa: F401 it registers functions
import pytest
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
