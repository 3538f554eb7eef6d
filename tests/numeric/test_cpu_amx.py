"""AMX kernels: the loop nest with emulated tile registers anywhere, the instructions where they exist."""

from __future__ import annotations

import re

import pytest
from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.build import emit
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.toolchain import compile_module
from ladder.lower.skeletons.loopnest import amx
from schedules.cpu_policy import cpu_schedule, proposal
from schedules.schedule import TransformList
from targets import get_device, host_cpu
from tests.numeric.cpu_problems import BOUNDS, compile_entries, problem, relative_error
from tile_types.errors import ScheduleError

AMX = get_device("cpu/amx")
HOST = host_cpu()
CASES = [
    ("int4", "bfloat16", 128, "none"),
    ("nf4", "bfloat16", 32, "none"),
    ("fp4_e2m1", "bfloat16", 16, "none"),
    ("fp8_e4m3", "bfloat16", 16, "none"),
    ("uint4", "bfloat16", 0, "float"),
    ("int4", "int8", 128, "none"),
    ("uint8", "int8", 32, "integer"),
    ("int3", "int8", 16, "none"),
    ("int4", "int8", 0, "none"),
]


class EmulatedTiles(amx.Instructions):
    """Tile registers as arrays on the stack, with the semantics of the Intel SDM, volume 2."""

    def allow(self) -> None:
        pass

    def configure(self) -> None:
        self.words = v.scratch(8 * 256, "uint32")

    def release(self) -> None:
        pass

    def _shape(self, tile: int) -> tuple[int, int]:
        return (16, 16) if tile < 4 else (16, self.steps) if tile < 6 else (self.steps, 16)

    def zero(self, tile: int) -> None:
        with b.loop(256) as index:
            b.store(self.words, T.uint32(0), tile * 256 + index)

    def load(self, tile, memory, start, pitch) -> None:
        rows, columns = self._shape(tile)
        with b.loop(rows) as row, b.loop(columns) as column:
            value = memory[start + row * pitch + column]
            bits = value if str(memory.dtype) == "uint32" else T.reinterpret("uint32", value)
            b.store(self.words, bits, tile * 256 + row * 16 + column)

    def store(self, tile, memory, start, pitch) -> None:
        with b.loop(16) as row, b.loop(16) as column:
            bits = self.words[tile * 256 + row * 16 + column]
            b.store(memory, T.reinterpret(str(memory.dtype), bits), start + row * pitch + column)

    def multiply(self, total: int, tokens: int, weights: int) -> None:
        with b.loop(16) as row, b.loop(16) as column, b.loop(self.steps) as step:
            x = self.words[tokens * 256 + row * 16 + step]
            w = self.words[weights * 256 + step * 16 + column]
            at = total * 256 + row * 16 + column
            b.store(self.words, self._product(self.words[at], x, w), at)

    def _product(self, total, x, w):
        if self.operand == "bfloat16":
            value = T.reinterpret("float32", total)
            for part in (lambda word: word << T.uint32(16), lambda word: word & T.uint32(0xFFFF0000)):
                value = value + T.reinterpret("float32", part(x)) * T.reinterpret("float32", part(w))
        else:
            value = T.reinterpret("int32", total)
            for byte in range(4):
                left, right = ((word >> T.uint32(8 * byte)) & T.uint32(255) for word in (x, w))
                right = tirx.Cast("int8", right) if self.signed else right
                value = value + tirx.Cast("int32", tirx.Cast("int8", left)) * tirx.Cast("int32", right)
        return T.reinterpret("uint32", value)


def schedule_for(gemm, tokens: int) -> TransformList:
    core = "amx_int8" if gemm.activation == "int8" else "amx_bf16"
    return proposal(gemm, AMX, core, tokens, 32)


