"""Bytecode as data: one instruction list per code object, the same words for CPython 3.11 to 3.14.

The interpreter dispatches on `Instruction.op`. What differs between versions by name only is
renamed here; what differs in behaviour reads `VERSION`.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

VERSION = sys.version_info[:2]

_RENAMED = {
    f"POP_JUMP_{way}_IF_{test}": f"POP_JUMP_IF_{test}"
    for way in ("FORWARD", "BACKWARD")
    for test in ("TRUE", "FALSE", "NONE", "NOT_NONE")
} | {
    "JUMP_FORWARD": "JUMP",
    "JUMP_BACKWARD": "JUMP",
    "JUMP_BACKWARD_NO_INTERRUPT": "JUMP",
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_CLASSDEREF": "LOAD_FROM_CLASS_OR_DEREF",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_FROM_CLASS_OR_DEREF",
    "RESUME": "NOP",
    "PRECALL": "NOP",
    "CACHE": "NOP",
    "EXTENDED_ARG": "NOP",
    "NOT_TAKEN": "NOP",
    "POP_ITER": "POP_TOP",
    "LOAD_FAST_BORROW": "LOAD_FAST",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": "LOAD_FAST_LOAD_FAST",
    "LOAD_SMALL_INT": "LOAD_CONST",
    "LOAD_COMMON_CONSTANT": "LOAD_CONST",
}
_ERRORS = (AssertionError, NotImplementedError)
_INLINED = object()
_SUBSCRIPT = "[]"
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


@dataclass(slots=True)
class Instruction:
    """One instruction: `op` is its name, `arg` its number, `value` what the number stands for.

    For a jump, `value` is the *index* of its target in `Program.instructions`. `effect` is by how much
    it makes the stack higher; None for jumps, where that depends on the way taken.
    """

    op: str
    arg: int
    value: Any
    offset: int
    line: int
    text: str
    effect: int | None


@dataclass(slots=True)
class Handler:
    """One row of the exception table, over instruction indices ``[start, end)``."""

    start: int
    end: int
    target: int
    depth: int
    lasti: bool


@dataclass(slots=True)
class Program:
    """A decoded code object."""

    code: CodeType
    instructions: list[Instruction]
    handlers: list[Handler]
    operations: frozenset[str]
    intrinsics: frozenset[int]

    def handler_of(self, index: int) -> Handler | None:
        """Return the handler that guards instruction `index`."""
        for handler in self.handlers:
            if handler.start <= index < handler.end:
                return handler
        return None


def _varints(table: bytes) -> Iterator[int]:
    """Yield the integers of an exception table (six bits a byte, bit 6: more follow)."""
    stream = iter(table)
    for byte in stream:
        value = byte & 63
        while byte & 64:
            byte = next(stream)
            value = value << 6 | byte & 63
        yield value


def _handlers(code: CodeType, index_of: dict[int, int], end: int) -> list[Handler]:
    numbers = list(_varints(code.co_exceptiontable))
    rows = []
    for at in range(0, len(numbers), 4):
        start, length, target, flags = numbers[at : at + 4]
        first, last = index_of[start * 2], index_of.get((start + length) * 2, end)
        rows.append(Handler(first, last, index_of[target * 2], flags >> 1, bool(flags & 1)))
    return rows


def _value(item: dis.Instruction) -> Any:
    """Return what the number of an instruction that is no jump stands for.

    3.14 writes calls of `all`, `any` and `tuple` out as loops, for names that are the built-in functions.
    The comparison which asks that fails here, so that the call is taken, which stands beside.
    """
    if item.opname == "LOAD_COMMON_CONSTANT":
        return _ERRORS[item.arg] if item.arg in (0, 1) else _INLINED
    return item.arg if item.opname == "LOAD_SMALL_INT" else item.argval


def _decode(code: CodeType) -> Program:
    raw = list(dis.get_instructions(code))
    index_of = {item.offset: number for number, item in enumerate(raw)}
    instructions: list[Instruction] = []
    line = code.co_firstlineno
    for item in raw:
        starts: Any = getattr(item, "starts_line" if VERSION < (3, 13) else "line_number")
        line = starts if isinstance(starts, int) and not isinstance(starts, bool) else line
        value = index_of[item.argval] if item.opcode in _JUMPS else _value(item)
        name = _RENAMED.get(item.opname, item.opname)
        name = "BINARY_SUBSCR" if name == "BINARY_OP" and item.argrepr == _SUBSCRIPT else name
        effect = None if item.opcode in _JUMPS else dis.stack_effect(item.opcode, item.arg)
        instructions.append(Instruction(name, item.arg or 0, value, item.offset, line, item.argrepr, effect))
    # Jumps may land on an EXTENDED_ARG, which is a NOP here: it falls through to its instruction.
    handlers = _handlers(code, index_of, len(raw))
    operations = frozenset(item.op for item in instructions)
    intrinsics = frozenset(item.arg for item in instructions if item.op == "CALL_INTRINSIC_1")
    return Program(code, instructions, handlers, operations, intrinsics)


_programs: dict[int, tuple[CodeType, Program]] = {}


def program_of(code: CodeType) -> Program:
    """Return `code` decoded; decoded once for each code object."""
    known = _programs.get(id(code))
    if known is None:
        known = _programs[id(code)] = (code, _decode(code))
    return known[1]
