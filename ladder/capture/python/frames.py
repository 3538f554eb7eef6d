"""Interpreted frames: creation from a call, real generators over them, and stand-ins for natives.

A stand-in is a tiny real function with the file, name, line and globals of an interpreted frame.
Natives that look at their caller (`warnings.warn`, `logging`, `sys._getframe`) are called through
the stand-ins of all interpreted frames, so that they find what they would find without capture.
"""

from __future__ import annotations

import builtins
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, GeneratorType
from typing import Any

import torch

from ladder.capture.python.bytecode import Program, program_of
from ladder.capture.python.prescan import Unfollowed


class Absent:
    """The type of `NULL`, CPython's empty stack slot."""

    def __repr__(self) -> str:
        return "NULL"


OURS = str(Path(__file__).parents[2])
"""The folder of this project's package."""
NULL = Absent()
NO_OVERRIDE = Absent()


class Frame:
    """One activation of a Python function under the interpreter.

    function: What runs.
    slots: Name to value, for locals, cells and free variables alike; unbound names are not there.
    breaks: Instruction -> how often the graph broke there; `operators`: how many were recorded meanwhile;
        `before`: how many the segment had when it began.
    activation: What is left out where the graph breaks here again and again; None before the first break, and
        if that is not known.
    """

    __slots__ = (
        "activation",
        "before",
        "breaks",
        "builtins",
        "code",
        "function",
        "handled",
        "index",
        "keywords",
        "names",
        "operators",
        "override",
        "program",
        "slots",
        "stack",
        "yielded",
    )

    def __init__(self, function: FunctionType, slots: dict[str, Any]) -> None:
        self.function = function
        self.code: CodeType = function.__code__
        self.program: Program = program_of(self.code)
        self.names: dict[str, Any] = function.__globals__
        builtins = function.__globals__.get("__builtins__", __builtins__)
        self.builtins: dict[str, Any] = builtins if isinstance(builtins, dict) else vars(builtins)
        self.slots = slots
        self.activation: Unfollowed | None = None
        self.stack: list[Any] = []
        self.index = 0
        self.keywords: tuple[str, ...] = ()
        self.override: Any = NO_OVERRIDE
        self.handled: list[Any] = []
        self.yielded = False
        self.breaks: Counter[int] = Counter()
        self.operators = self.before = 0

    @property
    def line(self) -> int:
        """The line of the instruction that runs."""
        return self.program.instructions[max(self.index - 1, 0)].line


