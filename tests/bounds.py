"""Whether a function stays inside its tensors: every index in range, by the loops and branches around it.

`unproven` takes a PrimFunc as an emitter builds it and asks z3, with the extents and conditions on the way as
what is known. An access for which it finds no proof is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm_ffi
import z3
from tvm import tirx

Expr = Any

TIMEOUT = 2000
"""Milliseconds for one question."""

LARGEST = 1 << 24
"""Size of an open extent at most."""

COMPARISONS = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "And": lambda a, b: z3.And(a, b),
    "Or": lambda a, b: z3.Or(a, b),
}

ARITHMETIC = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: -a / -b if _is_negative(b) else a / b,
    "FloorMod": lambda a, b: -(-a % -b) if _is_negative(b) else a % b,
    "Min": lambda a, b: z3.If(a < b, a, b),
    "Max": lambda a, b: z3.If(a > b, a, b),
}
"""Of integers; z3's division is the one that rounds down where divisors are positive, as unknown ones are."""


def _is_negative(number: Any) -> bool:
    """Tell whether a divisor is a number below 0."""
    return z3.is_int_value(number) and number.as_long() < 0


@dataclass(frozen=True)
class Access:
    """An access that is not proven to lie inside.

    Parameters
    ----------
    buffer, axis, index, extent
        What is accessed where.
    found
        Values of variables for which it lies outside; empty if z3 does not know.
    """

    buffer: str
    axis: int
    index: str
    extent: str
    found: str

    def __str__(self) -> str:
        """Return a sentence."""
        where = f"at {self.found}" if self.found else "for all that is known"
        return (
            f"index {self.index} of axis {self.axis} of {self.buffer} may lie outside {self.extent} {where}"
        )


def unproven(function: Any) -> list[Access]:
    """Return the accesses of a PrimFunc that no proof keeps inside their tensors.

    Open sizes are at least 1: kernels are not called for others.
    """
    return _Walk(function).run()


