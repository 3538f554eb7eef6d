"""Chains in PTX: vector accesses, shuffles, approximate instructions, early launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.chain.dialect import Dialect, Early
from ladder.lower.chain.indices import Index
from ladder.lower.cuda.functions import CHEAP, FUNCTIONS
from ladder.lower.cuda.launch import Overlap
from targets import TileDevice

Expr = Any

ACCESS = {4: ".v4", 2: ".v2", 1: ""}
"""Words of an access -> its suffix."""

PACK = """
__forceinline__ __device__ unsigned int ladder_pack_{name}(float low, float high) {{
  unsigned int packed;
  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}}
"""
PACKED = {"float16": "f16x2", "bfloat16": "bf16x2"}


class CudaDialect(Dialect):
    """NVIDIA GPUs."""

    functions: ClassVar[Mapping[str, Callable[..., Expr]]] = FUNCTIONS
    cheap: ClassVar[Mapping[str, Callable[..., Expr]]] = CHEAP

    def __init__(self, device: TileDevice) -> None:
        super().__init__(device)
        self.overlap = Overlap(device)

    @property
    def noalias(self) -> bool:
        """A kernel that starts early must not read before it has waited, whatever is known of arguments."""
        return not self.overlap.possible

    def start(self, blocks: Expr, threads: int, words: int, inputs: Sequence[Early]) -> tuple[Expr, Expr]:
        self.overlap.declare("blockIdx.x", "threadIdx.x", shared=bool(words))
        b.device()
        (block,) = b.block_index([blocks])
        thread = b.thread_index(threads)
        if words:
            pool = b.shared_pool()
            self.shared = pool.alloc((words,), "uint32", align=128)
            pool.commit()
        self.overlap.release()
        if self.overlap.possible:
            self.prefetch(b.bind(block * threads + thread), inputs)
        self.overlap.wait()
        return block, thread

    def prefetch(self, first: Expr, inputs: Sequence[Early]) -> None:
        """Bring inputs into L2, a line per thread: a model's parameters have left it since their last use."""
        for lines, address in inputs:
            with b.when(first < lines):
                b.ptx("prefetch.global.L2", address(first))

    def sync(self) -> None:
        b.block_sync()

    def load(self, registers: Any, first: int, count: int, buffer: Any, index: Index) -> None:
        space = "shared" if self.shared is not None and buffer.same_as(self.shared) else "global"
        target = (registers[first + word] for word in range(count))
        b.ptx(f"ld.{space}{ACCESS[count]}.u32", *target, buffer.ptr_to(list(index)))

    def load_one(self, register: Any, buffer: Any, index: Index) -> None:
        bits = str(register.dtype).removeprefix("uint")
        b.ptx(f"ld.global.u{bits}", register[0], buffer.ptr_to(list(index)))

    def store(self, buffer: Any, index: Index, words: Sequence[Expr]) -> None:
        b.ptx(f"st.global{ACCESS[len(words)]}.u32", buffer.ptr_to(list(index)), *words)

    def shuffle(self, value: Expr, distance: int, thread: Expr) -> Expr:
        return T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, self.wave, self.wave)

    def rounded_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        source = PACK.format(name=dtype, ptx=PACKED[dtype])
        return b.call_inline(f"ladder_pack_{dtype}", source, "uint32", low, high)
