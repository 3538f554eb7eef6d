"""From TIR to machine code: missing tools, rejected kernels, the driver stub, reports, threads."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from decode_kernels import emit_decode
from tvm.script import tirx as T

from ladder import knobs
from ladder.ir.gemm import Gemm
from ladder.lower import build as lower_build
from ladder.lower import builder as b
from ladder.lower import linking
from ladder.lower.compilation import Compilation
from ladder.lower.cpu import toolchain as cpu_toolchain
from ladder.lower.cuda import toolchain, toolkit
from ladder.lower.tvm_lock import tvm_lock, tvm_unlocked
from schedules.schedule import GpuSchedule, Plan
from targets import get_device, host_cpu
from tile_types.errors import CompilerError, DeviceError, MissingToolError, UnknownNameError

HOPPER = get_device("cuda/sm_90a")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiling needs nvcc")

PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first_kernel' for 'sm_90a'
ptxas info    : Function properties for first_kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function 'second_kernel' for 'sm_90a'
ptxas info    : Function properties for second_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers, 4096 bytes smem
"""


def program(folder: Path, name: str, text: str) -> Path:
    """Write an executable shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- missing and failing tools ----------------------------------------------------------
def test_missing_nvcc_says_how_to_get_it(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with knobs.override(nvcc=None), pytest.raises(MissingToolError, match=r"not on PATH.*LADDER_NVCC"):
        toolkit.nvcc()


@pytest.fixture
def pip_packages(monkeypatch: Any, tmp_path: Path) -> tuple[Path, Path]:
    """Make folders of NVIDIA's packages: of a base environment, and of one that shows it."""
    homes = tuple(tmp_path / name / "nvidia" / "cu13" for name in ("base", "environment"))
    for home in homes:
        for part in ("bin", "include", "lib", "nvvm/bin"):
            (home / part).mkdir(parents=True)
        monkeypatch.syspath_prepend(str(home.parents[1]))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return homes


def test_packages_come_before_path(pip_packages: tuple[Path, Path], tmp_path: Path) -> None:
    """The namespace ``nvidia`` is in many folders; that with a compiler counts."""
    base, home = pip_packages
    packaged, other = program(home / "bin", "nvcc", ""), program(tmp_path, "ptxas", "")
    program(home / "nvvm" / "bin", "cicc", "")
    disassembler = program(base / "bin", "nvdisasm", "")
    with knobs.override(nvcc=None):
        assert toolkit.nvcc() == packaged
    assert toolkit.find_tool("ptxas") == other
    assert toolkit.find_tool("nvdisasm") == disassembler
    assert toolkit.find_tool("cuobjdump") is None
    assert next(toolkit.runtime_libraries()) == str(home / "lib" / toolkit.CUDA_RUNTIME)


def test_a_compiler_without_its_parts_is_none(pip_packages: tuple[Path, Path], tmp_path: Path) -> None:
    """pip leaves out what the base environment has, such as the ``nvidia-nvvm`` that other packages bring."""
    base, home = pip_packages
    program(home / "bin", "nvcc", ""), program(base / "nvvm" / "bin", "cicc", "")
    assert toolkit.find_tool("nvcc") is None
    other = program(tmp_path, "nvcc", "")
    assert toolkit.find_tool("nvcc") == other


def test_headers_that_the_base_environment_has_are_found(
    pip_packages: tuple[Path, Path], monkeypatch: Any, tmp_path: Path
) -> None:
    """``--system-site-packages`` leaves the runtime's headers beside torch, apart from the compiler."""
    base, home = pip_packages
    program(home / "nvvm" / "bin", "cicc", "")
    seen = 'for word; do case "$word" in -isystem=*) echo "error: $word" >&2;; esac; done; exit 1'
    program(home / "bin", "nvcc", f'[ "$1" = --version ] && echo "release 13.0, V13.0.88" && exit; {seen}')
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with knobs.override(nvcc=home / "bin" / "nvcc"), pytest.raises(CompilerError) as caught:
        toolchain.compile_cuda("", HOPPER, "cubin")
    assert f"-isystem={base / 'include'}" in str(caught.value)
    assert f"-isystem={home / 'include'}" not in str(caught.value)
    assert toolkit.headers_elsewhere(program(tmp_path, "nvcc", "")) == []


