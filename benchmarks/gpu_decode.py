"""How fast every weight type decodes on a GPU, beside how fast it could be loaded.

``python -m benchmarks.gpu_decode --output decode.json`` times kernels that do nothing but decode
packed words from the first-level cache and feed tensor cores with them. A type whose packed
bytes pass faster than device memory delivers them is not slower to decode than to load.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import write_record
from ladder.ir.gemm import Gemm
from ladder.runtime.cores import usable_cores
from tile_types import get_type, list_types, representable

TILES = 4
"""Packed tiles that each block decodes again and again: they stay in the first-level cache."""

TURNS = 1024
"""Tiles that each warp decodes."""

THREADS = 512
RESIDENT = 2
"""Blocks per multiprocessor."""

KINDS = (
    ("float16", "operand"),
    ("float16", "accumulator"),
    ("bfloat16", "operand"),
    ("bfloat16", "accumulator"),
    ("int8", "accumulator"),
    ("fp8_e4m3", "accumulator"),
)
"""Activations and places of scales that are timed."""


@dataclass(frozen=True)
class Case:
    """One decoder."""

    weight: str
    activation: str
    placement: str
    table: int

    @property
    def gemm(self) -> Gemm:
        """A problem that the decoder serves."""
        return Gemm(64, 64, self.weight, self.activation)

    def decoder(self, device: Any) -> Any:
        """Return the decoder."""
        from ladder.lower.gpu.decode import make_decoder

        return make_decoder(self.gemm, device, self.placement, gains=True, table=self.table)


def cases(weights: Sequence[str]) -> Iterator[Case]:
    """Yield every decoder of the library, with all sizes of tables."""
    from targets import get_device

    device = get_device("cuda/sm_90a")
    names = dict.fromkeys(t.element_type.name for t in list_types() if t.element_type.elem_bits <= 8)
    for name in names:
        for activation, placement in KINDS:
            if (weights and name not in weights) or not representable(name, activation):
                continue
            found = [Case(name, activation, placement, table) for table in (0, 1 << 15, 1 << 16)]
            yield from {case.decoder(device).table_words: case for case in found}.values()


def emit(case: Case, device: Any, name: str) -> Any:
    """Emit a kernel: ``words[TILES, words], operands[4], out[threads]``."""
    from ladder.lower import builder as b
    from ladder.lower.gpu.decode import GroupValues, load_order
    from ladder.lower.gpu.emission import SharedTable
    from ladder.lower.gpu.instructions import select_step

    decoder = case.decoder(device)
    step = select_step(device, case.activation)
    with b.function(name) as result:
        words = b.tensor("words", (TILES, 128 * decoder.words), "uint32")
        operands = b.tensor("operands", (4,), "uint32")
        blocks = device.units * RESIDENT
        out = b.tensor("out", (blocks * THREADS,), step.carrier)
        b.device(min_blocks=RESIDENT)
        (block,) = b.block_index([blocks])
        thread = b.thread_index(THREADS)
        table = None
        if decoder.table_words:
            pool = b.SharedPool()
            room = pool.alloc((decoder.table_words,), "uint32", align=128)
            pool.commit()
            decoder.fill_table(room, thread, THREADS)
            b.block_sync()
            table = SharedTable.of(room, b.bind(thread % 32))
        own, registers = b.local(decoder.words, "uint32"), b.local(decoder.lane, "uint32")
        sums, other = b.local(step.lanes.accumulators, step.carrier), b.local(4, "uint32")
        for i in range(step.lanes.accumulators):
            b.store(sums, _zero(step.carrier), i)
        for i in range(4):
            b.store(other, operands[i], i)
        scaled = decoder.lane == 16 and case.placement == "operand"
        with b.loop(TURNS, rolled=True) as turn:
            at = 0
            for offset, width in load_order(decoder.words):
                source = words.ptr_to([turn % TILES, offset + thread % 128 * width])
                targets = [own[at + i] for i in range(width)]
                b.ptx(f"ld.global{'' if width == 1 else f'.v{width}'}.u32", *targets, source)
                at += width
            values = GroupValues((other[2], other[3]) if scaled else None)
            decoder.registers(own, range(decoder.lane), registers, 0, values, table)
            for first in range(0, decoder.lane, 4):
                weights = [registers[first + i] for i in range(4)]
                step.emit(decoder.operand, sums, 0, weights, [other[0], other[1]])
        total = sums[0]
        for i in range(1, step.lanes.accumulators):
            total = total + sums[i]
        b.store(out, total, block * THREADS + thread)
    return result.func


def _zero(carrier: str) -> Any:
    from tvm.script import tirx as T

    return T.uint32(0) if carrier == "uint32" else T.float32(0)


OPCODE = re.compile(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_]*)(\.SHL)?")


def opcodes(library: Path) -> dict[str, int]:
    """Return how often each machine instruction stands in a kernel, where cuobjdump is at hand."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        return {}
    text = subprocess.run([tool, "-sass", str(library)], capture_output=True, text=True, check=False).stdout
    return dict(Counter("".join(found) for found in OPCODE.findall(text)).most_common(14))


