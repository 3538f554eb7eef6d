"""AMD steps: lanes, registers and instructions together multiply what the packed layout holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower.rocm.gemm_place import together
from ladder.lower.rocm.machine import COLUMNS, bitwise
from ladder.lower.rocm.steps import (
    DOT32_MAP,
    DOT_MAP,
    DOTS,
    DOTS32,
    HALF_MAP,
    INTERLEAVED_MAP,
    SPLIT_STEPS,
    STEPS,
    STEPS_OF,
    WAVE_MAP,
    WMMA_STEPS,
    best_step,
)
from ladder.simulate.amd import wmma
from schedules.fragments import FragmentLayout
from schedules.legal import violations
from schedules.rules import RULES
from schedules.schedule import GpuSchedule
from schedules.waves import STEP_ROWS, WAVE
from targets import get_device
from tile_types.errors import DeviceError


def _operands(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of 64 x 64 and the packed words of 128 threads, as wide as an operand."""
    codes = np.random.default_rng(0).integers(0, 2 ** min(bits, 8), (64, 64))
    words = np.asarray(FragmentLayout(bits, bits).pack(codes.astype(np.uint16 if bits == 16 else np.uint8)))
    vectors = words.reshape(-1, 128, 4)  # a thread's words, four at a time
    return codes, np.concatenate(list(vectors), axis=1)


def _elements(word: int, bits: int) -> list[int]:
    return [int(word) >> at & (1 << bits) - 1 for at in range(0, 32, bits)]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("step", [*STEPS, *DOTS], ids=lambda step: step.spelling)
