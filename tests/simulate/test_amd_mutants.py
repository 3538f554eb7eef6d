"""Planted bugs in AMD kernels are found, each with its reason: mutants made by rewriting their TIR."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from problems import gemm, require_caught, require_right
from rewriting import NOTHING, Once, called, intrinsic, is_store, remove, rewrite, rewrite_expression, stored
from test_mutants import Mutant
from tvm import tirx

from ladder.lower.build import emit
from schedules.schedule import GpuSchedule
from targets import get_device

TARGET = "rocm/gfx942"
SYNC = "tirx.tvm_storage_sync"
MFMA = "amdgcn.mfma"


def mfma(**fields: Any) -> GpuSchedule:
    """Return a small mfma schedule: two waves share 64 rows."""
    return GpuSchedule(**{"pipeline": "mfma", "tile_m": 32, "stages": 2, "warps": 4, "tile_n": 64, **fields})


def dot(**fields: Any) -> GpuSchedule:
    """Return a small dot schedule: four waves share K."""
    extents = {
        "tile_m": 1,
        "tile_n": 64,
        "tile_k": 256,
        "stages": 2,
        "warps": 4,
        "split_k": 4,
        "warp_rows": 32,
    }
    return GpuSchedule(**{"pipeline": "dot", "placement": "accumulator", **extents, **fields})


def groups(**fields: Any) -> GpuSchedule:
    """Return a small schedule whose columns hold groups of K."""
    return dot(**{"pipeline": "mfma_groups", "tile_k": 64, **fields})


KERNELS = {
    "mfma": (gemm(group_size=64, scale=True, k=450), mfma(), 33),
    "mfma nf4": (gemm(weight="nf4", group_size=64, scale=True, k=450), mfma(), 17),
    "mfma int8": (gemm(activation="int8", weight="int8", k=450), mfma(placement="accumulator"), 33),
    "mfma split": (gemm(weight="int4", k=700), mfma(split_k=2, tile_k=128), 20),
    "dot": (gemm(weight="int4", k=1100), dot(), 1),
    "groups": (gemm(weight="int4", group_size=64, scale=True, k=2200), groups(), 1),
}
"""Kernels that mutants are made of, with M."""


@cache
def _kernel(name: str) -> Any:
    problem, schedule, _ = KERNELS[name]
    return emit(problem, get_device(TARGET), schedule, "simulated")


def _plus(amount: int) -> Callable[[Any], Any]:
    """Return a change of a whole index or base."""

    def change(e: Any) -> Any:
        if type(e).__name__ == "Ramp":
            return tirx.Ramp(e.base + amount, e.stride, e.lanes)
        return e + amount

    return change


def _without_xor(e: Any) -> Any:
    return e.a if type(e).__name__ == "BitwiseXor" else None


def _loads(of: str, change: Callable[[Any], Any], axis: int = -1) -> Callable[[Any], Any]:
    """Return a change of one index of every load from buffers of a scope and element type."""
    scope, dtype = of.split()

    def apply(e: Any) -> Any:
        if type(e).__name__ != "TensorLoad" or e.source.scope() != scope or str(e.source.dtype) != dtype:
            return None
        indices = list(e.indices)
        indices[axis] = change(indices[axis])
        return e.source.vload(indices)

    return apply


def _products(change: Callable[[list[Any]], list[Any]]) -> Once:
    """Return a change of the operands of matrix instructions, whose results are bound to names."""

    def changed(s: Any) -> Any:
        return tirx.Bind(s.var, rewrite_expression(s.value, intrinsic(MFMA, change)))

    return Once(lambda s: type(s).__name__ == "Bind" and MFMA in str(s.value), changed)


def _swapped(operands: list[Any]) -> list[Any]:
    name, a, b, *rest = operands
    return [name, b, a, *rest]


def _without_sums(operands: list[Any]) -> list[Any]:
    name, a, b, sums, *rest = operands
    zero = tirx.FloatImm("float32", 0.0) if "float32" in str(sums.ty) else tirx.IntImm("int32", 0)
    return [name, a, b, tirx.Broadcast(zero, 4), *rest]


def _guards(which: int) -> Once:
    """Return a change that drops the condition of a branch around stores."""

    def matches(s: Any) -> bool:
        return type(s).__name__ == "IfThenElse" and s.else_case is None

    return Once(matches, lambda s: s.then_case, which)


def _cleared_sums(dtype: str) -> Once:
    def matches(s: Any) -> bool:
        return is_store(s, "local", dtype) and type(s.value).__name__ in ("FloatImm", "IntImm")

    return Once(matches, lambda s: NOTHING)


MUTANTS: dict[str, Mutant] = {
    # ---- barriers ---------------------------------------------------------------------------------
    "mfma: barrier of a step removed": Mutant("mfma", lambda: _without_sync("mfma", 0), "race"),
    "mfma: barrier of every second step removed": Mutant("mfma", lambda: _without_sync("mfma", 1), "race"),
    "mfma int8: barrier of a step removed": Mutant(
        "mfma int8", lambda: _without_sync("mfma int8", 0), "race"
    ),
    "dot: barrier of a step removed": Mutant("dot", lambda: _without_sync("dot", 0), "race"),
    "dot: sums overwrite x without a barrier": Mutant(
        "dot", lambda: _without_sync("dot", -2), "race", "overwrites bytes read by"
    ),
    "dot: sums joined without a barrier": Mutant(
        "dot", lambda: _without_sync("dot", -1), "race", "reads bytes written by"
    ),
    "mfma split: sums joined without a barrier": Mutant(
        "mfma split", lambda: _without_sync("mfma split", -1), "race", "reads bytes written by"
    ),
    "groups: barrier of a step removed": Mutant("groups", lambda: _without_sync("groups", 0), "race"),
    "groups: columns take x of one another": Mutant("groups", lambda: _columns(True), "wrong values"),
    "groups: columns take no x": Mutant("groups", lambda: _columns(False), "wrong values"),
    # ---- stages -----------------------------------------------------------------------------------
    "mfma: the next stage goes where the last one is read": Mutant("mfma", lambda: _stage_kept(), "race"),
    "dot: the next stage goes where the last one is read": Mutant("dot", lambda: _stage_kept(), "race"),
    # ---- addresses --------------------------------------------------------------------------------
    "mfma: swizzle missing where x is written": Mutant(
        "mfma", lambda: stored("shared", "uint32", index=_without_xor), "wrong values"
    ),
    "mfma: x read by one word": Mutant(
        "mfma", lambda: stored("local", "uint32", value=_loads("shared uint32", _plus(1))), "misaligned"
    ),
    "mfma: x read one place too far": Mutant(
        "mfma", lambda: stored("local", "uint32", value=_loads("shared uint32", _plus(4))), "wrong values"
    ),
    "mfma: a packed tile too far": Mutant(
        "mfma", lambda: stored("local", "uint32", value=_loads("global uint32", _plus(1), 1)), "out of bounds"
    ),
    "mfma: words of another lane": Mutant(
        "mfma", lambda: stored("local", "uint32", value=_loads("global uint32", _plus(-4))), "out of bounds"
    ),
    "dot: words by half": Mutant(
        "dot", lambda: stored("local", "uint32", value=_loads("global uint32", _plus(2))), "misaligned"
    ),
    "mfma: a row of x too far": Mutant(
        "mfma",
        lambda: stored("local", "uint32", value=_loads("global float16", _plus(1), 0)),
        "out of bounds",
    ),
    "mfma: stores one row too far": Mutant(
        "mfma", lambda: stored("global", "float32", index=_plus(1)), "out of bounds"
    ),
    "dot: stores one column too far": Mutant(
        "dot", lambda: stored("global", "float32", index=_plus(1)), "out of bounds"
    ),
    # ---- registers --------------------------------------------------------------------------------
    "mfma: sums not cleared": Mutant("mfma", lambda: _cleared_sums("float32"), "uninitialised"),
    "mfma int8: sums not cleared": Mutant("mfma int8", lambda: _cleared_sums("uint32"), "uninitialised"),
    "dot: sums not cleared": Mutant("dot", lambda: _cleared_sums("float32"), "uninitialised"),
    "mfma: A and B swapped": Mutant("mfma", lambda: _products(_swapped), "wrong values"),
    "mfma: products overwrite": Mutant("mfma", lambda: _products(_without_sums), "wrong values"),
    "mfma int8: products overwrite": Mutant("mfma int8", lambda: _products(_without_sums), "wrong values"),
    "mfma nf4: bytes of the other word": Mutant(
        "mfma nf4", lambda: _everywhere(intrinsic("amdgcn.perm", _swapped)), "wrong values"
    ),
    # ---- guards -----------------------------------------------------------------------------------
    "mfma: tokens beyond M stored": Mutant("mfma", lambda: _guards(1), "out of bounds"),
}


def _columns(takes: bool) -> Any:
    """Return a change of where operands are read: always x, or always zeros."""

    def apply(e: Any) -> Any:
        return None if type(e).__name__ != "Select" else (e.true_value if takes else e.false_value)

    return stored("local", "uint32", value=_loads("shared uint32", lambda e: rewrite_expression(e, apply)))


def _stage_kept() -> Once:
    """Return a change that writes x of every iteration to the first stage."""

    def to_first(e: Any) -> Any:
        return e.b if type(e).__name__ == "Add" and type(e.a).__name__ == "IntImm" else None

    return stored("shared", "uint32", index=to_first)


def _without_sync(kernel: str, index: int) -> Once:
    """Return a change that removes a barrier, counted from the end if negative."""
    seen: list[Any] = []
    rewrite(_kernel(kernel), lambda s: seen.append(s) if called(s) == SYNC else None)
    return remove(SYNC, index % len(seen))


def _everywhere(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change of every expression that is bound to a name or kept in a register."""

    def apply(s: Any) -> Any:
        if is_store(s, "local", "uint32"):
            return tirx.BufferStore(s.buffer, rewrite_expression(s.value, change), s.indices)
        return tirx.Bind(s.var, rewrite_expression(s.value, change)) if type(s).__name__ == "Bind" else None

    return apply


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_without_bugs(name: str) -> None:
    problem, _, m = KERNELS[name]
    require_right(_kernel(name), problem, m, TARGET)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    mutant = MUTANTS[name]
    problem, _, m = KERNELS[mutant.kernel]
    require_caught(mutant, _kernel(mutant.kernel), problem, m, TARGET)
