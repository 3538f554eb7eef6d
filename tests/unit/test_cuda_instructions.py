"""The instruction table and the index functions of the mma pipelines."""

from __future__ import annotations

import pytest

from ladder.lower.cuda.activations import matrix_source
from ladder.lower.gpu import instructions
from ladder.lower.gpu.activation_tile import ActivationTile
from ladder.lower.gpu.instructions import STEPS, WARP_MAP, select_step
from targets import get_device
from tile_types.errors import DeviceError


@pytest.mark.parametrize(
    ("arch", "activation", "spelling"),
    [
        ("sm_70", "float16", "m8n8k4"),
        ("sm_75", "float16", "m16n8k8"),
        ("sm_75", "int8", "m8n8k16"),
        ("sm_80", "bfloat16", "m16n8k16"),
        ("sm_86", "int8", "m16n8k32"),
        ("sm_89", "fp8_e5m2", "m16n8k32"),
        ("sm_90a", "fp8_e4m3", "m16n8k32"),
    ],
)
def test_each_generation_uses_its_own_instruction(arch: str, activation: str, spelling: str) -> None:
    assert f".{spelling}." in select_step(get_device(f"cuda/{arch}"), activation).spelling


@pytest.mark.parametrize(
    ("arch", "activation", "hints"),
    [
        ("sm_70", "bfloat16", ("float16", "sm_80")),
        ("sm_70", "int8", ("float16", "sm_75")),
        ("sm_75", "bfloat16", ("int8", "sm_80")),
        ("sm_86", "fp8_e4m3", ("bfloat16", "sm_89")),
        ("sm_90a", "float32", ("cpu", "float16")),
    ],
)
def test_a_missing_core_names_what_would_work(arch: str, activation: str, hints: tuple[str, ...]) -> None:
    with pytest.raises(DeviceError) as caught:
        select_step(get_device(f"cuda/{arch}"), activation)
    for hint in hints:
        assert hint in str(caught.value)


@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s.activation}-{s.capability}")
def test_a_step_covers_its_tile(step: instructions.MatrixStep) -> None:
    """Every lane's operands tile 16 x K once; results cover 16 x 8, once per set of partial sums."""
    lanes = step.lanes
    assert {lanes.operand(lane) for lane in range(32)} == {(g, c) for g in range(8) for c in range(4)}
    held = [lanes.position(lane, i) for lane in range(32) for i in range(lanes.accumulators)]
    copies = 2 ** len(lanes.partial_lanes)
    assert len(held) == copies * 128
    assert {place: held.count(place) for place in held} == {
        (row, token): copies for row in range(16) for token in range(8)
    }
    registers = [(a, b) for issue in step.issues for a in issue.a for b in issue.b if _same_k(a, b)]
    assert sorted(registers) == [(0, 0), (1, 0), (2, 1), (3, 1)]


def _same_k(a: int, b: int) -> bool:
    """Whether A register ``a`` and B register ``b`` hold the same half of the step's K."""
    return a // 2 == b


@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s.activation}-{s.capability}")
def test_lanes_that_share_sums_agree_on_positions(step: instructions.MatrixStep) -> None:
    lanes = step.lanes
    for lane in range(32):
        for distance in lanes.partial_lanes:
            for i in range(lanes.accumulators):
                assert lanes.position(lane, i) == lanes.position(lane ^ distance, i)


@pytest.mark.parametrize("chunks", [4, 8, 16, 32])
def test_the_swizzle_is_a_bijection_without_bank_conflicts(chunks: int) -> None:
    tile = ActivationTile(chunks)
    words = {tile.word(row, chunk) for row in range(16) for chunk in range(chunks)}
    assert words == set(range(0, tile.words(16), 4))
    for first in range(chunks - 3):
        for matrix in range(4):  # eight lanes name the rows of one 8x8 matrix
            places = [matrix_source(lane) for lane in range(8 * matrix, 8 * matrix + 8)]
            banks = {tile.word(row, first + chunk) % 32 // 4 for row, chunk in places}
            assert len(banks) == 8


def test_results_are_written_without_bank_conflicts() -> None:
    for pitch in (20, 36, 68, 132):  # rows + 4
        for i in range(WARP_MAP.accumulators):
            places = [WARP_MAP.position(lane, i) for lane in range(32)]
            assert len({(token * pitch + row) % 32 for row, token in places}) == 32


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_widened_steps_multiply_each_byte_once(bits: int) -> None:
    """Lanes of a word hold the same codes for both cores: each register's even bytes, then its odd ones."""
    from ladder.lower.gpu.tile_multiplier import parts_of
    from schedules.layouts import fields

    parts = parts_of(bits)
    assert sorted(r for part in parts for r in part.registers) == list(range(16))
    assert sorted(x for part in parts for x in part.x) == list(range(8))
    for part in parts:
        half, step = part.x[0] % 2, part.x[0] // 4
        assert part.x[1] == part.x[0] + 2
        for i, register in enumerate(part.registers):
            (wide,), (narrow,) = fields(bits, 16, register), fields(bits, 8, 4 * step + i)
            assert (wide.word, wide.position) == (narrow.word, narrow.position + 8 * half)
            assert register % 2 == i % 2  # rows g and g+8
