"""The one family of exceptions that Ladder raises.

Every message says what is wrong, where, and what to do next. The family lives in
the lowest layer so that each layer can raise it; users import it from ``ladder``.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any

LONGEST_WORD = 400
"""Characters without a space between them of which a message about a file shows all."""

LONG_WORD = re.compile(rf"(\S{{80}})\S{{{LONGEST_WORD - 159},}}(\S{{80}})")


class LadderError(Exception):
    """Base class of every error that Ladder raises on purpose."""


class UnknownNameError(LadderError, KeyError):
    """A type, device, operator, pipeline or knob of that name does not exist."""

    def __str__(self) -> str:
        """Return the message itself (``KeyError`` would quote it)."""
        return str(self.args[0]) if self.args else ""


class ConversionError(LadderError, ValueError):
    """A conversion would lose values that the program relies on."""


class ShapeError(LadderError, ValueError):
    """A rank, an extent or a group size does not fit."""


class DTypeError(LadderError, TypeError):
    """A tensor has another element type than the operator needs."""


def require_kind(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise DTypeError, "<what>, got <type>", unless a value is of a class, or of one of several."""
    if not isinstance(value, kind):
        raise DTypeError(f"{what}, got {type(value).__name__}")


def whole_number(value: object, what: str) -> int:
    """Return a whole number (Python's, numpy's) as an int; raises ShapeError if it is none of 64 bits."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except Exception:  # tensors raise what they like
        number = None
    if number is None or number >> 63 not in (0, -1):
        kind = "a whole number" if number is None else "a number of 64 bits"
        raise ShapeError(f"{what} must be {kind}, got {shown(value)}")
    return int(number)


def positive_number(value: object, what: str, otherwise: str = "") -> int:
    """Return a whole number from 1 on as an int; else raise ShapeError, which names ``otherwise`` too."""
    number = whole_number(value, what)
    if number < 1:
        raise ShapeError(f"{what} must be at least 1, {f'or {otherwise}, ' * bool(otherwise)}got {number}")
    return number


def sequence_of(kind: type | tuple[type, ...], values: object, what: str) -> tuple[Any, ...]:
    """Return a list or tuple as a tuple; raises DTypeError, "<what>, got <type>", for others and in it."""
    require_kind(values, (list, tuple), what)
    for value in values:  # type: ignore[attr-defined]
        require_kind(value, kind, what)
    return tuple(values)  # type: ignore[arg-type]


def require_callable(function: object, what: str) -> None:
    """Raise DTypeError, "<what>, got <type>", unless a value can be called."""
    if not callable(function):
        raise DTypeError(f"{what}, got {type(function).__name__}")


def path_of(value: object, what: str) -> Path:
    """Return a path as one; raises DTypeError, "<what> must be a path, got <type>", for what is none."""
    require_kind(value, (str, os.PathLike), f"{what} must be a path")
    if "\0" in str(value):
        raise DTypeError(f"{what} must be a path, which has no null character, got {str(value)!r}")
    return Path(value)  # type: ignore[arg-type]


def shown(value: object) -> str:
    """Return a value as messages show it: its text, or of a long one its type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


class DeviceError(LadderError, RuntimeError):
    """A tensor or a kernel lives on another device than the call needs."""


class AliasingError(LadderError, ValueError):
    """Tensors share memory where one of them is written."""


class ValueRangeError(LadderError, ValueError):
    """A value (NaN, infinity, a code) lies outside what the type can hold."""


class OutOfRangeError(LadderError, IndexError):
    """An index lies outside of the axis that it picks from."""


class ScheduleError(LadderError, ValueError):
    """A schedule is illegal for this problem on this device."""


class VerificationError(LadderError, AssertionError):
    """An IR invariant or a proof failed."""


class ParseError(LadderError, ValueError):
    """A printed graph or schedule cannot be parsed."""


class ArtifactError(LadderError, RuntimeError):
    """An exported artefact is truncated, of another version, or for another device."""


class TypeValuesError(ArtifactError):
    """A type has other values here than where codes of it were stored."""


class CheckpointError(LadderError, ValueError):
    """A checkpoint of another tool is truncated, contradicts itself, or is of a form that is not read.

    What a file calls something is told by its ends where it is longer than `LONGEST_WORD`.
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(LONG_WORD.sub(r"\1...\2", str(text)))


class CacheError(LadderError, RuntimeError):
    """The cache directory cannot be used."""


class CompilerError(LadderError, RuntimeError):
    """A compiler was found but rejected the kernel."""


class MissingToolError(LadderError, RuntimeError):
    """A compiler, linker or library that this step needs is not installed."""


UNKNOWN_TYPE = "unknown type "
"""How every message begins, or goes on after a place, that says that there is no type of a name."""

UNREGISTERED = "a type of your own is registered (ladder.register_type) before what holds it is read"
"""What to do about a file that names a type which this process does not know."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that is not in a table.

    kind: What was looked up, e.g. ``"type"``.
    name: The name that was asked for, or what was given in its place (a torch dtype).
    known: All valid names; that of the same text is suggested, else those that contain it, else the nearest.
    """
    names, asked = sorted(known), str(name).removeprefix("torch.")
    within = [asked] if asked in names else [each for each in names if len(asked) > 2 and asked in each]
    close = within[:3] or difflib.get_close_matches(asked, names, n=3, cutoff=0.41)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; known: {', '.join(names)}"
    return UnknownNameError(f"unknown {kind} {shown(name)}{hint}")


def require_options(kind: str, options: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Raise `unknown_name` for an option that none of the functions takes by keyword alone."""
    taken = [each for function in functions for each in signature(function).parameters.values()]
    known = {each.name for each in taken if each.kind is each.KEYWORD_ONLY}
    for name in options:
        require_name(kind, name, known)


def require_name(kind: str, name: object, known: Iterable[str]) -> None:
    """Raise `unknown_name` unless a value is one of the texts that are known; arrays are no texts."""
    if not isinstance(name, str) or name not in known:
        raise unknown_name(kind, name, known)
