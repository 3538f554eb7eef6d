"""Which way a program goes on from a branch, as far as its bytecode alone tells."""

from __future__ import annotations

from ladder.capture.python.bytecode import Program
from ladder.capture.python.liveness import followers
from ladder.capture.python.words import words

_RAISES = frozenset(words("RAISE_VARARGS RERAISE"))
_GOES_ON = frozenset(words("RETURN_VALUE RETURN_CONST YIELD_VALUE"))


def only_raises(program: Program, index: int, holds: bool) -> bool:
    """Tell whether all that follows instruction `index` is an error, if the truth that it reads is `holds`.

    That of an `assert`, or of ``if not valid: raise``; what handles the error is not looked for.
    """
    branch = program.instructions[index]
    if branch.op not in ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"):
        return False
    jumps = holds is (branch.op == "POP_JUMP_IF_TRUE")
    waiting, seen = [branch.value if jumps else index + 1], set[int]()
    while waiting:
        at = waiting.pop()
        if program.instructions[at].op in _GOES_ON:
            return False
        if at not in seen:
            seen.add(at)
            waiting += followers(program, at)
    return any(program.instructions[at].op in _RAISES for at in seen)