def test_a_wrong_knob_names_itself(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-nvcc"
    with (
        knobs.override(nvcc=missing),
        pytest.raises(MissingToolError, match=r"LADDER_NVCC=.*no-such-nvcc does not exist"),
    ):
        toolkit.nvcc()


def test_rejected_source_is_kept_and_the_log_quoted(tmp_path: Path) -> None:
    fake = program(tmp_path, "nvcc", "echo 'kernel.cu(1): error: nonsense' >&2; exit 2")
    with knobs.override(nvcc=fake), pytest.raises(CompilerError, match="error: nonsense") as caught:
        toolchain.compile_cuda("this is no CUDA", HOPPER, "cubin")
    assert "nonsense" in str(caught.value).partition("\n")[0]
    kept = str(caught.value).split("source kept in ")[1].split(")")[0]
    assert Path(kept).read_text() == "this is no CUDA"


def test_a_rejected_kernel_keeps_its_error_type_across_tvm(tmp_path: Path) -> None:
    fake = program(tmp_path, "nvcc", "echo 'ptxas fatal: too big' >&2; exit 1")
    toolchain.load_compiler()
    function = emit_decode(Gemm(64, 64, "uint4"), HOPPER, "rejected")
    with knobs.override(nvcc=fake), pytest.raises(CompilerError, match="ptxas fatal: too big"):
        toolchain.compile_functions({"rejected": function}, HOPPER, tmp_path / "k.so")


def test_missing_disassembler(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match="cuobjdump nor nvdisasm"):
        toolchain.disassemble(b"")


def test_disassembler_output_is_the_sass(monkeypatch: Any, tmp_path: Path) -> None:
    program(tmp_path, "nvdisasm", "echo MOV R1, R2")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name) if name == "nvdisasm" else None)
    assert toolchain.disassemble(b"cubin") == "MOV R1, R2\n"


