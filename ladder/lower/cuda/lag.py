"""A barrier of a block that lags: its warps wait for what each of them did one phase earlier.

A warp that is ahead need not stop until others have caught up; it stops when it is two phases ahead.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b

Expr = Any


class LaggingBarrier:
    """Emits an mbarrier at which each warp arrives once a phase (PTX ISA, "mbarrier").

    Parameters
    ----------
    pool
        Shared memory.
    thread, threads
        This thread of the block, and how many there are.
    """

    def __init__(self, pool: Any, thread: Expr, threads: int) -> None:
        self.word = pool.alloc((1,), "uint64", align=128)
        self.thread, self.warps = thread, threads // 32

    def initialise(self) -> None:
        """Emit the initialisation; a barrier of the block must follow before the first arrival."""
        with b.when(self.thread == 0):
            b.emit(T.ptx.mbarrier.init.shared.b64(self.word.ptr_to([0]), T.uint32(self.warps)))

    def arrive(self) -> None:
        """Emit the arrival of this warp: what its lanes read and wrote before is done."""
        b.emit(T.cuda.warp_sync())
        with b.when(self.thread % 32 == 0):
            b.emit(T.ptx.mbarrier.arrive.shared.b64(self.word.ptr_to([0]), T.uint32(1)))

    def wait(self, parity: Expr) -> None:
        """Emit a wait until all warps have arrived in the phase of a parity."""
        b.emit(T.cuda.mbarrier_wait(self.word.ptr_to([0]), parity))
