"""What bytecode alone tells of how a frame goes on: variables that it may read, branches that only raise."""

from __future__ import annotations

from types import CodeType

from ladder.capture.python.bytecode import Program
from ladder.capture.python.words import words

_READS = {"LOAD_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_FROM_CLASS_OR_DEREF"}
_READS_TOO = {"DELETE_FAST", "STORE_DEREF", "DELETE_DEREF", "MAKE_CELL"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ((0, 1), ()),
    "STORE_FAST_LOAD_FAST": ((1,), (0,)),
    "STORE_FAST_STORE_FAST": ((), (0, 1)),
}
_known: dict[int, tuple[CodeType, list[frozenset[str]]]] = {}


def live_names(program: Program, index: int) -> frozenset[str]:
    """Return the names that may be read from instruction `index` on."""
    known = _known.get(id(program.code))
    if known is None:
        known = _known[id(program.code)] = (program.code, _solve(program))
    return known[1][index] if index < len(known[1]) else frozenset()


def followers(program: Program, index: int) -> list[int]:
    """Return the instructions that may come after one that raises nothing."""
    item = program.instructions[index]
    after = [] if item.op in _ENDS or item.op == "JUMP" else [index + 1]
    if item.op in ("FOR_ITER", "SEND"):
        after += [item.value, item.value + 1]
    elif "JUMP" in item.op:
        after.append(item.value)
    return [at for at in after if at < len(program.instructions)]


def _uses(program: Program, index: int) -> tuple[set[str], set[str]]:
    """Return (read, overwritten) names of one instruction."""
    item = program.instructions[index]
    if item.op in _PAIRS:
        reads, writes = _PAIRS[item.op]
        return {item.value[at] for at in reads}, {item.value[at] for at in writes}
    if item.op in _READS or item.op in _READS_TOO:
        return {item.value}, set()
    return set(), {item.value} if item.op == "STORE_FAST" else set()


def _solve(program: Program) -> list[frozenset[str]]:
    count = len(program.instructions)
    live: list[frozenset[str]] = [frozenset()] * (count + 2)
    cells = frozenset(program.code.co_freevars) | frozenset(program.code.co_cellvars)
    if "__class__" in cells:
        cells |= frozenset(program.code.co_varnames[:1])  # what `super()` without arguments reads
    effects = [_uses(program, index) for index in range(count)]
    changed = True
    while changed:
        changed = False
        for index in reversed(range(count)):
            after = frozenset().union(*(live[at] for at in followers(program, index)))
            reads, writes = effects[index]
            handler = program.handler_of(index)
            kept = live[handler.target] if handler else frozenset()
            now = (after - writes) | reads | kept | cells
            if now != live[index]:
                live[index], changed = now, True
    return live


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