def compile_case(case: Case, name: str, folder: str) -> dict[str, int]:
    """Compile one kernel; return its machine instructions."""
    from ladder.lower.cuda.toolchain import compile_functions
    from targets import get_device

    device = get_device("cuda/sm_90a")
    library = Path(folder) / f"{name}.so"
    result = compile_functions({name: emit(case, device, name)}, device, library)
    binary = Path(folder) / f"{name}.cubin"
    binary.write_bytes(result.binary)
    return opcodes(binary)


def measure(case: Case, name: str, folder: str, codes: dict[str, int]) -> dict[str, Any]:
    """Time one kernel and return a row of the report."""
    import torch
    import tvm_ffi

    from benchmarks.harness import graph_time_us
    from targets import get_device

    device = get_device("cuda/sm_90a")
    decoder = case.decoder(device)
    function = tvm_ffi.load_module(str(Path(folder) / f"{name}.so"))[name]
    words = torch.randint(0, 1 << 31, (TILES, 128 * decoder.words), dtype=torch.int32, device="cuda")
    blocks = device.units * RESIDENT
    out = torch.empty(blocks * THREADS, dtype=torch.int32, device="cuda")
    out = out.view(torch.uint32 if case.activation == "int8" else torch.float32)
    operands = torch.randint(0, 1 << 31, (4,), dtype=torch.int32, device="cuda").view(torch.uint32)
    arguments = (words.view(torch.uint32), operands, out)
    time_us = graph_time_us([lambda: function(*arguments)] * 3, repeats=5)
    tiles = blocks * THREADS // 128 * TURNS
    bits = get_type(case.weight).elem_bits
    return {
        **asdict(case),
        "strategy": decoder.choice.strategy,
        "cost": asdict(decoder.choice.cost),
        "nanoseconds_per_tile": time_us * 1e3 * device.units / tiles,
        "terabytes_per_second": tiles * 512 * bits / time_us / 1e6,
        "opcodes": codes,
    }


LOAD_CLOCKS = 28
"""Clocks in which memory delivers one bit of each code of 16 x 64 to a quarter multiprocessor.

128 bytes at 4.25 TB/s over 132 multiprocessors of 1.75 GHz.
"""


def print_costs(work: Iterator[Case]) -> None:
    """Print what each decoder is expected to cost a warp per 16 x 64 codes, beside the time to load them.

    Multiplications by scales (16 instructions on operands) are not counted.
    """
    from targets import get_device

    device = get_device("cuda/sm_90a")
    print(
        "type           x         scales on    strategy         instructions  alu  fma shared   load clocks"
    )
    for case in work:
        choice, load = case.decoder(device).choice, get_type(case.weight).elem_bits * LOAD_CLOCKS
        name = f"{case.weight:14} {case.activation:9} {case.placement:12} {choice.strategy:16}"
        cost = choice.cost
        print(f"{name} {cost.instructions:12} {cost.alu:4.0f} {cost.fma:4.0f} {cost.shared:6.0f} {load:13}")


def main() -> int:
    """Compile, time, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", nargs="*", default=[], help="types; all by default")
    parser.add_argument("--output", type=Path, default=Path("decode.json"))
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--costs", action="store_true", help="only print what is expected; needs no GPU")
    arguments = parser.parse_args()
    if arguments.costs:
        print_costs(cases(arguments.weights))
        return 0
    work = {f"decode_{i}": case for i, case in enumerate(cases(arguments.weights))}
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(arguments.jobs) as pool:
            jobs = {name: pool.submit(compile_case, case, name, folder) for name, case in work.items()}
            codes = {name: job.result() for name, job in jobs.items()}
        rows = [measure(case, name, folder, codes[name]) for name, case in work.items()]
    for row in sorted(rows, key=lambda row: row["terabytes_per_second"]):
        print("{weight:14} {activation:9} {placement:12} {strategy:16}".format(**row), end="")
        print("{nanoseconds_per_tile:7.1f} ns per tile {terabytes_per_second:6.2f} TB/s".format(**row))
    write_record(arguments.output, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
