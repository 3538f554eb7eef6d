"""Time Ladder's CPU kernels beside what CPU users run: on one core by processor time, or on several.

    python -m benchmarks.cpu_peers --ggml SOURCE BUILD

Peers: torch's int4 and bfloat16 products, onnxruntime's MatMulNBits, OpenVINO with u4 weights, which rounds
x to 8 bits unless it is told not to, and ggml (llama.cpp) with q4_0 weights in each packing that the CPU has,
and with ternary ones (tq2_0). SOURCE is
ggml's folder, BUILD where CMake built its shared libraries; without them, or without a package, that
peer is left out and named. ggml loads the shapes of AMX tiles once per thread, so that it must be
patched to load them in every call (`ggml_tile_config_init`) where other AMX code runs in the same thread.

As in `benchmarks.cpu_gemm`, bursts take turns and weights come from memory. Times are processor time of
the process, which is bound to one core, so that other processes of the machine add to them only by what
they take from caches and memory; with ``--threads``, every contender has that many, and times are those of
the clock. Weights are the same numbers, in int4 with groups of 128; q4_0 and tq2_0
quantize them their own way, and their errors are to the weights before quantization.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.cpu_gemm import (
    GROUP,
    RESULTS,
    SHORT,
    Contender,
    build_quantizer,
    copies_of,
    cpu_name,
    interleave,
    ladder_float,
    ladder_int8,
    nbytes,
    read_bandwidth,
    reference,
    torch_bf16,
    torch_int4,
)
from benchmarks.harness import write_record
from ladder.runtime import threads

SHAPES = ((4096, 4096), (14336, 4096))
ROWS = (1, 16, 128)
OURS = ("ladder bf16", "ladder fp16", "ladder fp32", "ladder int8")
TERNARY = "tq2_0"
KEEPING = ("torch int4", "torch bf16", "onnxruntime level 0", "openvino u4 keeping x")
"""Peers that do not round x to 8 bits."""

OFFSET = 8
"""What is added to int4 values to make codes without sign."""


@dataclass
class Timed(Contender):
    """A contender timed by the processor time of the process if that has one thread, else by the clock."""

    answer: Callable[[], Any] | None = None
    threads: int = 1
    wall: list[float] = field(default_factory=list)

    def _call(self) -> float:
        self.calls += 1
        threads.keep_apart()
        started, wall = time.process_time(), time.perf_counter()
        self.run(self.calls % len(self.sets))
        self.wall.append(time.perf_counter() - wall)
        return time.process_time() - started if self.threads == 1 else self.wall[-1]

    def error(self) -> float:
        """Return the relative Frobenius error of one call."""
        result = (self.answer() if self.answer else self.run(0)).double()
        return float((result - self.expected).norm() / self.expected.norm())


@dataclass(frozen=True)
class Case:
    """One product: float32 weights, the same in int4 and ternary, and rows of x in bfloat16."""

    weight: Any
    int4: Any
    ternary: Any
    x: Any
    cache: int
    threads: int

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        n, k = self.weight.shape
        return int(n), int(k)

    def copies(self, size: float) -> int:
        """Return how many copies of ``size`` bytes the cache does not hold."""
        return max(2, int(-(-2 * self.cache // size)))


def offset_codes(case: Case) -> Any:
    """Return int4 codes that count from the smallest value, two to a byte, the first in the low half."""
    import torch

    codes = (torch.as_tensor(case.int4.codes()).to(torch.int32) ^ OFFSET).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def scales(case: Case) -> Any:
    """Return the scales of groups in float32."""
    import torch

    return torch.as_tensor(case.int4.scale).float().reshape(case.shape[0], -1)


def onnxruntime(case: Case, level: int) -> Timed:
    """Run MatMulNBits; level 4 lets it quantize x to int8, 0 computes in float32."""
    import onnxruntime as runtime
    import torch
    from onnx import TensorProto, helper

    (n, k), packed, scale = case.shape, offset_codes(case).numpy(), scales(case).numpy()
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
        K=k, N=n, bits=4, block_size=GROUP, accuracy_level=level,
    )  # fmt: skip
    raw = partial(helper.make_tensor, raw=True)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
        [
            raw("w", TensorProto.UINT8, [n, k // GROUP, GROUP // 2], packed.tobytes()),
            raw("s", TensorProto.FLOAT, [scale.size], scale.tobytes()),
        ],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8).SerializeToString()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    size, x = packed.nbytes + scale.nbytes, case.x.float().numpy()
    sessions = [
        runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        for _ in range(case.copies(size))
    ]

    def run(turn: int) -> Any:
        return torch.from_numpy(sessions[turn].run(None, {"x": x})[0])

    return Timed(f"onnxruntime level {level}", run, sessions, reference(case.x, case.int4), size)


def openvino(case: Case, keeping: bool) -> Timed:
    """Multiply by u4 weights in bfloat16, or as OpenVINO does by itself: it rounds x to 8 bits, in groups."""
    import numpy as np
    import openvino as vino
    import torch
    from openvino import opset13 as op

    (n, k), packed, scale = case.shape, offset_codes(case).numpy().reshape(-1), scales(case).half().numpy()
    settings = {
        "INFERENCE_NUM_THREADS": case.threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "bf16",
        **({"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if keeping else {}),
    }

    def request() -> Any:
        codes = op.constant(vino.Tensor(packed.copy(), vino.Shape([n, k // GROUP, GROUP]), vino.Type.u4))
        offset = op.constant(vino.Tensor(np.array([0x88], np.uint8), vino.Shape([1]), vino.Type.u4))
        centred = op.subtract(op.convert(codes, np.float16), op.convert(offset, np.float16))
        weight = op.reshape(op.multiply(centred, op.constant(scale[:, :, None])), np.array([n, k]), False)
        rows = op.parameter(list(case.x.shape), np.float32)
        product = op.matmul(rows, op.convert(weight, np.float32), False, True)
        compiled = vino.Core().compile_model(vino.Model([product], [rows], "product"), "CPU", settings)
        made = compiled.create_infer_request()
        made.set_input_tensor(vino.Tensor(case.x.float().numpy()))
        return made

    size = packed.nbytes + scale.nbytes
    requests = [request() for _ in range(case.copies(size))]

    def run(turn: int) -> Any:
        requests[turn].infer()
        return torch.from_numpy(requests[turn].get_output_tensor().data)

    name = "openvino u4 keeping x" if keeping else "openvino u4"
    return Timed(name, run, requests, reference(case.x, case.int4), size)


def ggml_library(source: Path, built: Path) -> ctypes.CDLL:
    """Compile `ggml_product.cpp` against a build of ggml and load it."""
    made = Path(tempfile.mkdtemp(prefix="ladder-ggml-")) / "product.so"
    code = Path(__file__).with_name("ggml_product.cpp")
    flags = [
        "-O2",
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{source}/include",
        f"-L{built}",
        f"-Wl,-rpath,{built}",
    ]
    links = ["-lggml", "-lggml-base", "-lggml-cpu"]
    subprocess.run(["c++", *flags, str(code), *links, "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))
    library.ggml_product.restype = ctypes.c_void_p
    return library


def ggml(case: Case, library: ctypes.CDLL, kind: str, bits: float, packing: str) -> Timed:
    """Multiply by weights of one of ggml's types, packed for one set of its kernels."""
    import torch

    (n, k), m = case.shape, case.x.shape[0]
    weight, x = case.weight.contiguous(), case.x.float().contiguous()
    size, wide = int(n * k * bits / 8), ctypes.c_int64
    address = library.ggml_product(
        kind.encode(), packing.encode(), wide(n), wide(k), wide(m), case.copies(size), case.threads,
        ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(x.data_ptr()),
    )  # fmt: skip
    if not address:
        raise LookupError(f"this CPU has no packing {packing} for {kind}")
    product, y = ctypes.c_void_p(address), torch.empty(m, n)

    def run(turn: int) -> None:
        library.ggml_product_run(product, turn)

    def answer() -> Any:
        run(0)
        library.ggml_product_result(product, ctypes.c_void_p(y.data_ptr()))
        return y

    name = f"ggml {kind} {packing}".strip()
    exact = x.double() @ weight.double().T
    return Timed(name, run, [*range(case.copies(size))], exact, size, answer=answer)