class _Walk:
    """The statements of one function, with what is known at each."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.terms: dict[Any, Any] = {}
        self.quotients: list[tuple[Any, Any]] = []
        """Divisions by open extents."""
        self.lasting: list[Any] = []
        """What holds everywhere."""
        self.known: list[Any] = []
        self.found: list[Access] = []
        self.asked: set[Any] = set()

    def run(self) -> list[Access]:
        """Visit the function."""
        for parameter in self.function.params:
            if not tirx.buffer.is_buffer_var(parameter):
                size = self.term(parameter)
                self.known += [size >= 1, size <= LARGEST]
        self.statement(self.function.body)
        return self.found

    @contextmanager
    def knowing(self, *facts: Any) -> Iterator[None]:
        before = len(self.known)
        self.known += facts
        yield
        del self.known[before:]

    # ---- statements ------------------------------------------------------------------------------------
    def statement(self, s: Any) -> None:
        """Visit a statement."""
        kind = type(s).__name__
        visit = getattr(self, f"visit_{kind.lower()}", None)
        if visit is not None:
            visit(s)

    def visit_seqstmt(self, s: Any) -> None:
        for part in s.seq:
            self.statement(part)

    def visit_attrstmt(self, s: Any) -> None:
        self.statement(s.body)

    def visit_for(self, s: Any) -> None:
        self.expression(s.extent)
        at, start, extent = (self.term(e) for e in (s.loop_var, s.min, s.extent))
        with self.knowing(at >= start, at < start + extent):
            self.statement(s.body)

    def visit_ifthenelse(self, s: Any) -> None:
        self.expression(s.condition)
        condition = self.condition(s.condition)
        with self.knowing(condition):
            self.statement(s.then_case)
        if s.else_case is not None:
            with self.knowing(z3.Not(condition)):
                self.statement(s.else_case)

    def visit_bind(self, s: Any) -> None:
        self.expression(s.value)
        if str(s.value.ty).startswith(("int", "uint")):
            self.known.append(self.term(s.var) == self.term(s.value))

    def visit_bufferstore(self, s: Any) -> None:
        self.expression(s.value)
        self.access(s.buffer, s.indices)

    def visit_evaluate(self, s: Any) -> None:
        self.expression(s.value)

    # ---- expressions -----------------------------------------------------------------------------------
    def expression(self, e: Any) -> None:
        """Visit what an expression reads; a side of a condition only where it holds."""
        kind = type(e).__name__
        if kind == "TensorLoad":
            self.access(e.source, e.indices)
        elif kind == "Call" and str(e.op.name) == "tirx.if_then_else":
            self.expression(e.args[0])
            condition = self.condition(e.args[0])
            for holds, side in ((condition, e.args[1]), (z3.Not(condition), e.args[2])):
                with self.knowing(holds):
                    self.expression(side)
        else:
            for part in _parts(e):
                self.expression(part)

    def access(self, buffer: Any, indices: Sequence[Any]) -> None:
        for axis, (index, extent) in enumerate(zip(indices, buffer.ty.shape, strict=True)):
            self.expression(index)
            for at in _ends(index):
                self.require(buffer, axis, at, extent)

    def require(self, buffer: Any, axis: int, index: Any, extent: Any) -> None:
        """Ask whether an index may lie outside."""
        at, most = self.term(index), self.term(extent)
        question = z3.Or(at < 0, at >= most)
        key = (question.get_id(), *(fact.get_id() for fact in self.known))
        if key in self.asked:
            return
        self.asked.add(key)
        answer, model = self.answer([*self.known, *self.lasting, question])
        if answer == z3.unknown and self.quotients:
            answer, model = self.answer([*self.known, *self.lasting, question, *self.products(most)])
        if answer != z3.unsat:
            self.found.append(Access(self.name(buffer), axis, str(index), str(extent), model))

    def answer(self, facts: Sequence[Any]) -> tuple[Any, str]:
        """Return whether facts can hold together, and for which values."""
        solver = z3.Solver()
        solver.set("timeout", TIMEOUT)
        solver.add(*facts)
        answer = solver.check()
        return answer, str(solver.model()) if answer == z3.sat else ""

    def name(self, buffer: Any) -> str:
        """Return what a buffer is called."""
        places = [at for at, known in enumerate(self.function.params) if known.same_as(buffer)]
        return buffer.name or (f"argument {places[0]}" if places else "a scratch")

    def condition(self, e: Any) -> Any:
        """Return a condition as z3 has it; one that compares no integers is a truth value of its own."""
        kind = type(e).__name__
        if kind in COMPARISONS and (kind in ("And", "Or") or _is_integer(e.a)):
            part = self.condition if kind in ("And", "Or") else self.term
            return COMPARISONS[kind](part(e.a), part(e.b))
        if kind == "Not":
            return z3.Not(self.condition(e.a))
        return z3.Bool(f"c{tvm_ffi.structural_hash(e)}")

    def term(self, e: Any) -> Any:
        """Return an integer as z3 has it; what it does not know is a variable of its own."""
        if isinstance(e, int):
            return z3.IntVal(e)
        kind = type(e).__name__
        if kind == "IntImm":
            return z3.IntVal(int(e.value))
        if kind in ARITHMETIC:
            a, b = self.term(e.a), self.term(e.b)
            if kind in ("FloorDiv", "FloorMod") and not z3.is_int_value(b):
                self.quotients.append((a, b))
                self.lasting.append(b >= 1)
            return ARITHMETIC[kind](a, b)
        if kind == "Cast" and _is_integer(e.value):
            return self.term(e.value)
        if kind == "Select":
            return z3.If(self.condition(e.condition), self.term(e.true_value), self.term(e.false_value))
        key = e if kind == "Var" else tvm_ffi.structural_hash(e)
        return self.terms.setdefault(key, z3.Int(f"{getattr(e, 'name', 'value')}_{len(self.terms)}"))

    def products(self, most: Any) -> list[Any]:
        """Return what z3 does not find about quotients: one that reaches an extent is that many divisors."""
        found = []
        for a, b in self.quotients:
            found += [a == (a / b) * b + a % b, a % b >= 0, a % b < b]
            found += [z3.Implies(a / b >= bound, (a / b) * b >= bound * b) for bound in (most, z3.IntVal(0))]
        return found


def _is_integer(e: Any) -> bool:
    return str(e.ty).startswith(("int", "uint"))


def _parts(e: Any) -> list[Any]:
    """Return the operands of an expression."""
    kind = type(e).__name__
    if kind == "Call":
        return [a for a in e.args if type(a).__name__ != "StringImm"]
    if kind == "Shuffle":
        return list(e.vectors)
    names = ("a", "b", "value", "base", "condition", "true_value", "false_value")
    found = [getattr(e, name) for name in names if hasattr(e, name)]
    return [part for part in found if isinstance(part, tvm_ffi.Object)]


def _ends(index: Any) -> list[Any]:
    """Return the first and the last index of an access."""
    if type(index).__name__ != "Ramp":
        return [index]
    return [index.base, index.base + (int(index.lanes) - 1) * index.stride]
