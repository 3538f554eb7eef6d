"""CPU products whose weights are looked up in tables in vector registers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ladder
from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.lower.cpu.toolchain import assembly_of, compile_module
from schedules.cpu_policy import proposal
from schedules.schedule import TransformList
from targets import host_cpu
from tests.numeric.cpu_problems import BOUNDS, compile_entries, problem, relative_error
from tile_types import TType, register_type

HOST = host_cpu()
VBMI = pytest.mark.skipif("avx512_vbmi" not in HOST.features, reason="this CPU has no AVX-512 VBMI")


def table(bits: int, kind: str = "") -> str:
    """Register a type of arbitrary values and return its name.

    kind: ``signed``: the upper half is the lower one, negated; ``even``: it is the lower one; ``halves``:
        values are of 16 bits of float32; ``bytes``: of the upper 8.
    """
    values = np.random.default_rng(bits).normal(size=1 << bits).astype(np.float32)
    half = len(values) // 2
    if kind in ("signed", "even"):
        values[:half] = np.abs(values[:half])
        values[half:] = values[:half] * (-1 if kind == "signed" else 1)
    if kind in ("halves", "bytes"):
        mask = np.uint32(0xFFFF0000 if kind == "halves" else 0xFF000000)
        values = (values.view(np.uint32) & mask).view(np.float32)
    return register_type(TType(f"values{bits}{kind}", bits, lambda code, ops: ops.lookup(values, code))).name


def listing_of(gemm: Gemm, schedule: TransformList) -> str:
    """Return the assembly of a product."""
    module = compile_module({"entry": emit(gemm, HOST, schedule, "entry")}, HOST)
    return assembly_of(str(module.mod.inspect_source("ll")), HOST)


@VBMI
@pytest.mark.parametrize("kind", ["", "signed", "even", "halves", "bytes"])
def test_values_of_eight_bits_are_looked_up_by_bytes(kind: str) -> None:
    name = table(8, kind)
    case = problem(name, "float32", 37, 131, 48 if kind else 16)
    schedule = proposal(case.gemm, HOST, "fma", 2, 16)
    assert "byte_lookup" in str(schedule)
    (entry,) = compile_entries(case.gemm, HOST, [schedule])
    assert relative_error(case, entry, 3) <= BOUNDS["float32"]


@VBMI
@pytest.mark.parametrize("weight", ["fp8_e4m3", "fp8_e5m2"])
def test_pairs_of_eight_bits_are_looked_up_by_bytes(weight: str) -> None:
    case = problem(weight, "bfloat16", 37, 131, 48, output="bfloat16")
    for core in ("avx512_bf16", "fma"):
        if core in {each.name for each in HOST.cores}:
            schedule = proposal(case.gemm, HOST, core, 2, 32)
            (entry,) = compile_entries(case.gemm, HOST, [schedule])
            assert relative_error(case, entry, 3) <= BOUNDS["bfloat16"]
            listing = listing_of(case.gemm, schedule)
            assert "vpermi2b" in listing or "vpermt2b" in listing
            assert "vpermi2w" not in listing


@pytest.mark.skipif("avx512bw" not in HOST.features, reason="this CPU has no AVX-512 BW")
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_values_of_few_bits_are_looked_up_as_floats(bits: int) -> None:
    """Halves of values, joined afterwards, took 1.5 times as long."""
    case = problem(table(bits), "float32", 37, 131, 48)
    schedule = proposal(case.gemm, HOST, "fma", 2, 16)
    (entry,) = compile_entries(case.gemm, HOST, [schedule])
    assert relative_error(case, entry, 3) <= BOUNDS["float32"]
    listing = listing_of(case.gemm, schedule)
    assert "vpermw" not in listing
    assert "vpermi2w" not in listing


@pytest.mark.parametrize("activation", ["float16", "float32"])
def test_a_type_of_zeros_alone_gives_zeros(activation: str) -> None:
    """Choosing a plan divided by the largest magnitude."""
    zeros = register_type(TType("zeros2_of_tests", 2, lambda code, ops: ops.lookup((0.0,) * 4, code)))
    codes = torch.arange(96, dtype=torch.uint8).remainder(4).view(2, 48)
    weight = ladder.QuantizedTensor.from_codes(codes, zeros, (1, 48), scale=torch.ones(2, 1))
    op = ladder.Matmul(2, 48, zeros, activation)
    assert not op(torch.ones(3, 48, dtype=getattr(torch, activation)), op.pack(weight)).any()