def ladder_ternary(case: Case) -> Timed:
    """Multiply by ternary weights with a scale per row; rows are quantized to int8 within the timed call."""
    import torch

    from ladder.ir.gemm import Gemm
    from ladder.lower import cpu
    from ladder.lower.build import emit
    from ladder.lower.cpu.toolchain import compile_module
    from schedules.cpu_policy import cpu_schedule
    from targets import host_cpu

    (n, k), m, device = case.shape, case.x.shape[0], host_cpu()
    gemm = Gemm(n, k, "ternary", "int8", "bfloat16", k, token_scale=True)
    kernel = emit(gemm, device, cpu_schedule(gemm, device, m), "entry")
    entry, quantizer = compile_module({"entry": kernel}, device)["entry"], build_quantizer()
    sets = copies_of(list(cpu.pack(gemm, case.ternary).values()), case.cache)
    y = torch.empty(m, n, dtype=torch.bfloat16)
    codes, scale = torch.empty(case.x.shape, dtype=torch.int8), torch.empty(m)

    def run(turn: int) -> Any:
        quantizer(case.x, codes, scale)
        entry(codes, *sets[turn], scale, y)
        return y

    return Timed("ladder ternary int8", run, sets, reference(case.x, case.ternary), nbytes(sets[0]))


def from_gemm(make: Callable[..., Contender], case: Case) -> Timed:
    """Return a contender of `benchmarks.cpu_gemm`, timed as all are here."""
    made = make(*case.shape, case.x, case.int4, case.cache)
    return Timed(made.name, made.run, made.sets, made.expected, made.bytes_read)