@pytest.mark.skipif("avx512bw" not in HOST.features, reason="LLVM splits no 16 halves without AVX-512")
@pytest.mark.costly
@pytest.mark.parametrize(("weight", "activation", "group", "zero"), CASES)
def test_loop_nest_with_emulated_tiles(weight, activation, group, zero, monkeypatch) -> None:
    monkeypatch.setattr(amx, "Instructions", EmulatedTiles)
    case = problem(weight, activation, 45, 700, group, zero=zero)
    bound = BOUNDS["bfloat16" if weight == "nf4" else "float32"]
    functions = {
        f"entry_{tokens}": emit(case.gemm, AMX, schedule_for(case.gemm, tokens), f"entry_{tokens}")
        for tokens in (16, 32)
    }
    module = compile_module(functions, HOST)
    for name in functions:
        for m in (3, 150):
            assert relative_error(case, module[name], m) <= bound


def test_instructions_of_one_vendor_are_left_out(monkeypatch) -> None:
    """LLVM knows the features of this device as those of a processor of AMD, which others lack in part."""
    monkeypatch.setattr(amx, "Instructions", EmulatedTiles)
    case = problem("int4", "int8", 45, 700, 128)
    entry = emit(case.gemm, AMX, schedule_for(case.gemm, 16), "entry")
    module = compile_module({"entry": entry}, get_device("cpu/avx512_bf16"))
    assert not {"extrq", "insertq"} & set(module.mod.inspect_source("asm").split())


@pytest.mark.parametrize(
    ("weight", "activation", "instruction"),
    [("int4", "bfloat16", "tdpbf16ps"), ("int4", "int8", "tdpbssd"), ("uint4", "int8", "tdpbsud")],
)
def test_amx_kernels_compile_anywhere(weight: str, activation: str, instruction: str) -> None:
    case = problem(weight, activation, 64, 256, 128)
    schedule = cpu_schedule(case.gemm, AMX, 128)
    assert schedule == schedule_for(case.gemm, 32)
    module = compile_module({"entry": emit(case.gemm, AMX, schedule, "entry")}, AMX)
    assembly = module.mod.inspect_source("asm")
    assert assembly.count(f"\t{instruction}\t") >= 4
    assert all(f"\t{name}" in assembly for name in ("ldtilecfg", "tileloadd", "tilestored", "tilerelease"))
    places = re.findall(
        r"alloca \[\d+ x .*, align (\d+)", module.mod.inspect_source("ll").partition("tilezero")[0]
    )
    assert (
        places.count("64") == 3
    )  # decoded weights, sums of a group, totals: a row in two lines takes twice as long


def test_short_groups_are_left_to_vectors() -> None:
    """Sums of sixteen products are worth no way from tile registers through memory to the totals."""
    for group, core in ((16, "avx512_vnni"), (32, "amx_int8"), (0, "amx_int8")):
        gemm = problem("int4", "int8", 64, 256, group).gemm
        assert str(cpu_schedule(gemm, AMX, 128)).count(core) == 1


@pytest.mark.parametrize(("weight", "activation", "group", "zero"), CASES)
def test_amx_kernels_on_hardware(weight, activation, group, zero) -> None:
    if "amx_tile" not in HOST.features:
        pytest.skip("this CPU has no AMX (flag amx_tile is absent); the emulated test covers the loop nest")
    case = problem(weight, activation, 45, 700, group, zero=zero)
    bound = BOUNDS["bfloat16" if weight == "nf4" else "float32"]
    schedules = [schedule_for(case.gemm, 16), schedule_for(case.gemm, 32)]
    for entry in compile_entries(case.gemm, HOST, schedules):
        for m in (3, 150):
            assert relative_error(case, entry, m) <= bound


def test_amx_tile_shapes_are_checked() -> None:
    case = problem("int4", "bfloat16", 64, 256, 128)
    with pytest.raises(ScheduleError, match="16 rows at a time, slice m has 8"):
        emit(case.gemm, AMX, proposal(case.gemm, AMX, "amx_bf16", 8, 32), "entry")
    with pytest.raises(ScheduleError, match="tile registers"):
        emit(case.gemm, AMX, proposal(case.gemm, AMX, "amx_bf16", 64, 32), "entry")
