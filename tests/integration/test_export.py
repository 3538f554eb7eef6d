"""Export, then load in a process that has no compiler and cannot import TVM."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ladder

pytestmark = pytest.mark.usefixtures("plain_compiler")

N, K = 48, 72
ROOT = Path(ladder.__file__).parents[1]


def exported(path: Path, with_weight: bool = True):
    weight = ladder.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), "int4")
    op = ladder.Matmul(N, K, "int4", bias=True)
    packed = op.pack(weight)
    return op, weight, packed, op.export(path, packed if with_weight else None)


def test_loaded_artefact_computes_the_same(tmp_path: Path) -> None:
    op, _, packed, path = exported(tmp_path / "op.ladder")
    loaded = ladder.load(path)
    for m in (0, 1, 5, 100):
        x, bias = torch.randn(m, K).half(), torch.randn(N).half()
        assert torch.equal(loaded(x, bias=bias), op(x, packed, bias))
        for other in (copy.copy(loaded), copy.deepcopy(loaded)):
            assert torch.equal(other(x, bias=bias), loaded(x, bias=bias))
    assert copy.deepcopy(loaded).packed is not loaded.packed
    with pytest.raises(ladder.DTypeError, match="keep its file"):
        pickle.dumps(loaded)
    assert loaded.kernel.gemm == op.gemm
    with pytest.raises(ladder.DTypeError, match="float16"):
        loaded(torch.zeros(1, K), bias=torch.zeros(N).half())
    assert not [p for p in tmp_path.iterdir() if p != path]


def test_artefact_without_weight_takes_one(tmp_path: Path) -> None:
    op, weight, packed, path = exported(tmp_path / "op.ladder", with_weight=False)
    loaded = ladder.load(path)
    x, bias = torch.randn(2, K).half(), torch.zeros(N).half()
    with pytest.raises(ladder.ArtifactError, match="pass packed="):
        loaded(x, bias=bias)
    assert torch.equal(loaded(x, loaded.pack(weight), bias), op(x, packed, bias))


def test_export_refuses_a_weight_of_another_family(tmp_path: Path) -> None:
    op, _, packed, _ = exported(tmp_path / "op.ladder")
    with pytest.raises(ladder.DeviceError, match="packed for 'cpu'"):
        op.export(tmp_path / "gpu.ladder", packed, target="cuda/sm_80")


WARM = """
    import sys, time
    import torch, ladder
    w = ladder.quantize(torch.ones(48, 72), "int4")
    op = ladder.Matmul(48, 72, "int4")
    packed, x = op.pack(w), torch.ones(1, 72).half()
    start = time.thread_time()  # not wall time: tests run side by side
    op(x, packed)
    print(time.thread_time() - start)
    assert "tvm" not in sys.modules
"""


@pytest.mark.costly
def test_first_call_with_a_warm_cache_is_fast_and_needs_no_compiler(shared_cache: Path) -> None:
    op = ladder.Matmul(N, K, "int4")
    op(torch.ones(1, K).half(), op.pack(ladder.quantize(torch.ones(N, K), "int4")))
    code = "import ladder.lower.cpu as c; c.pack = lambda g, w, *_: {'dense': w.dequantize('float32')}\n"
    runs = [run(code + textwrap.dedent(WARM), LADDER_CACHE_DIR=str(shared_cache)) for _ in range(2)]
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    assert min(float(done.stdout) for done in runs) < 0.05


BLOCKED = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "tvm":
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocker())
    import torch, ladder
    loaded = ladder.load(sys.argv[1])
    x = torch.load(sys.argv[2])
    torch.save(loaded(x, bias=torch.zeros(48).half()), sys.argv[3])
    assert "tvm" not in sys.modules
    with open("/proc/self/maps") as maps:
        assert "libtvm_compiler" not in maps.read()
"""


def run(code: str, *arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.costly
def test_runs_without_compiler_and_without_importing_tvm(tmp_path: Path) -> None:
    op, _, packed, path = exported(tmp_path / "op.ladder")
    x = torch.randn(5, K).half()
    torch.save(x, tmp_path / "x.pt")
    done = run(BLOCKED, path, tmp_path / "x.pt", tmp_path / "y.pt", PATH="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), op(x, packed, torch.zeros(N).half()))


@pytest.mark.costly
def test_runtime_folder_can_be_a_bare_copy(tmp_path: Path) -> None:
    from ladder.installation import find_library, tvm_version

    _, _, _, path = exported(tmp_path / "op.ladder")
    bare = tmp_path / "runtime"
    bare.mkdir()
    (bare / "libtvm_runtime.so").symlink_to(find_library("libtvm_runtime.so"))
    (bare / "VERSION").write_text(tvm_version() + "\n")
    torch.save(torch.ones(1, K).half(), tmp_path / "x.pt")
    done = run(BLOCKED, path, tmp_path / "x.pt", tmp_path / "y.pt", LADDER_RUNTIME_DIR=str(bare))
    assert done.returncode == 0, done.stderr


@pytest.mark.costly
def test_missing_runtime_library_is_one_readable_error(tmp_path: Path) -> None:
    _, _, _, path = exported(tmp_path / "op.ladder")
    (tmp_path / "empty").mkdir()
    code = "import sys, ladder; ladder.load(sys.argv[1])"
    done = run(code, path, LADDER_RUNTIME_DIR=str(tmp_path / "empty"))
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingToolError" in last
    assert "libtvm_runtime.so not found" in last
    assert "LADDER_RUNTIME_DIR" in last
