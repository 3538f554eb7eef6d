"""Rewrites TIR functions: mutants of shipped kernels for the simulator to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, tirx

Change = Callable[[Any], Any]
"""Returns a statement (or expression) to put in place of the one given, or None to look inside."""

NOTHING = object()
"""What a change returns to remove a statement."""


def rewrite(function: Any, change: Change) -> Any:
    """Return the function with every statement offered to ``change``, outermost first."""
    return function.with_body(_statement(function.body, change))


def _statement(s: Any, change: Change) -> Any:
    new = change(s)
    if new is NOTHING:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    if new is not None:
        return new
    kind = type(s).__name__
    if kind == "SeqStmt":
        return tirx.SeqStmt([_statement(part, change) for part in s.seq])
    if kind == "AttrStmt":
        return tirx.AttrStmt(s.node, s.attr_key, s.value, _statement(s.body, change))
    if kind == "IfThenElse":
        other = None if s.else_case is None else _statement(s.else_case, change)
        return tirx.IfThenElse(s.condition, _statement(s.then_case, change), other)
    if kind == "For":
        body = _statement(s.body, change)
        return tirx.For(s.loop_var, s.min, s.extent, s.kind, body, s.thread_binding, s.annotations, s.step)
    if kind == "While":
        return tirx.While(s.condition, _statement(s.body, change))
    return s


def rewrite_expression(e: Any, change: Change) -> Any:
    """Return an expression with every part offered to ``change``, outermost first."""
    new = change(e)
    if new is not None:
        return new
    kind = type(e).__name__
    if kind == "Call":
        arguments = [rewrite_expression(a, change) for a in e.args]
        return ir.Call(e.op, arguments, e.attrs, e.ty_args, e.span, e.ty)
    if hasattr(e, "a") and hasattr(e, "b"):
        return type(e)(rewrite_expression(e.a, change), rewrite_expression(e.b, change))
    if kind == "TensorLoad":
        return e.source.vload([rewrite_expression(index, change) for index in e.indices])
    if kind == "Cast":
        return tirx.Cast(e.ty, rewrite_expression(e.value, change))
    if kind == "Ramp":
        return tirx.Ramp(rewrite_expression(e.base, change), e.stride, e.lanes)
    if kind == "Broadcast":
        return tirx.Broadcast(rewrite_expression(e.value, change), e.lanes)
    if kind == "Select":
        parts = (e.condition, e.true_value, e.false_value)
        return tirx.Select(*(rewrite_expression(part, change) for part in parts))
    return e


def stored(scope: str, dtype: str, value: Change | None = None, index: Change | None = None) -> Once:
    """Return a change of stores to buffers of a scope and type: of the value, or of the last index."""

    def change(s: Any) -> Any:
        held = s.value if value is None else rewrite_expression(s.value, value)
        *outer, last = s.indices
        place = last if index is None else rewrite_expression(last, index)
        return tirx.BufferStore(s.buffer, held, [*outer, place])

    return Once(lambda s: is_store(s, scope, dtype), change)


def is_store(s: Any, scope: str, dtype: str) -> bool:
    """Whether a statement stores to a buffer of a scope and type."""
    return type(s).__name__ == "BufferStore" and (s.buffer.scope(), str(s.buffer.dtype)) == (scope, dtype)


def called(s: Any) -> str:
    """Return the operator (or helper) that a statement calls, or an empty string."""
    if type(s).__name__ != "Evaluate" or type(s.value).__name__ != "Call":
        return ""
    name = str(s.value.op.name)
    return str(s.value.args[0].value) if name == "tirx.cuda.func_call" else name


def with_arguments(s: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    """Return a call statement with its list of arguments changed."""
    call = s.value
    return tirx.Evaluate(
        ir.Call(call.op, change(list(call.args)), call.attrs, call.ty_args, call.span, call.ty)
    )


class Once:
    """Applies a change to occurrences ``which`` (from 0) of statements that match, by default to all."""

    def __init__(self, matches: Callable[[Any], bool], change: Change, *which: int) -> None:
        self.matches, self.change, self.which, self.seen = matches, change, which, 0

    def __call__(self, s: Any) -> Any:
        if not self.matches(s):
            return None
        index, self.seen = self.seen, self.seen + 1
        return self.change(s) if not self.which or index in self.which else None


def remove(name: str, *which: int) -> Once:
    """Return a change that removes calls of an operator or helper."""
    return Once(lambda s: called(s) == name, lambda s: NOTHING, *which)


def of_one_block(call: str) -> Once:
    """Return a change of a call of two blocks to one."""

    def change(arguments: list[Any]) -> list[Any]:
        return [ir.StringImm("cta_group::1") if "cta_group::2" in str(a) else a for a in arguments]

    return Once(lambda s: called(s) == call, lambda s: with_arguments(s, change))


def intrinsic(name: str, change: Callable[[list[Any]], list[Any]]) -> Change:
    """Return a change of the operands of an LLVM intrinsic, found by its name in the printed call."""

    def apply(e: Any) -> Any:
        if type(e).__name__ != "Call" or "call_llvm" not in str(e.op.name) or name not in str(e):
            return None
        return ir.Call(e.op, change(list(e.args)), e.attrs, e.ty_args, e.span, e.ty)

    return apply


def argument(name: str, position: int, value: Callable[[Any], Any], *which: int) -> Once:
    """Return a change that replaces one argument of calls."""

    def change(arguments: list[Any]) -> list[Any]:
        arguments[position] = value(arguments[position])
        return arguments

    return Once(lambda s: called(s) == name, lambda s: with_arguments(s, change), *which)