def test_a_tile_is_multiplied(step: Any, half: int) -> None:
    bits = 8 * step.element_bytes
    codes, words = _operands(bits)
    x = np.random.default_rng(1).integers(0, 9, (step.columns, 64))
    spans = x.reshape(step.columns, -1, 4, 4, 32 // bits)  # 64 bytes: chunk, word, element
    out = np.zeros((STEP_ROWS, step.columns), np.int64)
    for index in range(0, words.shape[1] // 4, step.steps):
        for issue in step.issues:
            _issue(step, issue, index, words, spans, half, bits, out)
    assert np.array_equal(out, codes[half * STEP_ROWS : (half + 1) * STEP_ROWS] @ x.T)


def _issue(
    step: Any, issue: Any, index: int, words: np.ndarray, spans: np.ndarray, half: int, bits: int, out: Any
) -> None:
    """Add one instruction's products: by the ISA's rows and columns for MFMA, lane by lane for dots."""
    a: list[list[int]] = []
    for lane in range(WAVE):
        registers = words[half * WAVE + step.holder(lane, 0)][4 * index : 4 * (index + step.steps)]
        a.append([e for r in issue.a for e in _elements(registers[r], bits)])
    for lane in range(WAVE):
        column, token = step.lanes.operand(lane)[1], lane % step.columns
        x = [e for chunk in issue.b for e in spans[token, index // 2, index % 2 * 2 + chunk, column]]
        if step.columns == 1:  # a lane's own products, for its row of this issue
            row, _ = step.lanes.position(lane, issue.accumulators[0])
            out[row, 0] += np.dot(a[lane], x)
            continue
        for i, slot in enumerate(issue.accumulators):  # D[4 * (lane // 16) + i][lane % 16]
            for part in range(4):
                weights = a[16 * part + 4 * (lane // 16) + i]
                tokens = [e for c in issue.b for e in spans[token, index // 2, index % 2 * 2 + c, part]]
                row, at = step.lanes.position(lane, slot)
                out[row, at] += np.dot(weights, tokens)


HALF_STEPS = [*((step, wmma.RDNA3) for step in WMMA_STEPS), *((step, wmma.RDNA4) for step in SPLIT_STEPS)]


@pytest.mark.parametrize(("step", "core"), HALF_STEPS, ids=lambda value: getattr(value, "spelling", ""))
def test_a_tile_is_multiplied_by_waves_of_32_lanes(step: Any, core: wmma.HalfCore) -> None:
    """Which lane holds which row and column follows from the simulator's model of the instruction."""
    bits, together = 8 * step.element_bytes, step.joined
    codes, words = _operands(bits)
    x = np.random.default_rng(1).integers(0, 9, (step.columns, 64))
    spans = x.reshape(step.columns, -1, 4, 4, 32 // bits)  # 64 bytes: chunk, word, element
    out = np.zeros((STEP_ROWS, step.columns), np.int64)
    for index in range(0, words.shape[1] // 4, step.steps):
        for part, issue in product(range(0, step.parts, together), step.issues):
            parts = range(part, part + together)
            a, b = [], []
            for lane in range(wmma.LANES):
                held = [words[step.holder(lane, p)][4 * index : 4 * (index + step.steps)] for p in parts]
                registers = np.concatenate(held)
                a.append([e for r in issue.a for e in _elements(registers[r], bits)])
                row = spans[lane % step.columns]
                steps = product(parts, range(index, index + step.steps), range(2))
                chunks = [(i // 2, i % 2 * 2 + c, step.k_group(lane, p)) for p, i, c in steps]
                b.append([e for place in chunks for e in row[place]])
            d = _product(np.array(a), np.array(b), core)
            for lane, (i, slot) in product(range(wmma.LANES), enumerate(issue.accumulators)):
                out[step.lanes.position(lane, slot)] += d[lane, i]
    assert np.array_equal(out, codes[:STEP_ROWS] @ x.T)


def _product(a: np.ndarray, b: np.ndarray, core: wmma.HalfCore) -> np.ndarray:
    """Return the registers of D of operands ``[32, elements]``."""
    if core.split:
        a, b = (np.concatenate([each[:16], each[16:]], axis=1) for each in (a, b))
    else:
        assert np.array_equal(a[:16], a[16:])
        a, b = a[:16], b[:16]
    return wmma.scatter_d((a @ b.T)[None], core)[0]


@pytest.mark.parametrize(
    ("lanes", "rows", "count"),
    [
        (WAVE_MAP, STEP_ROWS, WAVE),
        (DOT_MAP, STEP_ROWS, WAVE),
        (DOT32_MAP, STEP_ROWS, 32),
        (HALF_MAP, STEP_ROWS, 32),
        (INTERLEAVED_MAP, STEP_ROWS, 32),
    ],
)
def test_lanes_hold_every_row(lanes: Any, rows: int, count: int) -> None:
    held = {lanes.slot_row(lane, slot) for lane in range(count) for slot in range(lanes.rows_per_lane)}
    assert held == set(range(rows))
    operands = {lanes.operand(lane)[0] + 8 * half for lane in range(count) for half in range(2)}
    assert operands == set(range(rows))


@pytest.mark.parametrize(
    ("step", "lanes", "times"),
    [(STEPS[0], WAVE, 1), (DOTS32[0], 32, 1), (SPLIT_STEPS[0], 32, 1),
     (WMMA_STEPS[0], 32, 2)],
)  # fmt: skip
def test_lanes_take_every_thread(step: Any, lanes: int, times: int) -> None:
    taken = [step.holder(lane, part) for lane in range(lanes) for part in range(step.parts)]
    threads = [thread for thread in range(WAVE) for _ in range(times)]
    assert sorted(taken) == threads


def test_devices_without_a_core_say_what_they_take() -> None:
    with pytest.raises(DeviceError, match=r"fp8_e4m3.*float16"):
        best_step(STEPS, get_device("rocm/gfx90a"), "fp8_e4m3")


def test_every_function_of_three_bits_has_a_form() -> None:
    def evaluate(form: Any) -> int:
        if isinstance(form, str):
            return COLUMNS[form]
        if form[0] == "~":
            return evaluate(form[1]) ^ 0xFF
        left, right = evaluate(form[1]), evaluate(form[2])
        return {"&": left & right, "|": left | right, "^": left ^ right}[form[0]]

    assert all(evaluate(bitwise(table)) == table for table in range(256))


@pytest.mark.parametrize("blocks", [1, 7, 8, 19, 64])
def test_a_die_gets_neighbouring_tiles(blocks: int) -> None:
    values: list[list[int]] = [[] for _ in range(8)]
    for block in range(blocks):
        values[block % 8].append(int(together(T.int32(block), T.int32(blocks), 8)))
    assert sorted(place for run in values for place in run) == list(range(blocks))
    assert all(run == list(range(run[0], run[0] + len(run))) for run in values if run)


SCHEDULES = {
    "mfma": GpuSchedule("mfma", 32, 64, 64, 2, 4, placement="accumulator"),
    "mfma_groups": GpuSchedule("mfma_groups", 1, 64, 64, 2, 4, placement="accumulator", warp_rows=32),
    "dot": GpuSchedule("dot", 2, 64, 64, 2, 4, 2, placement="accumulator", warp_rows=32),
    "wmma": GpuSchedule("wmma", 32, 64, 64, 2, 4, placement="accumulator"),
    "wmma_split": GpuSchedule("wmma_split", 32, 64, 64, 2, 4, placement="accumulator"),
    "dot32": GpuSchedule("dot32", 2, 64, 64, 2, 4, 2, placement="accumulator", warp_rows=32),
}


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("pipeline", SCHEDULES)
@pytest.mark.parametrize("activation", ["float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_schedules_are_legal_where_an_instruction_serves_them(
    arch: str, pipeline: str, activation: str
) -> None:
    device, gemm = get_device(f"rocm/{arch}"), Gemm(64, 128, "int4", activation)
    if not device.cores_for(activation) or RULES[pipeline].feature not in device.features:
        return
    broken = list(violations(gemm, device, SCHEDULES[pipeline]))
    if not broken:
        assert best_step(STEPS_OF[pipeline], device, activation).activation == activation
        return
    if "subnormal" in broken[0]:  # an instruction is there, but not for codes as they lie
        assert (arch, pipeline, activation) == ("gfx90a", "mfma_groups", "float16")
        return
    with pytest.raises(DeviceError, match=activation):
        best_step(STEPS_OF[pipeline], device, activation)
    assert activation in broken[0]