def bind(
    function: FunctionType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    defaults: tuple[Any, ...],
    keyword_defaults: dict[str, Any],
) -> dict[str, Any] | None:
    """Return the local variables at the first instruction of `function` called like this.

    None if the arguments do not fit; calling it natively raises the right TypeError.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    end = code.co_argcount + code.co_kwonlyargcount
    keyword_only = code.co_varnames[code.co_argcount : end]
    slots, rest = dict(zip(names, args, strict=False)), dict(kwargs)
    if not _bind_keywords(slots, rest, (*names[code.co_posonlyargcount :], *keyword_only)):
        return None
    by_default = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    by_default |= {name: keyword_defaults[name] for name in keyword_only if name in keyword_defaults}
    slots = by_default | slots
    if any(name not in slots for name in (*names, *keyword_only)):
        return None
    if code.co_flags & inspect.CO_VARARGS:
        slots[code.co_varnames[end]] = args[len(names) :]
        end += 1
    elif len(args) > len(names):
        return None
    if code.co_flags & inspect.CO_VARKEYWORDS:
        slots[code.co_varnames[end]] = rest
    elif rest:
        return None
    return slots


def _bind_keywords(slots: dict[str, Any], rest: dict[str, Any], names: tuple[str, ...]) -> bool:
    """Move the arguments `names` from `rest` to `slots`; say whether none was there already."""
    given = [name for name in names if name in rest]
    if any(name in slots for name in given):
        return False
    slots.update({name: rest.pop(name) for name in given})
    return True


def make_generator(frame: Frame, resume: Callable[[Frame, Any, bool], Any]) -> Generator[Any, Any, Any]:
    """Return a real generator that runs `frame`; ``resume(frame, value, is_exception)`` steps it."""

    def body(frame: Frame, resume: Callable[[Frame, Any, bool], Any]) -> Generator[Any, Any, Any]:
        given, is_error = None, False
        while True:
            value = resume(frame, given, is_error)
            if not frame.yielded:
                return value
            try:
                given, is_error = (yield value), False
            except BaseException as error:
                given, is_error = error, True

    code = body.__code__.replace(co_name=frame.code.co_name, co_qualname=frame.code.co_qualname)
    shaped = FunctionType(code, frame.names, frame.code.co_name)
    shaped.__qualname__ = frame.function.__qualname__
    made: Generator[Any, Any, Any] = shaped(frame, resume)
    return made


def guards_yields(code: CodeType) -> bool:
    """Say whether a generator stops inside ``try`` or ``with`` that goes on there when it is dropped."""
    program = program_of(code)
    stops = [at for at, item in enumerate(program.instructions) if item.op == "YIELD_VALUE"]
    return any(_handles_dropping(program, at) for at in stops)


def _handles_dropping(program: Program, index: int) -> bool:
    """Say whether a handler of an instruction does something with a `GeneratorExit`.

    One that is for exceptions of the language only raises it again.
    """
    handler = program.handler_of(index)
    if handler is None:
        return False
    at = handler.target
    while (item := program.instructions[at]).op != "RERAISE":
        if item.op == "LOAD_GLOBAL" and _is_language_exception(item.value):
            matching = [each.op for each in program.instructions[at + 1 : at + 3]]
            if matching != ["CHECK_EXC_MATCH", "POP_JUMP_IF_FALSE"]:
                return True
            at = program.instructions[at + 2].value
        elif item.op in PASSING_ON:
            at += 1
        else:
            return True
    return _handles_dropping(program, at)


PASSING_ON = frozenset({"PUSH_EXC_INFO", "COPY", "POP_EXCEPT", "NOP", "CALL_INTRINSIC_1"})
"""Instructions of handlers that raise again what they do not handle."""


def _is_language_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


def closes(value: Any, depth: int = 4) -> bool:
    """Say whether a generator that stands where `guards_yields` says goes on when `value` dies."""
    if not depth or not (type(value) is tuple or hasattr(type(value), "__next__")):
        return False
    code, inside = None, gc.get_referents(value)
    if type(value) is GeneratorType and value.gi_frame is not None:
        inner = value.gi_frame.f_locals.get("frame")
        frame = inner if type(inner) is Frame else None
        code = frame.code if frame else value.gi_code
        inside = [*(frame.slots if frame else value.gi_frame.f_locals).values()]
    return (code is not None and guards_yields(code)) or any(closes(item, depth - 1) for item in inside)


_templates: dict[tuple[str, str, int], CodeType] = {}


def _stand_in(file: str, name: str, line: int) -> CodeType:
    key = (file, name, line)
    if key not in _templates:
        source = "\n" * (line - 1) + "def stand_in(_call, _args, _kwargs): return _call(*_args, **_kwargs)"
        module = compile(source, file, "exec")
        code = next(item for item in module.co_consts if isinstance(item, CodeType))
        _templates[key] = code.replace(co_name=name, co_qualname=name)
    return _templates[key]


def is_stand_in(code: CodeType) -> bool:
    """Say whether `code` is that of a stand-in."""
    return code.co_varnames == ("_call", "_args", "_kwargs")


class Through:
    """`call`, made from beneath stand-ins for `places`, outermost first.

    A place is (file, function name, line, globals).
    """

    __slots__ = ("call", "outers")

    def __init__(self, places: list[tuple[str, str, int, dict[str, Any]]], call: Any) -> None:
        self.outers = [
            FunctionType(_stand_in(file, name, max(line, 1)), names, name)
            for file, name, line, names in places
        ]
        self.call = call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.beneath(self.call, *args, **kwargs)

    def beneath(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `call` from beneath the stand-ins."""
        packed: tuple[Any, ...] = (call, args, kwargs)
        for outer in reversed(self.outers[1:]):
            packed = (outer, packed, {})
        return self.outers[0](*packed) if self.outers else call(*args, **kwargs)


def place_of(frame: Frame) -> tuple[str, str, int, dict[str, Any]]:
    """Return where `frame` is, as `Through` takes it."""
    return frame.code.co_filename, frame.code.co_name, frame.line, frame.names


def user_line(stack: Sequence[str]) -> str:
    """Return the innermost line of `stack` outside of torch, of Python's own library and of capture.

    The innermost of all where there is none.
    """
    return next((line for line in reversed(stack) if not _is_library(line)), stack[-1] if stack else "entry")


def _is_library(line: str) -> bool:
    torch_home, standard = (str(Path(item.__file__ or "").parent) for item in (torch, inspect))
    return line.startswith((OURS, torch_home)) or (line.startswith(standard) and "site-packages" not in line)


def new_cell(slots: dict[str, Any], name: str) -> CellType:
    """Make the variable `name` of `slots` a cell and return it."""
    cell = CellType(slots[name]) if name in slots else CellType()
    slots[name] = cell
    return cell
