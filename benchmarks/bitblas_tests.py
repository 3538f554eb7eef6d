"""BitBLAS's own tests, run against Ladder's drop-in.

``python -m benchmarks.bitblas_tests CHECKOUT [--device cpu] [-n WORKERS] [--only WORD] [--json FILE]``
runs the tests of operators and layers of a checkout of BitBLAS on the GPU, or on the CPU, with
`ladder.integrations.bitblas` in its place. It exits with 1 if a test failed that `WRONG` does not name,
or one of these passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import write_record

FOLDER = Path("testing", "python")
RUN = (
    "operators/test_general_matmul_ops_nf4.py",
    "operators/test_general_matmul_ops_backend_tl.py",
    "operators/test_general_matmul_ops_backend_tir.py",
    "operators/test_general_matmul_ops_backend.py",
    "operators/test_general_matmul_bf16.py",
    "module/test_bitblas_linear.py",
    "operators/test_general_matmul_fp8.py",
    "cache/test_operator_cache.py",
    "operators/test_general_matmul_ops_int4.py",
    "operators/test_quant_compress_ops.py",
    "operators/test_lop3_permutate_ops.py",
    "operators/test_ladder_permutate_ops.py",
    "cache/test_operator_cache_spin_lock.py",
    "module/test_repack_from_gptq.py",
    "module/test_repack_from_gptq_v2.py",
)
"""Files of tests of what users call, the slowest first."""

SCHEDULERS = "tests BitBLAS's own schedulers, TVM passes and TileLang programs, none of which are here"
ATTENTION = (
    "attention with FlashAttention's kernels, no part of the drop-in: ladder.compile takes torch's attention"
)
NOT_RUN = {
    "operators/test_general_flashatten_ops.py": ATTENTION,
    "operators/test_general_flashatten_ops_backend_tl.py": ATTENTION,
    "operators/test_general_flashatten_tilelang_scheduler.py": SCHEDULERS,
    "operators/test_general_matmul_tile_schedule.py": SCHEDULERS,
    "operators/test_general_matmul_tilelang_impl.py": SCHEDULERS,
    "operators/test_general_matmul_tilelang_kernel.py": SCHEDULERS,
    "operators/test_general_matmul_tilelang_scheduler.py": SCHEDULERS,
    "operators/test_tir_script_emitter.py": SCHEDULERS,
}
"""Files of operator tests that are not run, and why."""

WRONG = {
    "test_general_matmul_ops_backend::test_matmul_codegen_default": "lowers BitBLAS's program by TileLang",
}
"""Tests that fail here because of what they demand -> what that is."""

DIFFERENT = {
    "fp4_e2m1": "kernels decode codes 1 to 7 as 2**-6 to 2**0; OCP's e2m1 is 0.5, 1, 1.5, 2, 3, 4, 6",
    "e4m3_float8": "weight-only kernels decode zero as 2**-7 and other subnormals wrong; here they are exact",
    "int2 beside int4 activations": "kernels read the codes unsigned; here they are two's complement",
    "uint1, int1 with fast_decoding": "the operator ORs two nibbles of a word into one place and loses codes;"
    " here words are interleaved as bitblas.quantization.interleave_weight does",
    "with_zeros without with_scaling": "kernels ignore the zeros; here they are subtracted",
}
"""Where BitBLAS's kernels contradict its documentation, or numbers, and the drop-in does not follow."""


@dataclass(frozen=True)
class Outcome:
    """What became of a test: ``"passed"``, ``"skipped"`` or ``"failed"``, how long, and the message."""

    test: str
    result: str
    seconds: float
    message: str = ""

    @property
    def is_expected(self) -> bool:
        """Whether it is what `WRONG` says."""
        return (self.result == "failed") == (self.test in WRONG)


def run(checkout: Path, device: str, workers: int, only: str) -> list[Outcome]:
    """Run the files of a checkout in one pytest."""
    files = [str(checkout / FOLDER / name) for name in RUN]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-v", "-ra", "-p", "benchmarks.bitblas_plugin"]
        command += ["-c", "/dev/null", "--rootdir", str(checkout), "-p", "no:cacheprovider"]
        command += ["-n", str(workers), "--maxschedchunk=1", "--bitblas-device", device]
        command += [f"--junitxml={report}"]
        subprocess.run([*command, f"-k={only}", *files], check=False)
        return outcomes(report) if report.exists() else []


def outcomes(report: Path) -> list[Outcome]:
    """Read what pytest wrote."""
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    for tag, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return Outcome(name, result, float(case.get("time", 0)), found.get("message", ""))
    return Outcome(name, "passed", float(case.get("time", 0)))


def main() -> int:
    """Run, print one line per test and what is not run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("-n", dest="workers", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of tests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options.checkout, options.device, options.workers, options.only)
    for outcome in sorted(found, key=lambda outcome: outcome.test):
        why = WRONG.get(outcome.test, outcome.message.splitlines()[0] if outcome.message else "")
        print(f"{outcome.result:8}{outcome.seconds:7.1f} s  {outcome.test}  {why}".rstrip())
    for name, why in {**NOT_RUN, **DIFFERENT}.items():
        print(f"{'not run' if name in NOT_RUN else 'differs':8}{'':11}{name}: {why}")
    if options.json:
        rows = [{**vars(outcome), "expected": outcome.is_expected} for outcome in found]
        write_record(options.json, {"device": options.device, "tests": rows})
    return 0 if found and all(outcome.is_expected for outcome in found) else 1


if __name__ == "__main__":
    sys.exit(main())
