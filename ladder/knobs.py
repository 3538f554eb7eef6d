"""Every ``LADDER_*`` knob, in one table.

A knob is read from the environment, or overridden for a block of code::

    from ladder import knobs

    with knobs.override(num_threads=1, trace=True):
        ...

The typed values are attributes of `settings`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, overload

from tile_types.errors import LadderError, ValueRangeError, unknown_name

T = TypeVar("T")

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_overrides: ContextVar[Mapping[str, Any]] = ContextVar("ladder_knobs", default=_EMPTY)

_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"expected one of {', '.join(_BOOLEANS)}") from None


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("expected a number that is not negative")
    return number


MOST_THREADS = 1024
"""Threads that a kernel may be told to use: more than any machine has cores is a slip."""


def _threads(text: str) -> int:
    number = _count(text)
    if number > MOST_THREADS:
        raise ValueError(f"expected at most {MOST_THREADS}")
    return number


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # of no user
        raise ValueError(f"{error}") from error
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in path.parts):
        raise ValueError(f"expected names of at most {LONGEST_NAME} bytes")
    return path


LONGEST_NAME = 255
"""Bytes of a file's name on Linux."""


class Knob(Generic[T]):
    """Typed descriptor of one knob.

    default: Value when neither the environment nor an override sets it.
    parse: Turns the environment's text into a value; raises ``ValueError`` with what it expects.
    doc: What it does, in one line.
    """

    def __init__(self, default: T, parse: Callable[[str], T], doc: str) -> None:
        self.default = default
        self.parse = parse
        self.doc = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.variable = f"LADDER_{name.upper()}"

    @overload
    def __get__(self, instance: None, owner: type) -> Knob[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Knob[T] | T:
        """Return the value: the innermost override, else the environment, else the default."""
        if instance is None:
            return self
        overrides = _overrides.get()
        if self.name in overrides:
            value: T = overrides[self.name]
            return value
        text = os.environ.get(self.variable, "")
        return self.read(text) if text else self.default

    def read(self, text: str) -> T:
        """Parse text as the environment holds it.

        Raises ValueRangeError if the text is no value of this knob.
        """
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueRangeError(
                f"{self.variable}={text!r} is not valid: {error}; unset it or fix it"
            ) from error

    def check(self, value: Any) -> T:
        """Return ``value`` as this knob's type; text is parsed as from the environment."""
        if isinstance(value, (str, os.PathLike)):
            return self.read(os.fspath(value))
        if isinstance(value, (bool, int)):
            return self.read(str(int(value)))
        if value is None and self.default is None:
            return self.default
        raise ValueRangeError(f"knob {self.name} cannot be {value!r}")


class Settings:
    """The table: one attribute per knob."""

    cache_dir = Knob[Path | None](
        None, _path, "folder of compiled kernels and tuning results [user cache/ladder]"
    )
    cache = Knob[bool](True, _boolean, "0 neither reads nor fills the kernel cache")
    dump = Knob[Path | None](None, _path, "folder that receives every stage of every kernel that is built")
    trace = Knob[bool](False, _boolean, "1 logs passes, cache hits, builds and their times to stderr")
    num_threads = Knob[int](0, _threads, "threads of a CPU kernel; 0 means torch's number")
    nvcc = Knob[Path | None](None, _path, "the CUDA compiler to use [that of the extra cuda, or on PATH]")
    tune = Knob[bool](
        False, _boolean, "1 times the best candidates on the device instead of trusting the cost model"
    )
    ahead = Knob[bool](
        True, _boolean, "0 builds no kernels of other numbers of rows beside calls, on CUDA GPUs"
    )
    strict = Knob[bool](
        False, _boolean, "1 raises faults of the compiler, where programs otherwise run on in torch"
    )
    peer_memory = Knob[bool](
        True, _boolean, "0, in all processes: GPUs add up by NCCL, also small tensors in each other's reach"
    )
    found_graphs = Knob[bool](True, _boolean, "0 leaves kernels of the superoptimizer out of plans")
    gated_products = Knob[bool](
        True, _boolean, "0 leaves gates of few rows to kernels of their own, on CUDA GPUs"
    )
    prologues = Knob[bool](
        True,
        _boolean,
        "0 leaves norms of few rows, and rows of caches, to kernels of their own, on CUDA GPUs",
    )
    runtime_dir = Knob[Path | None](None, _path, "folder of libtvm_runtime*.so [of the installed apache-tvm]")


settings = Settings()
"""The knobs' current values."""


def table() -> dict[str, Knob[Any]]:
    """Return every knob by name."""
    return {name: knob for name, knob in vars(Settings).items() if isinstance(knob, Knob)}


def write_dump(path: Path, text: str) -> None:
    """Write one file of a dump; raises LadderError if its folder cannot be made or written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LadderError(
            f"cannot write {path}: {error}; LADDER_DUMP must be a folder to write to"
        ) from error


_listeners: list[Callable[[], None]] = []


def on_override(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever an `override` block is entered or left."""
    if listener not in _listeners:
        _listeners.append(listener)


@contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Set knobs for a ``with`` block, in this thread or task only.

    **values: Knob names without the ``LADDER_`` prefix, in lower case.
    Raises UnknownNameError if there is no such knob; the nearest name is suggested.
    Raises ValueRangeError if a value does not fit its knob.
    """
    knobs = table()
    for name in values:
        if name not in knobs:
            raise unknown_name("knob", name, knobs)
    checked = {name: knobs[name].check(value) for name, value in values.items()}
    token = _overrides.set(MappingProxyType({**_overrides.get(), **checked}))
    try:
        _notify()
        yield settings
    finally:
        _overrides.reset(token)
        _notify()


def _notify() -> None:
    for listener in _listeners:
        listener()
