"""Products of the pipelines gemv, mma and digits: operands as kernels take them, and results in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ladder.cli.operands import cancellation_of
from ladder.ir.gemm import Gemm
from ladder.ir.ops import get_operator
from ladder.lower.gpu.proven import packed_layout
from schedules.group_values import streams_exponents
from schedules.layouts import EXPONENT_FORMS, SCALE_EXPONENT, lane_of, packed_group, padded
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types import get_type
from tile_types.held import held

NUMPY = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "int8": np.int8,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3, "fp8_e4m3": 2e-3, "fp8_e5m2": 2e-3, "int8": 1e-5}
"""Relative Frobenius error by activation type; operands round once, accumulators are float32."""


LARGEST = 2.0**64
"""Weights up to which float32 sums stay finite, scales being applied to them or not."""


class Problem:
    """Random operands in the form that a target's kernels take, and the float64 result."""

    def __init__(self, gemm: Gemm, m: int, seed: int = 7, target: str = "cuda/sm_90a") -> None:
        rng = np.random.default_rng(seed)
        self.gemm, self.m, self.device = gemm, m, get_device(target)
        kind = NUMPY[gemm.activation]
        ttype = get_type(gemm.weight)
        values = ttype.values()
        usable = np.flatnonzero(np.abs(np.nan_to_num(values, nan=np.inf)) <= LARGEST)
        if ttype.finite_codes is not None:
            usable = np.asarray(ttype.finite_codes)
        codes = rng.choice(usable, (gemm.n, gemm.k)).astype(np.uint8 if ttype.elem_bits <= 8 else np.uint16)
        group = packed_group(gemm.group_size, gemm.k)
        rows = -(-padded(gemm.k) // group)
        n_pad, narrow = padded(gemm.n), lane_of(gemm.activation) == 8
        weights = values[codes]
        column = np.arange(gemm.k) // group
        if narrow:
            x = (
                rng.integers(-100, 100, (m, gemm.k))
                if gemm.activation == "int8"
                else rng.normal(size=(m, gemm.k))
            )
        else:
            x = rng.normal(size=(m, gemm.k))
        self.x = x.astype(kind)
        scale = np.ones((rows, n_pad))
        self.arrays: list[np.ndarray[Any, Any]] = [_pad_columns(self.x), self._words(codes, ttype.elem_bits)]
        if gemm.scale:
            # As the runtime packs them: far below float16's largest number, with a power of two per row.
            stored = rng.uniform(0.25, 0.99, (rows, n_pad)) * 2.0**SCALE_EXPONENT
            if gemm.power_scales:
                stored = 2.0 ** rng.integers(-12, SCALE_EXPONENT, (rows, n_pad))
            stored = stored.astype(np.float32 if narrow else kind)
            self.arrays.append(exponents(stored, gemm) if streams_exponents(gemm) else stored)
            scale = stored.astype(np.float64)
        zero = self._zeros(rng, rows, n_pad, narrow)
        row_scale = rng.uniform(0.5, 2, n_pad).astype(np.float32)
        self.arrays.append(row_scale)
        decoded = (weights - zero[column, : gemm.n].T) * scale[column, : gemm.n].T
        weight, scaled = decoded * row_scale[: gemm.n, None], self.x.astype(np.float64)
        if gemm.token_group:
            groups = np.arange(gemm.k) // gemm.token_group
            self.arrays.append(rng.uniform(0.5, 2, (m, groups[-1] + 1)).astype(np.float32))
            scaled *= self.arrays[-1][:, groups]
        elif gemm.token_scale:
            self.arrays.append(rng.uniform(0.5, 2, m).astype(np.float32))
            scaled *= self.arrays[-1][:, None]
        result = scaled @ weight.T
        if gemm.bias:
            self.arrays.append(rng.normal(size=gemm.n).astype(NUMPY[gemm.output]))
            result += self.arrays[-1].astype(np.float64)
        self.size = float(np.linalg.norm(result))
        """Norm of the sums before an activation, which may cut off all but a few."""
        self.cancellation = cancellation_of([(np.square(scaled), np.square(weight))], self.size)
        """By what factor errors of operands may grow, since terms cancel in few results."""
        for name in gemm.epilogue:
            result = get_operator(name).reference([result], {})
        self.expected = result

    def _words(self, codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
        kept = held(get_type(self.gemm.weight).element_type)
        layout = packed_layout(kept.ttype, self.gemm.activation, self.device)
        pad = int(np.argmin(np.abs(np.nan_to_num(kept.ttype.values(), nan=np.inf))))
        words = layout.pack(kept.renumbered(codes), pad).numpy()
        return words.reshape(layout.packed_shape(self.gemm.n, self.gemm.k))

    def _zeros(self, rng: Any, rows: int, n_pad: int, narrow: bool) -> np.ndarray[Any, Any]:
        """Append the stored zero points and return their values."""
        gemm = self.gemm
        if gemm.zero == "none":
            return np.zeros((rows, n_pad))
        kind = np.int8 if narrow else NUMPY[gemm.activation]
        whole = rng.integers(0, 4, (rows, n_pad)).astype(kind)
        if gemm.zero == "integer":
            self.arrays.append(whole)
            return whole.astype(np.float64)
        rest = rng.uniform(-0.5, 0.5, (rows, n_pad)).astype(kind)
        self.arrays.append(np.stack([whole, rest], axis=1))
        return whole.astype(np.float64) + rest.astype(np.float64)

    def run(self, kernel: Callable[..., None], **order: bool) -> float:
        """Run the kernel on a poisoned output and return the relative error."""
        guard = 64
        kind = NUMPY[self.gemm.output]
        memory = np.full(self.m * self.gemm.n + guard, np.nan, kind)
        y = memory[:-guard].reshape(self.m, self.gemm.n)
        kernel(*self.arrays, y, **order)
        assert np.isnan(memory[-guard:].astype(np.float32)).all(), "stored beyond the output"
        assert np.isfinite(y.astype(np.float64)).all(), "some outputs were not stored"
        return float(np.linalg.norm(y.astype(np.float64) - self.expected) / np.linalg.norm(self.expected))


def exponents(scale: np.ndarray[Any, Any], gemm: Gemm) -> np.ndarray[Any, Any]:
    """Return the words of exponents of ``[k_groups, n_pad]`` powers of two."""
    form = EXPONENT_FORMS[gemm.activation]
    byte = np.log2(scale.astype(np.float64)).astype(int) + form.raised + form.bias
    whole = np.full((-(-len(byte) // 4) * 4, byte.shape[1]), form.lowest)
    whole[: len(byte)] = byte
    return sum(whole[at::4].astype(np.uint32) << np.uint32(8 * at) for at in range(4))


def _pad_columns(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Zero-extend rows to whole 16-byte chunks, as the runtime does."""
    per_chunk = 16 // x.dtype.itemsize
    padded_x = np.zeros((x.shape[0], -(-x.shape[1] // per_chunk) * per_chunk), x.dtype)
    padded_x[:, : x.shape[1]] = x
    return padded_x


def gemm(**fields: Any) -> Gemm:
    """Return a small problem with remainders in every dimension."""
    return Gemm(**{"n": 67, "k": 200, "weight": "uint4", "scale": False, "output": "float32", **fields})


def fp8_by_groups(**fields: Any) -> Gemm:
    """Return a small product of floats of 8 bits, both with scales of groups of 128."""
    own = {"activation": "fp8_e4m3", "weight": "fp8_e4m3", "group_size": 128, "scale": True}
    return gemm(**own, token_scale=True, token_group=128, **fields)


def gemv(**fields: Any) -> GpuSchedule:
    """Return a small gemv schedule."""
    return GpuSchedule(**{"pipeline": "gemv", "tile_m": 8, "stages": 2, "warps": 8, "split_k": 2, **fields})


def mma(**fields: Any) -> GpuSchedule:
    """Return a small mma schedule."""
    return GpuSchedule(**{"pipeline": "mma", "tile_m": 16, "stages": 2, "warps": 4, **fields})


def digits(**fields: Any) -> GpuSchedule:
    """Return a small schedule of products by integer digits."""
    base = {"pipeline": "digits", "tile_m": 1, "stages": 2, "warps": 4, "split_k": 2}
    return GpuSchedule(**{**base, "placement": "accumulator", **fields})


CASES: dict[str, tuple[str, Gemm, GpuSchedule, tuple[int, ...]]] = {
    "gemv groups and integer zeros": (
        "sm_80",
        gemm(group_size=64, scale=True, zero="integer", k=1000),
        gemv(stages=4, warps=16, split_k=4),
        (1, 8, 11),
    ),
    "gemv three bits, two warps per slice, real zeros": (
        "sm_80",
        gemm(weight="uint3", group_size=16, scale=True, zero="float", n=130),
        gemv(stages=2, warps=4),
        (3,),
    ),
    "gemv bfloat16 codebook, sixteen tokens": (
        "sm_86",
        gemm(weight="nf4", activation="bfloat16", group_size=32, scale=True, output="bfloat16"),
        gemv(tile_m=16, warps=4, split_k=1, stages=3),
        (5, 16),
    ),
    "gemv scales on accumulators": (
        "sm_90a",
        gemm(weight="int2", group_size=32, scale=True),
        gemv(placement="accumulator"),
        (2,),
    ),
    "gemv whole turns, runs share groups, several buffers of x": (
        "sm_90a",
        gemm(weight="int4", k=4200, group_size=128, scale=True, zero="integer"),
        gemv(placement="accumulator", stages=4, warps=4, split_k=2),
        (1, 8),
    ),
    "gemv whole turns, groups longer than runs": (
        "sm_80",
        gemm(weight="uint3", k=2100, group_size=512, scale=True, zero="float"),
        gemv(stages=3, warps=4, split_k=4),
        (2,),
    ),
    "gemv int8 whole turns, odd runs": (
        "sm_80",
        gemm(activation="int8", k=1500, group_size=192, scale=True),
        gemv(placement="accumulator", stages=3, warps=1, split_k=1),
        (5,),
    ),
    "gemv int8, groups of 16, zeros": (
        "sm_80",
        gemm(activation="int8", group_size=16, scale=True, zero="integer"),
        gemv(placement="accumulator", warps=2, split_k=2),
        (4,),
    ),
    "gemv raw operands, warps of 32 rows, three of them": (
        "sm_90a",
        gemm(weight="int4", n=203, k=1000, group_size=64, scale=True),
        gemv(placement="accumulator", stages=4, warps=6, split_k=2, warp_rows=32),
        (1, 8, 11),
    ),
    "gemv raw operands, integer zeros, sixteen slices": (
        "sm_80",
        gemm(group_size=128, scale=True, zero="integer", k=2500),
        gemv(placement="accumulator", warps=16, split_k=16),
        (3,),
    ),
    "gemv raw operands, real zeros in small groups": (
        "sm_80",
        gemm(weight="uint2", group_size=16, scale=True, zero="float", n=130),
        gemv(placement="accumulator", tile_m=16, warps=5, split_k=1, stages=3, warp_rows=32),
        (13,),
    ),
    "gemv values by one lane for others, two loads of zeros, whole turns": (
        "sm_90a",
        gemm(weight="uint4", group_size=16, scale=True, zero="float", n=460, k=1500, output="float16"),
        gemv(warps=14, split_k=2, warp_rows=32),
        (1, 7),
    ),
    "gemv values by one lane for others, runs of one tile, several buffers of x": (
        "sm_90a",
        gemm(weight="int6", group_size=32, scale=True, n=130, k=4200, output="float16"),
        gemv(tile_m=16, warps=16, split_k=16, stages=4),
        (16,),
    ),
    "gemv values by one lane for others, raw operands of two blocks, runs of three": (
        "sm_90a",
        gemm(activation="bfloat16", group_size=48, scale=True, zero="integer", n=203, k=2900),
        gemv(placement="accumulator", stages=3, warps=3, split_k=3, warp_rows=32, cluster=2),
        (2,),
    ),
    "gemv zeros alone by one lane for others": (
        "sm_75",
        gemm(weight="uint3", group_size=32, zero="integer", k=700),
        gemv(stages=4, warps=4, split_k=4),
        (8,),
    ),
    "gemv raw bfloat16": (
        "sm_80",
        gemm(weight="int4", activation="bfloat16", group_size=128, scale=True, k=700, output="bfloat16"),
        gemv(placement="accumulator", warps=4, split_k=4),
        (5,),
    ),
    "gemv raw, zeros without scales": (
        "sm_80",
        gemm(weight="uint3", zero="integer", k=1100),
        gemv(placement="accumulator", stages=8, warps=3, split_k=1),
        (2,),
    ),
    "gemv raw int8, zeros": (
        "sm_80",
        gemm(weight="uint2", activation="int8", group_size=128, scale=True, zero="integer", k=900),
        gemv(placement="accumulator", stages=4, warps=7, split_k=1),
        (4,),
    ),
    "gemv int8 exact": (
        "sm_75",
        gemm(activation="int8", weight="int5", k=500, token_scale=True),
        gemv(placement="accumulator"),
        (7,),
    ),
    "gemv mixed fp8": (
        "sm_89",
        gemm(activation="fp8_e4m3", weight="fp8_e5m2", k=320),
        gemv(placement="accumulator", stages=3, warps=4, split_k=1),
        (6,),
    ),
    "gemv two blocks split K, sixteen tokens, several buffers of x": (
        "sm_90a",
        gemm(weight="int4", n=203, k=4200, group_size=128, scale=True, output="float16"),
        gemv(tile_m=16, warps=4, split_k=2, warp_rows=32, cluster=2),
        (1, 16, 21),
    ),
    "gemv two blocks split K, the last has nothing to do": (
        "sm_90a",
        gemm(weight="int4", activation="bfloat16", n=72, k=64, group_size=64, scale=True, bias=True),
        gemv(stages=4, warps=3, split_k=1, cluster=2, placement="accumulator"),
        (5,),
    ),
    "gemv a codebook's table, rows of x that end inside a copy": (
        "sm_90a",
        gemm(weight="nf4", n=200, k=1224, group_size=64, scale=True, output="float16"),
        gemv(warps=4, split_k=2, warp_rows=32, placement="accumulator"),
        (1, 3),
    ),
    "gemv int8 whole sums of two blocks": (
        "sm_90a",
        gemm(activation="int8", weight="int4", k=900, token_scale=True),
        gemv(warps=4, split_k=4, cluster=2, placement="accumulator"),
        (7,),
    ),
    "gemv Turing": ("sm_75", gemm(group_size=128, scale=True), gemv(), (8,)),
    "digits int1, whole turns": (
        "sm_90a",
        gemm(weight="int1", group_size=128, scale=True, k=1000),
        digits(stages=4),
        (1,),
    ),
    "digits int2, groups of one tile, idle columns": (
        "sm_80",
        gemm(weight="int2", group_size=64, scale=True, k=1000, n=130),
        digits(stages=4, warp_rows=32, tile_m=2),
        (1, 2, 3),
    ),
    "digits int4, two fragments of columns, groups longer than periods": (
        "sm_90a",
        gemm(group_size=256, weight="int4", scale=True, k=2100, n=130, bias=True, epilogue=("relu",)),
        digits(warp_rows=64, tile_m=4, warps=6, split_k=3),
        (4, 6),
    ),
    "digits bfloat16, one scale per row": (
        "sm_86",
        gemm(k=700, activation="bfloat16", output="bfloat16"),
        digits(warp_rows=32, warps=3, split_k=3),
        (1,),
    ),
    "digits int8, one scale per row": (
        "sm_80",
        gemm(weight="ternary", activation="int8", k=900, token_scale=True),
        digits(stages=4, tile_m=8, warp_rows=32),
        (5, 9),
    ),
    "digits int8, groups, two sums of two places": (
        "sm_90a",
        gemm(weight="int2", activation="int8", k=900, group_size=64, scale=True),
        digits(stages=4, tile_m=4),
        (4,),
    ),
    "digits int8, groups, one place": (
        "sm_80",
        gemm(weight="int4", activation="int8", k=900, group_size=128, scale=True, token_scale=True),
        digits(stages=4, tile_m=8, warps=8, split_k=8),
        (8,),
    ),
    "digits two blocks split K": (
        "sm_90a",
        gemm(weight="int2", group_size=128, scale=True, k=2000, n=130, bias=True),
        digits(warp_rows=32, cluster=2),
        (1, 2),
    ),
    "digits two blocks split K, the second has nothing to do": (
        "sm_90a",
        gemm(weight="int2", activation="int8", k=60, token_scale=True),
        digits(stages=4, tile_m=4, cluster=2),
        (3,),
    ),
    "digits int8, two blocks split K, offsets": (
        "sm_90a",
        gemm(weight="int2", activation="int8", k=900, token_scale=True),
        digits(stages=4, tile_m=4, warp_rows=32, cluster=2),
        (3, 5),
    ),
    "mma groups, odd K tiles, token warps": (
        "sm_80",
        gemm(group_size=128, scale=True, zero="integer", n=203, k=330, bias=True, epilogue=("relu",)),
        mma(tile_m=64, tile_n=128, tile_k=128, stages=3, warps=8, raster=1),
        (70,),
    ),
    "mma vector stores, eight tokens per warp": (
        "sm_80",
        gemm(weight="int6", n=72, group_size=32, scale=True, output="float16"),
        mma(warps=8, stages=4),
        (16, 3),
    ),
    "mma real zeros, row quartets": (
        "sm_90a",
        gemm(weight="uint3", group_size=16, scale=True, zero="float", n=130, activation="bfloat16"),
        mma(tile_n=128, warps=8, tile_m=16),
        (5,),
    ),
    "mma int8, groups over several tiles": (
        "sm_80",
        gemm(activation="int8", group_size=192, scale=True, zero="integer", k=700, token_scale=True),
        mma(placement="accumulator", tile_k=128),
        (17,),
    ),
    "mma int8, groups of 16": (
        "sm_75",
        gemm(activation="int8", weight="int7", group_size=16, scale=True),
        mma(placement="accumulator", stages=3),
        (9,),
    ),
    "mma int8 exact": (
        "sm_86",
        gemm(activation="int8", weight="ternary"),
        mma(tile_m=32, placement="accumulator"),
        (33,),
    ),
    "mma fp8 promoted": (
        "sm_89",
        gemm(activation="fp8_e5m2", weight="fp8_e4m3", k=450),
        mma(placement="accumulator"),
        (16,),
    ),
    "mma fp8 groups that straddle promotions": (
        "sm_89",
        gemm(activation="fp8_e4m3", weight="fp4_e2m1", k=450, group_size=192, scale=True),
        mma(placement="accumulator"),
        (16,),
    ),
    "mma fp8 tokens scaled by group": (
        "sm_89",
        fp8_by_groups(k=700),
        mma(placement="accumulator", tile_k=128),
        (19,),
    ),
    "gemv fp8 tokens scaled by group": (
        "sm_89",
        fp8_by_groups(k=1100),
        gemv(placement="accumulator", stages=4, warps=8, split_k=2),
        (5,),
    ),
    "gemv int8 tokens scaled by group, one scale per row of weights": (
        "sm_80",
        gemm(activation="int8", k=900, token_scale=True, token_group=192),
        gemv(placement="accumulator", stages=3, warps=4, split_k=1),
        (3,),
    ),
    "mma int8 tokens scaled by longer groups than weights": (
        "sm_80",
        gemm(activation="int8", k=450, group_size=32, scale=True, token_scale=True, token_group=192),
        mma(placement="accumulator", warps=8, tile_m=32),
        (40,),
    ),
    "mma int8 tokens scaled by group, one scale per row of weights": (
        "sm_80",
        gemm(activation="int8", k=330, token_scale=True, token_group=64),
        mma(placement="accumulator"),
        (3,),
    ),
    "gemv exponents of MX scales": (
        "sm_90a",
        gemm(weight="fp4_e2m1", group_size=32, scale=True, power_scales=True, k=650),
        gemv(stages=4, warps=4, split_k=2, warp_rows=32),
        (3,),
    ),
    "gemv exponents, odd runs": (
        "sm_80",
        gemm(weight="fp4_e2m1", activation="bfloat16", group_size=32, scale=True, power_scales=True, k=720),
        gemv(stages=3, warps=6, split_k=3),
        (2,),
    ),
    "gemv exponents on sums": (
        "sm_80",
        gemm(weight="fp6_e2m3", group_size=32, scale=True, power_scales=True, k=700),
        gemv(stages=2, warps=4, split_k=2, placement="accumulator"),
        (5,),
    ),
    "gemv exponents on sums, single tiles": (
        "sm_80",
        gemm(weight="fp4_e2m1", activation="bfloat16", group_size=32, scale=True, power_scales=True, k=330),
        gemv(stages=3, warps=4, split_k=1, placement="accumulator"),
        (9,),
    ),
    "mma exponents, half a word per stage": (
        "sm_80",
        gemm(weight="fp8_e4m3", group_size=32, scale=True, power_scales=True, k=330),
        mma(warps=8, tile_m=32),
        (40,),
    ),
    "mma exponents, a word per stage": (
        "sm_80",
        gemm(weight="fp4_e2m1", activation="bfloat16", group_size=32, scale=True, power_scales=True, k=330),
        mma(tile_k=128),
        (9,),
    ),
    "mma one group per stage": (
        "sm_80",
        gemm(weight="int3", group_size=256, scale=True, zero="integer", k=700),
        mma(tile_k=128, stages=3),
        (9,),
    ),
    "mma per-row zeros": ("sm_80", gemm(zero="integer", k=130), mma(tile_k=128), (2,)),
    "mma Turing": ("sm_75", gemm(weight="int8", group_size=64, scale=True), mma(tile_k=128), (20,)),
    "mma Volta": (
        "sm_70",
        gemm(weight="fp4_e2m1", group_size=16, scale=True),
        mma(tile_m=32, warps=8),
        (20,),
    ),
    "mma 16-bit weights": ("sm_80", gemm(weight="float16", k=72), mma(), (4,)),
}