def test_a_release_that_dropped_the_architecture_is_named(tmp_path: Path) -> None:
    new = program(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    with (
        knobs.override(nvcc=new),
        pytest.raises(MissingToolError, match=r"sm_70 needs nvcc .*<13\.0.*13\.0\.88"),
    ):
        toolchain.compile_cuda("", get_device("cuda/sm_70"), "cubin")
    old = program(tmp_path, "old-nvcc", "echo 'Cuda compilation tools, release 11.4, V11.4.1'")
    with knobs.override(nvcc=old), pytest.raises(MissingToolError, match="sm_90a needs nvcc >="):
        toolchain.compile_cuda("", HOPPER, "cubin")


def test_a_gcc_that_is_newer_than_nvcc_compiles(tmp_path: Path) -> None:
    """Nvcc 13 knows gcc up to 15; its check is a header's, which this option switches off."""
    fake = program(
        tmp_path, "nvcc",
        'case "$*" in *-allow-unsupported-compiler*) ;; *) echo "unsupported GNU" >&2; exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done; printf cubin > "$2"',
    )  # fmt: skip
    with knobs.override(nvcc=fake):
        assert toolchain.compile_cuda("", HOPPER, "cubin")[0] == b"cubin"


# ---- reports ----------------------------------------------------------------------------
def test_resources_are_read_per_kernel() -> None:
    report = toolchain.parse_resources(PTXAS_LOG)
    assert report["first_kernel"] == {
        "registers": 168,
        "stack": 8,
        "spill_stores": 4,
        "spill_loads": 12,
        "shared": 0,
    }
    assert report["second_kernel"]["registers"] == 20
    assert report["second_kernel"]["shared"] == 4096


# ---- the driver stub --------------------------------------------------------------------
@pytest.fixture(params=[False, True], ids=["packaged", "on PATH"])
def any_linker(request: Any, monkeypatch: Any) -> None:
    """The linker of the extras, where there is no C compiler, and a C compiler."""
    if not request.param:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif linking.host_linker()[-1] == "ld.lld":
        pytest.skip("no C compiler is here")


def hide_linkers(monkeypatch: Any) -> None:
    """Hide C compilers and packages."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("any_linker")
def test_the_stub_answers_no_device(tmp_path: Path) -> None:
    with knobs.override(cache_dir=tmp_path):
        stubs = toolchain._driver_stub(), toolchain._driver_stub()  # the second is the cache's
    assert [path.name for path in (tmp_path / "stub").iterdir()] == ["libcuda.so.1"]
    for stub in stubs:
        assert {getattr(stub, name)() for name in toolchain.DRIVER_SYMBOLS} == {toolchain.NO_DEVICE}


def test_the_stub_needs_no_cache(tmp_path: Path) -> None:
    """Compiling for CUDA failed where the cache could not be written."""
    (tmp_path / "file").touch()
    with knobs.override(cache_dir=tmp_path / "file"):
        assert toolchain._driver_stub().cuLaunchKernel() == toolchain.NO_DEVICE


def test_the_stub_needs_a_linker(monkeypatch: Any, tmp_path: Path) -> None:
    hide_linkers(monkeypatch)
    with knobs.override(cache_dir=tmp_path), pytest.raises(MissingToolError, match="pip install ziglang"):
        toolchain._driver_stub()


@pytest.mark.usefixtures("any_linker")
def test_libraries_hold_kernels_and_find_functions_of_c(tmp_path: Path) -> None:
    from ladder.lower.cpu.toolchain import compile_functions

    with b.function("power") as kernel:
        x, y = b.tensor("x", (1,), "float32"), b.tensor("y", (1,), "float32")
        b.store(y, T.exp(x[0]), 0)
    path = tmp_path / "power.so"
    compile_functions({"power": kernel.func}, host_cpu(), path)
    entry, y = tvm_ffi.load_module(str(path))["power"], torch.zeros(1)
    entry(torch.ones(1), y)
    torch.testing.assert_close(y, torch.ones(1).exp())


def test_cpus_of_another_architecture_are_told_before_the_linker_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_toolchain.platform, "machine", lambda: "x86_64")
    with pytest.raises(DeviceError, match=r"cpu/dotprod is an Arm CPU.*this machine, x86_64"):
        cpu_toolchain.compile_functions({}, get_device("cpu/dotprod"), tmp_path / "k.so")
    monkeypatch.setattr(cpu_toolchain.platform, "machine", lambda: "aarch64")
    with pytest.raises(DeviceError, match=r"cpu/avx2 is an x86 CPU.*this machine, aarch64"):
        cpu_toolchain.compile_functions({}, get_device("cpu/avx2"), tmp_path / "k.so")


@pytest.mark.parametrize(
    ("name", "told"),
    [("h100", "did you mean 'cuda/sm_90a:h100'"), ("sm90", "did you mean 'sm_90a'"), ("foo", "known: ")],
)
def test_unknown_devices_suggest_what_contains_the_name_or_is_like_it(name: str, told: str) -> None:
    with pytest.raises(UnknownNameError, match=told):
        get_device(name)


def test_a_c_compiler_that_is_named_must_be_there(monkeypatch: Any) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(MissingToolError, match="CC=no-such-compiler"):
        linking.host_linker()


def test_what_the_linker_says_is_told(tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match=r"absent\.o"):
        linking.link(tmp_path / "k.so", [tmp_path / "absent.o"])


@pytest.mark.skipif(shutil.which("nm") is None, reason="reading symbols needs nm (binutils)")
def test_the_stub_has_what_tvms_runtime_names() -> None:
    from ladder.installation import find_library

    library = find_library("libtvm_runtime_cuda.so")
    table = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True).stdout
    named = {word for word in table.split() if word.startswith("cu") and word[2:3].isupper()}
    assert named
    assert named <= set(toolchain.DRIVER_SYMBOLS)


@pytest.mark.costly
@needs_nvcc
def test_machine_code_is_made_although_tvm_was_imported_first(tmp_path: Path) -> None:
    """Without a driver TVM would silently keep source text, to be compiled when it is loaded."""
    code = (
        "import sys, tvm\n"
        "from pathlib import Path\n"
        "from decode_kernels import emit_decode\n"
        "from ladder.ir.gemm import Gemm\n"
        "from ladder.lower.cuda.toolchain import compile_functions\n"
        "from targets import get_device\n"
        "device = get_device('cuda/sm_90a')\n"
        "f = emit_decode(Gemm(64, 64, 'uint4'), device, 'k')\n"
        "out = compile_functions({'k': f}, device, Path(sys.argv[1]))\n"
        "assert out.binary[:4] == b'\\x7fELF' and out.resources['k_kernel']['registers'] > 0\n"
        "assert b'\\x7fELF' in Path(sys.argv[1]).read_bytes()[4:]\n"
    )
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    command = [sys.executable, "-c", code, str(tmp_path / "k.so")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_linking_needs_a_linker(monkeypatch: Any, tmp_path: Path) -> None:
    fake = program(tmp_path, "nvcc", 'for last; do :; done; printf cubin > "$(dirname "$last")/kernel.cubin"')
    toolchain.load_compiler()
    function = emit_decode(Gemm(64, 64, "uint4"), HOPPER, "unlinked")
    hide_linkers(monkeypatch)
    with knobs.override(nvcc=fake), pytest.raises(MissingToolError, match="pip install ziglang"):
        toolchain.compile_functions({"unlinked": function}, HOPPER, tmp_path / "k.so")


# ---- turns ------------------------------------------------------------------------------
def test_tvm_is_used_by_one_thread_at_a_time_but_yielded() -> None:
    inside: list[str] = []
    waiting = threading.Event()

    def first() -> None:
        with tvm_lock():
            inside.append("first")
            with tvm_unlocked():
                waiting.set()
                other.result(timeout=10)
            inside.append("first again")

    def second() -> None:
        assert waiting.wait(10)
        with tvm_lock():
            inside.append("second")

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(second)
        pool.submit(first).result(timeout=10)
    assert inside == ["first", "second", "first again"]


def test_yielding_without_a_turn_is_harmless() -> None:
    with tvm_unlocked(), tvm_lock():
        pass
    with tvm_lock():
        pass


def test_threads_get_their_own_kernels(tmp_path: Path) -> None:
    fake = program(
        tmp_path, "nvcc", 'for last; do :; done; sleep 0.1; cp "$last" "$(dirname "$last")/kernel.cubin"'
    )
    toolchain.load_compiler()

    def compile_one(name: str) -> tuple[str, bytes]:
        with knobs.override(nvcc=fake), tvm_lock():
            function = emit_decode(Gemm(64, 64, "uint4"), HOPPER, name)
            done = toolchain.compile_functions({name: function}, HOPPER, tmp_path / f"{name}.so")
        return name, done.binary

    with ThreadPoolExecutor(3) as pool:
        for name, binary in pool.map(compile_one, ["one", "two", "three"]):
            assert f"{name}_kernel".encode() in binary


def test_llvm_compiles_while_others_emit(monkeypatch: Any, tmp_path: Path) -> None:
    class Executable:
        def export_library(self, path: str, fcompile: Any) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.emitted).result(timeout=10)

        def emitted(self) -> None:
            with tvm_lock():
                Path(tmp_path, "emitted").touch()

        @property
        def mod(self) -> Any:
            return self

        def inspect_source(self, kind: str) -> str:
            return kind

    monkeypatch.setattr(cpu_toolchain, "compile_module", lambda functions, device: Executable())
    with tvm_lock():
        done = cpu_toolchain.compile_functions({}, get_device("cpu/avx2"), tmp_path / "kernel.so")
    assert Path(tmp_path, "emitted").exists()
    assert done.source == "ll"


# ---- build ------------------------------------------------------------------------------
def test_equal_schedules_compile_once(monkeypatch: Any, tmp_path: Path) -> None:
    emitted: list[str] = []

    class Function:
        def script(self) -> str:
            return "tir text"

    def emit(gemm: Any, device: Any, schedule: Any, name: str) -> Function:
        emitted.append(name)
        return Function()

    def compile_functions(functions: Any, device: Any, library: Path) -> Compilation:
        return Compilation("cuda", "cuda text", b"x")

    monkeypatch.setattr(lower_build, "emit", emit)
    monkeypatch.setattr(lower_build, "resolve", lambda *_: compile_functions)
    small, large = GpuSchedule("mma", 16), GpuSchedule("mma", 64)
    plan = Plan(((16, small), (64, large), (128, small)))
    built = lower_build.build(Gemm(64, 64, "int4"), HOPPER, plan, tmp_path)
    assert len(emitted) == 2
    assert built.entries[0] == built.entries[2] != built.entries[1]
    assert built.sources == {"tir": "tir text\ntir text", "cuda": "cuda text"}


def test_entry_names_depend_on_what_shapes_the_code() -> None:
    schedule = GpuSchedule("mma", 16)
    name = lower_build.entry_name(Gemm(64, 256, "int4", group_size=64), HOPPER.name, schedule)
    assert name == lower_build.entry_name(Gemm(4096, 512, "int4", group_size=64), HOPPER.name, schedule)
    assert name.startswith("ladder_mma_")
    others = {
        lower_build.entry_name(Gemm(64, 256, "int4", group_size=128), HOPPER.name, schedule),
        lower_build.entry_name(Gemm(64, 256, "uint4", group_size=64), HOPPER.name, schedule),
        lower_build.entry_name(Gemm(64, 256, "int4", group_size=64), "cuda/sm_80", schedule),
        lower_build.entry_name(Gemm(64, 256, "int4", group_size=64), HOPPER.name, GpuSchedule("mma", 32)),
    }
    assert len(others | {name}) == 5


def test_an_unknown_pipeline_is_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'wgmma'"):
        lower_build.resolve(lower_build.KERNELS, "pipeline", "wgmm")


@needs_nvcc
def test_ptx_is_made_on_demand() -> None:
    sources = {"cuda": 'extern "C" __global__ void empty_kernel() {}'}
    text = lower_build.derive_stage("ptx", sources, HOPPER)
    assert text is not None
    assert ".target sm_90a" in text
    assert ".entry empty_kernel" in text


def test_stages_without_an_origin_are_unknown() -> None:
    assert lower_build.derive_stage("ptx", {"llvm": ""}, HOPPER) is None
    assert lower_build.derive_stage("cuda", {"llvm": ""}, HOPPER) is None
