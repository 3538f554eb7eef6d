"""The symbols of Python's operators, and the functions that they stand for."""

from __future__ import annotations

import operator
from typing import Any

from ladder.capture.python.words import words

METHODS = dict(
    zip(
        words("+ - * / // % ** @ << >> & | ^"),
        words("add sub mul truediv floordiv mod pow matmul lshift rshift and or xor"),
        strict=True,
    )
)
"""Symbol of a binary operator -> the name of its method, without underscores."""

COMPARE = dict(zip(words("< <= == != > >="), words("lt le eq ne gt ge"), strict=True))
BINARY: dict[str, Any] = {
    **{symbol: getattr(operator, f"__{name}__") for symbol, name in (METHODS | COMPARE).items()},
    **{f"{symbol}=": getattr(operator, f"__i{name}__") for symbol, name in METHODS.items()},
}
UNARY: dict[str, Any] = {"-": operator.neg, "~": operator.invert, "+": operator.pos}
IN_PLACE = frozenset(f"{symbol}=" for symbol in METHODS)
