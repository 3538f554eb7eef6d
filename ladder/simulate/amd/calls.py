"""All tables of AMD calls together, for each architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from ladder.simulate.amd import arithmetic, conversions, lanes, mfma, scaled, wmma
from ladder.simulate.amd.wmma import CORES, HalfCore
from ladder.simulate.banks import Banks
from ladder.simulate.barriers import GroupWait
from ladder.simulate.cohort import Cohort, Wait
from ladder.simulate.program import Step
from ladder.simulate.translate import Calls, CallView, Translator, UnknownCallError

WAVE = 64

FOURS = ((0, 20), (4, 16), (8, 28), (12, 24), (32, 52), (36, 48), (40, 60), (44, 56))
"""First lanes of the two fours of lanes that each pass of a 16-byte read serves."""

LDS = Banks(WAVE, reads={16: tuple((*range(a, a + 4), *range(b, b + 4)) for a, b in FOURS)})
"""32 banks: passes serve lanes that follow each other, but for 16-byte reads (ROCm blog "Avoiding LDS Bank
Conflicts on AMD GPUs Using CK-Tile Framework", 2025). gfx950 has 64, whose passes are not published: its
conflicts are counted as if it had 32."""

RDNA_LDS = Banks(wmma.LANES)
"""32 banks for each half of a workgroup processor (RDNA3 ISA, section 1.1), whose passes are taken to serve
lanes in order."""

EXTERNS = ("tirx.call_extern", "tirx.call_pure_extern")
"""Calls of functions of ``ladder/lower/rocm/bfloat16.ll``."""

INTRINSICS = ("tirx.call_llvm_intrin", "tirx.call_llvm_pure_intrin")


def intrinsic_name(number: int) -> str:
    """Return the name of an LLVM intrinsic by the number that TIR keeps."""
    import tvm

    return str(tvm.get_global_func("target.llvm_get_intrinsic_name")(number))


def _named(t: Translator, call: CallView) -> CallView:
    """Return a call of an LLVM intrinsic, or of a function of ours, under its own name."""
    if call.name in EXTERNS:
        return replace(call, name=call.modifiers[0], modifiers=call.modifiers[1:])
    if call.name not in INTRINSICS:
        return call
    name = intrinsic_name(t.number(call.operands[0]))
    return replace(call, name=name, operands=call.operands[1:])


def _nothing(t: Translator, call: CallView) -> Step:
    return lambda c: None


def _barrier(t: Translator, call: CallView) -> Callable[[Cohort], Wait | None]:
    def make(c: Cohort) -> Wait | None:
        if "warp" in call.modifiers:
            c.require_whole("a barrier of the wave", call.statement)
            c.machine.memory.clocks.sync_lanes(c.warps)
            return None
        barrier = c.machine.block_barrier
        barrier.arrive(c, call.statement)
        return GroupWait(barrier, call.statement)

    return make


HINTS = (
    "llvm.amdgcn.sched.barrier",
    "llvm.amdgcn.sched.group.barrier",
    "llvm.amdgcn.iglp.opt",
    "llvm.amdgcn.s.setprio",
    "llvm.amdgcn.s.waitcnt",
    "llvm.amdgcn.s.wait.dscnt",
    "llvm.amdgcn.s.sleep",
    "llvm.fake.use",
)
"""Calls that change when something happens, never what: LLVM waits for loads by itself."""


@cache
def calls_for(arch: str) -> Calls:
    """Return the semantics of what kernels of an architecture call.

    Raises UnknownCallError if the simulator does not know the architecture; names those it does.
    """
    if arch not in CORES:
        raise UnknownCallError(f"the simulator does not know {arch}; it knows {', '.join(CORES)}")
    core = CORES[arch]
    halves = isinstance(core, HalfCore)
    reads: dict[str, Callable[[Translator, CallView], Any]] = {**lanes.READS, **arithmetic.READS}
    reads |= arithmetic.rows_of(core.bytes_as, core.flushes)
    reads |= wmma.rows(core) if halves else mfma.rows(core)
    if core is mfma.CDNA4:
        reads |= {scaled.NAME: scaled.translate, **conversions.READS}
    return Calls(
        reads=reads,
        steps=dict.fromkeys(HINTS, _nothing),
        stops={"tirx.tvm_storage_sync": _barrier, "llvm.amdgcn.s.barrier": _barrier},
        helpers=_no_helpers,
        lanes=core.lanes,
        banks=RDNA_LDS if halves else LDS,
        named=_named,
    )


def _no_helpers(t: Translator, call: CallView, source: str) -> Any:
    raise UnknownCallError(f"{call.name} is CUDA source, not for an AMD kernel")
