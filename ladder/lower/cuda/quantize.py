"""Quantization of activations by CUDA kernels: PTX loads and conversions, early launch."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.functions import product
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.emission import helper
from ladder.lower.gpu.quantize import WARP, Quantization, Quantizer
from targets import TileDevice

Expr = Any

LOAD = "ld.global.L1::no_allocate.v4.u32"
"""x is read once. With ``.nc`` ptxas would move loads before `Overlap.wait`."""

NARROW_PAIR = {"fp8_e4m3": "cvt.rn.satfinite.e4m3x2.f32", "fp8_e5m2": "cvt.rn.satfinite.e5m2x2.f32"}
"""Two float32 to two 8-bit floats, rounded once (PTX ISA, cvt)."""


class CudaQuantizer(Quantizer):
    """One CUDA kernel being emitted."""

    def __init__(self, plan: Quantization, device: TileDevice) -> None:
        self.overlap = Overlap(device)
        super().__init__(plan)

    def begin(self, rows: Expr) -> tuple[Expr, Expr]:
        self.overlap.declare("blockIdx.x", "threadIdx.x")
        b.device()
        (row,) = b.block_index([rows])
        return row, b.thread_index(self.plan.threads)

    def share(self, words: int) -> Any:
        pool = b.shared_pool()
        shared = pool.alloc((words,), "uint32", align=128)
        pool.commit()
        self.overlap.release()
        self.overlap.wait()
        return shared

    def sync(self) -> None:
        b.block_sync()

    def shuffle_xor(self, value: Expr, distance: int) -> Expr:
        return T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP)

    def load(self, values: Any, first: int, column: Expr) -> None:
        targets = (values[first + i] for i in range(4))
        b.ptx(LOAD, *targets, self.x.ptr_to([self.row, column]))

    def store(self, words: list[Expr], column: Expr) -> None:
        b.ptx("st.global.v2.u32", self.codes.ptr_to([self.row, column]), *words)

    def permute(self, low: Expr, high: Expr, selector: int) -> Expr:
        source = helper("ladder_prmt", "prmt.b32 %0, %1, %2, %3;", 3)
        return b.bind(b.call_inline("ladder_prmt", source, "uint32", low, high, T.uint32(selector)))

    def product(self, x: Expr, y: Expr) -> Expr:
        return product(x, y)

    def narrow_pair(self, low: Expr, high: Expr) -> Expr:
        name = f"ladder_narrow_pair_{self.plan.activation}"
        instruction = NARROW_PAIR[self.plan.activation]
        text = f"{{.reg .b16 h; {instruction} h, %2, %1; mov.b32 %0, {{h, h}};}}"
        return b.bind(b.call_inline(name, helper(name, text, 2, "f"), "uint32", low, high))
