"""Quantization of activations by AMD kernels: vector accesses, V_PERM, and conversions to fp8.

CDNA3 converts to fnuz types, whose codes mean half of what the same bits mean in the OCP types that
x is quantised to: half the values are converted there. -0 becomes 0.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.gpu.arguments import tir_name
from ladder.lower.gpu.quantize import CHUNK, Quantization, Quantizer
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import reads_fnuz
from ladder.lower.rocm.machine import NARROW, permute_selector
from schedules.schedule import check
from schedules.waves import MOST_THREADS
from targets import TileDevice

Expr = Any


class RocmQuantizer(Quantizer):
    """One AMD kernel being emitted."""

    def __init__(self, plan: Quantization, device: TileDevice) -> None:
        check(
            plan.threads % device.warp == 0 and plan.threads <= MOST_THREADS,
            f"a row takes 1 to {MOST_THREADS // device.warp} whole waves, got {plan.threads} threads",
        )
        self.device, self.warp = device, device.warp
        # What values are multiplied by before their conversion.
        self.factor = 0.5 if reads_fnuz(device, plan.activation) else 1.0
        super().__init__(plan)

    def begin(self, rows: Expr) -> tuple[Expr, Expr]:
        return d.launch(rows, self.plan.threads)

    def share(self, words: int) -> Any:
        return d.shared(words)

    def sync(self) -> None:
        d.block_sync(self.device)

    def shuffle_xor(self, value: Expr, distance: int) -> Expr:
        return d.shuffle_xor(value, "uint32", b.bind(self.thread % self.warp), distance)

    def load(self, values: Any, first: int, column: Expr) -> None:
        loaded = self.x[self.row, d.lanes(column, 4 * self.per_word)]
        b.store(values, d.as_type(loaded, "uint32x4"), d.lanes(first, 4))

    def store(self, words: list[Expr], column: Expr) -> None:
        codes = d.as_type(d.vector(words), f"{tir_name(self.plan.activation)}x{CHUNK}")
        b.store(self.codes, codes, self.row, d.lanes(column, CHUNK))

    def permute(self, low: Expr, high: Expr, selector: int) -> Expr:
        places = permute_selector(T.uint32(selector))
        return b.bind(d.intrinsic("uint32", "llvm.amdgcn.perm", high, low, places))

    def product(self, x: Expr, y: Expr) -> Expr:
        return d.separate(x * y)

    def narrow_pair(self, low: Expr, high: Expr) -> Expr:
        values = (T.reinterpret(word, dtype="float32") * T.float32(self.factor) for word in (low, high))
        name = f"llvm.amdgcn.cvt.pk.{NARROW[self.plan.activation]}.f32"
        pair = d.intrinsic("int32", name, *values, T.int32(0), T.bool(False))
        return b.bind(d.as_type(pair, "uint32"))
