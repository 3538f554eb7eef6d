"""The simulator's instructions against those of an H200: bit for bit, or within the rounding said here.

`hardware/record.py` made the fixtures. What the tensor cores of compute capability 9.0 do with sums:
integer sums are exact; products are summed with about 24 bits below the largest term and truncated,
but for those of fp8 in wgmma, which keep about 14 bits (`instructions.FP8_PROMOTION`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hardware.cases import A_START, OFFSETS, REGISTERS, TRIALS, WORDS, Case, cases

from ladder.simulate.matrix import (
    Shape,
    decode,
    descriptor_chunks,
    gather_a,
    gather_b,
    gather_c,
    mma,
    multiply,
    wgmma_registers,
    wgmma_rows,
)
from ladder.simulate.nvidia import helpers
from ladder.simulate.values import to_bfloat16, to_float16

FOLDER = Path(__file__).parent / "hardware"
CASES = {case.name: case for case in cases()}
SAVED = (1, 2)
"""Trials whose results are kept: wide exponents, and sums that are exact."""

BITS = {"mma": 23, "wgmma": 23, "wgmma fp8": 13}
"""Bits of the running sum below its largest term."""


def _measured(name: str) -> Any:
    with np.load(FOLDER / "h200.npz") as stored:
        return stored[name]


def _compare(found: Any, measured: Any, terms: Any, kind: str) -> None:
    """Compare sums; ``terms`` are the largest magnitudes of their terms, times how many there are."""
    if terms is None:
        np.testing.assert_array_equal(found.view(np.uint32), measured)
        return
    difference = np.abs(found.astype(np.float64) - measured.view(np.float32))
    assert (difference <= terms * 2.0 ** -BITS[kind]).all(), float((difference / terms).max())


def _largest(a: Any, b: Any, c: Any, k: int) -> Any:
    """Return ``(k + 1)`` times the largest magnitude among the terms of each sum."""
    products = np.abs(a[:, :, :, None] * b[:, None, :, :]).max(axis=2)
    return np.maximum(products, np.abs(c)) * (k + 1)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("mma")])
def test_mma(name: str) -> None:
    _, text, _, a_kind, b_kind = name.split("_")
    shape, (na, nb, _) = Shape.parse(text), REGISTERS[text]
    words = CASES[name].inputs[list(SAVED)]
    a, b, c = (
        part.reshape(len(SAVED), 32, -1) for part in np.split(words, [32 * na, 32 * (na + nb)], axis=1)
    )
    integer = a_kind == "s8"
    c = c.view(np.int32 if integer else np.float32)
    found = mma(shape, (a_kind, b_kind), a, b, c)
    measured = _measured(name).reshape(found.shape)
    if shape == Shape(8, 8, 4) or integer:
        terms = None if integer else np.abs(found) + np.abs(c) + 8
        _compare(found, measured, terms, "mma")
        return
    matrices = gather_a(a, a_kind, shape.m // 8), gather_b(b, b_kind)
    largest = _largest(*matrices, gather_c(c), shape.k)
    _compare(gather_c(found), np.ascontiguousarray(gather_c(measured)), largest, "mma")


def _shared_rows(words: Any, start: int, mode: int, rows: int) -> Any:
    leading, stride = OFFSETS[mode]
    descriptor = mode << 62 | (stride >> 4) << 32 | (leading >> 4) << 16 | start >> 4
    chunks = descriptor_chunks(descriptor, rows)
    shared = np.ascontiguousarray(words).view(np.uint8)
    return shared[chunks[:, :, None] + np.arange(16)].reshape(rows, 32)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("wgmma")])
def test_wgmma(name: str) -> None:
    _, n_text, k_text, _, a_kind, b_kind, mode_text, place = name.split("_")
    n, k, mode = int(n_text), int(k_text), int(mode_text)
    measured = _measured(name)
    integer = a_kind == "s8"
    for index, trial in enumerate(SAVED):
        words = CASES[name].inputs[trial]
        shared, registers, sums = np.split(words, [words.size - 512 - 64 * n, words.size - 64 * n])
        b = decode(_shared_rows(shared, 0, mode, n)[None], b_kind).transpose(0, 2, 1)
        if place == "ss":
            a = decode(_shared_rows(shared, A_START, mode, 64)[None], a_kind)
        else:
            a = gather_a(registers.reshape(4, 32, 4), a_kind, 2).reshape(1, 64, k)
        kind = np.int32 if integer else np.float32
        c = wgmma_rows(sums.view(kind).reshape(4, 32, n // 2))
        found = multiply(a, b, c, integer)
        got = wgmma_rows(np.ascontiguousarray(measured[index]).reshape(4, 32, n // 2))
        kept = "wgmma fp8" if a_kind.startswith("e") else "wgmma"
        _compare(found, np.ascontiguousarray(got), None if integer else _largest(a, b, c, k), kept)
        np.testing.assert_array_equal(wgmma_registers(got).reshape(-1), measured[index])


def _word(case: Case, trial: int) -> Any:
    """Execute an instruction on words as the helper of that name does."""
    a, b, c = case.inputs[trial].reshape(3, WORDS)
    name = case.name.removeprefix("word_")
    if name == "prmt":
        return helpers.prmt(a, b, c)
    if name.startswith("lop3"):
        return helpers.lop3(a, b, c, name[-2:])
    if name == "pack_bfloat16":
        low, high = (to_bfloat16(x.view(np.float32)).astype(np.uint32) for x in (b, a))
        return low | high << np.uint32(16)
    if name == "halves":
        low, high = (to_float16(x.view(np.float32)).astype(np.uint32) for x in (b, a))
        return low | high << np.uint32(16)
    kind = name.split("_", 2)[-1]
    if name.startswith("narrow_pair"):
        return helpers.narrow_pair(a, b, name.removeprefix("narrow_pair_"))
    if name.startswith("narrow"):
        return helpers.narrow(a, name.removeprefix("narrow_"))
    function = {"mul": helpers.multiply_halves, "sub": helpers.subtract_halves, "fma": helpers.fma_halves}
    operands = (a, b, c) if "fma" in name else (a, b)
    return function[name.split("_")[1]](*operands, kind)


def _same_or_nan(found: Any, measured: Any, name: str) -> Any:
    """Return which words agree; payloads of NaN may differ."""
    if "16" not in name and name != "word_halves":
        return found == measured
    high = 0x7F80 if "bf" in name else 0x7C00
    agree = np.ones(found.shape, bool)
    for shift in (0, 16):
        x, y = (
            (found >> np.uint32(shift) & np.uint32(0x7FFF)),
            (measured >> np.uint32(shift) & np.uint32(0x7FFF)),
        )
        same = (found >> np.uint32(shift) & np.uint32(0xFFFF)) == (
            measured >> np.uint32(shift) & np.uint32(0xFFFF)
        )
        agree &= same | ((x > high) & (y > high))
    return agree


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("word")])
def test_words(name: str) -> None:
    measured = _measured(name)
    for index, trial in enumerate(SAVED):
        with np.errstate(all="ignore"):
            found = _word(CASES[name], trial)
        agree = _same_or_nan(found, measured[index], name)
        wrong = np.flatnonzero(~agree)
        assert not wrong.size, (wrong.size, hex(found[wrong[0]]), hex(measured[index][wrong[0]]))


def test_fixtures_are_whole() -> None:
    assert max(SAVED) < TRIALS
    with np.load(FOLDER / "h200.npz") as stored:
        assert {name for name in stored.files if name != "outputs"} == set(CASES)