def makers(library: ctypes.CDLL | None) -> Mapping[str, Callable[[Case], Timed]]:
    """Return what makes each contender."""
    known: dict[str, Callable[..., Contender]] = {
        **{name: partial(ladder_float, activation=name) for name in SHORT},
        **{make.__name__: make for make in (ladder_int8, torch_int4, torch_bf16)},
    }
    rest: dict[str, Callable[[Case], Timed]] = {
        "ladder_ternary": ladder_ternary,
        "onnxruntime level 4": partial(onnxruntime, level=4),
        "onnxruntime level 0": partial(onnxruntime, level=0),
        "openvino": partial(openvino, keeping=False),
        "openvino keeping": partial(openvino, keeping=True),
    }
    if library is not None:
        for packing in ("", "CPU_REPACK", "AMX"):
            rest[f"ggml q4_0 {packing}"] = partial(
                ggml, library=library, kind="q4_0", bits=4.5, packing=packing
            )
        rest["ggml tq2_0"] = partial(ggml, library=library, kind=TERNARY, bits=2.0625, packing="")
    return {**{name: partial(from_gemm, make) for name, make in known.items()}, **rest}


def contenders(case: Case, library: ctypes.CDLL | None) -> tuple[list[Timed], dict[str, str]]:
    """Return all that can run, and why the others cannot."""
    found, missing = [], {}
    for name, make in makers(library).items():
        try:
            found.append(make(case))
        except (ImportError, LookupError, RuntimeError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    read = read_bandwidth(found[0])
    found.append(Timed(read.name, read.run, read.sets, read.expected, read.bytes_read))
    for each in found:
        each.threads = case.threads
    return found, missing


def judged(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the ratios that the requirements are about."""
    at = {name: row["median_us"] for name, row in times.items()}
    peers = {name: us for name, us in at.items() if not name.startswith("ladder") and name != "read"}
    best = min(us for name, us in peers.items() if TERNARY not in name)
    found = {f"best peer / {name}": best / at[name] for name in OURS}
    keeping = [us for name, us in peers.items() if name in KEEPING]
    if keeping:
        found |= {f"best peer keeping x / {name}": min(keeping) / at[name] for name in OURS[:-1]}
    read = times["read"]["gb_per_s"]
    found |= {f"{name}, part of read bandwidth": times[name]["gb_per_s"] / read for name in OURS}
    ternary = next((us for name, us in peers.items() if TERNARY in name), None)
    if ternary is not None:
        found["tq2_0 / ladder ternary int8"] = ternary / at["ladder ternary int8"]
    return {name: round(value, 3) for name, value in found.items()}


def run_case(case: Case, library: ctypes.CDLL | None, rounds: int) -> dict[str, Any]:
    """Measure one product; print and return its record."""
    some, missing = contenders(case, library)
    interleave(list(some), rounds)
    times = {
        each.name: {
            **each.summary(),
            "least_us": round(min(each.times) * 1e6, 1),
            "wall_us": round(statistics.median(each.wall) * 1e6, 1),
        }
        for each in some
    }
    (n, k), ratios = case.shape, judged(times)
    print(f"N={n} K={k} M={case.x.shape[0]}: {ratios}")
    for name, row in times.items():
        print(
            f"  {name:22} {row['median_us']:10.1f} us {row['gb_per_s']:6.2f} GB/s"
            f"  error {row['relative_error']:.1e}"
        )
    return {"n": n, "k": k, "m": case.x.shape[0], "ratios": ratios, "times": times, "missing": missing}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every shape at every M."""
    import torch

    from tile_types import quantize

    library = ggml_library(*arguments.ggml) if arguments.ggml else None
    records = []
    for n, k in SHAPES:
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
        int4 = quantize(weight, "int4", group_size=GROUP, scale_type="bfloat16")
        ternary = quantize(weight, "ternary", group_size=k, scale_type="bfloat16")
        for m in arguments.m:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
            case = Case(weight, int4, ternary, x, arguments.cache << 20, arguments.threads)
            records.append(run_case(case, library, arguments.rounds))
            gc.collect()
    return records


def versions() -> dict[str, str]:
    """Return the versions of all that is compared and installed."""
    found = {}
    for name in ("torch", "onnxruntime", "openvino", "apache-tvm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def main() -> None:
    """Run the benchmark and write its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ggml", type=Path, nargs=2, metavar=("SOURCE", "BUILD"), help="folders of ggml")
    parser.add_argument("--core", type=int, default=0, help="the core to run on, of one thread")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=int, default=100, help="MiB that copies of a weight exceed twice")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("-m", type=int, nargs="+", default=ROWS)
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: benchmarks/results/cpu_peers_DATE.json)"
    )
    arguments = parser.parse_args()
    if arguments.threads == 1:
        os.sched_setaffinity(0, {arguments.core})
    threads.prepare_environment(arguments.threads)
    import torch
    import tvm  # noqa: F401  its runtime registers the thread pool

    torch.set_num_threads(arguments.threads)
    started, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), os.getloadavg()
    record = {
        "date": started,
        "cpu": cpu_name(),
        "what": "processor time of one process on one core"
        if arguments.threads == 1
        else f"time by the clock, {arguments.threads} threads each",
        "versions": versions(),
        "command": f"python -m benchmarks.cpu_peers --ggml SOURCE BUILD --rounds {arguments.rounds}"
        + f" --threads {arguments.threads}",
        "results": measure(arguments),
        "load_average": {"before": load, "after": os.getloadavg()},
    }
    path = arguments.output or RESULTS / f"cpu_peers_{started[:10]}.json"
    write_record(path, record)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
