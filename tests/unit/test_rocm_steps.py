"""AMD steps: lanes, registers and instructions together multiply what the packed layout holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower.rocm.gemm_place import STEPS_OF, together
from ladder.lower.rocm.machine import COLUMNS, bitwise
from ladder.lower.rocm.steps import DOT_MAP, DOTS, STEPS, WAVE_MAP, WIDE_MAP, WIDE_STEPS, select_step
from schedules.fragments import FragmentLayout
from schedules.legal import violations
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
        registers = words[half * WAVE + step.holder(lane, 0)[1]][4 * index : 4 * (index + step.steps)]
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


@pytest.mark.parametrize("step", WIDE_STEPS, ids=lambda step: step.spelling)
def test_a_tile_is_multiplied_by_wide_instructions(step: Any) -> None:
    """MFMA 32x32: A[i][k] is in lane 32 * part + i, D[i][j] in lane 32 * (i // 4 % 2) + j."""
    bits = 8 * step.element_bytes
    codes, words = _operands(bits)
    x = np.random.default_rng(1).integers(0, 9, (step.columns, 64))
    spans = x.reshape(step.columns, -1, 4, 4, 32 // bits)  # 64 bytes: chunk, word, element
    out = np.zeros((64, step.columns), np.int64)
    for index in range(0, words.shape[1] // 4, step.steps):
        for part, issue in product(range(step.parts), step.issues):
            a = []
            for lane in range(WAVE):
                block, thread = step.holder(lane, part)
                registers = words[block * WAVE + thread][4 * index : 4 * (index + step.steps)]
                a.append([e for r in issue.a for e in _elements(registers[r], bits)])
            for lane, (i, slot) in product(range(WAVE), enumerate(issue.accumulators)):
                row, at = step.lanes.position(lane, slot)
                for group in range(2):
                    weights = a[32 * group + 8 * (i // 4) + 4 * (lane // 32) + i % 4]
                    column = step.k_group(32 * group, part)
                    places = [(index // 2, index % 2 * 2 + chunk, column) for chunk in issue.b]
                    out[row, at] += np.dot(weights, [e for place in places for e in spans[(at, *place)]])
    assert np.array_equal(out, codes @ x.T)


@pytest.mark.parametrize(("lanes", "rows"), [(WAVE_MAP, STEP_ROWS), (DOT_MAP, STEP_ROWS), (WIDE_MAP, 64)])
def test_lanes_hold_every_row(lanes: Any, rows: int) -> None:
    held = {lanes.slot_row(lane, slot) for lane in range(WAVE) for slot in range(lanes.rows_per_lane)}
    assert held == set(range(rows))
    operands = {lanes.operand(lane)[0] + 8 * half for lane in range(WAVE) for half in range(2)}
    assert operands == set(range(rows))


@pytest.mark.parametrize("step", [STEPS[0], WIDE_STEPS[0]])
def test_lanes_take_every_thread_once(step: Any) -> None:
    taken = [step.holder(lane, part) for lane in range(WAVE) for part in range(step.parts)]
    assert sorted(taken) == list(product(range(step.rows // STEP_ROWS), range(WAVE)))


def test_devices_without_a_core_say_what_they_take() -> None:
    with pytest.raises(DeviceError, match=r"fp8_e4m3.*float16"):
        select_step(get_device("rocm/gfx90a"), "fp8_e4m3")


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
    "mfma32": GpuSchedule("mfma32", 64, 128, 64, 2, 4, placement="accumulator"),
    "dot": GpuSchedule("dot", 2, 64, 64, 2, 4, 2, placement="accumulator", warp_rows=32),
}


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("pipeline", SCHEDULES)
@pytest.mark.parametrize("activation", ["float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_schedules_are_legal_where_an_instruction_serves_them(
    arch: str, pipeline: str, activation: str
) -> None:
    device, gemm = get_device(f"rocm/{arch}"), Gemm(64, 128, "int4", activation)
    if not device.cores_for(activation):
        return
    broken = list(violations(gemm, device, SCHEDULES[pipeline]))
    if not broken:
        assert STEPS_OF[pipeline](device, activation).activation == activation
        return
    with pytest.raises(DeviceError, match=activation):
        STEPS_OF[pipeline](device, activation)
    assert activation in broken[0]
