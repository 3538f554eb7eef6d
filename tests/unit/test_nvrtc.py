"""CUDA without nvcc, or gcc: NVRTC is chosen only then, and compiles what TVM emits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from decode_kernels import emit_decode

from ladder import knobs
from ladder.ir.gemm import Gemm
from ladder.lower.cuda import nvrtc, toolchain
from targets import get_device
from tile_types.errors import CompilerError, MissingToolError

HOPPER = get_device("cuda/sm_90a")
needs_nvrtc = pytest.mark.skipif(
    nvrtc.library() is None, reason="no NVRTC here; CUDA builds of torch bring it"
)


class FakeNvrtc:
    """A library of release 13.0."""

    def nvrtcVersion(self, major: ctypes.c_int, minor: ctypes.c_int) -> int:
        ctypes.cast(major, ctypes.POINTER(ctypes.c_int))[0] = 13
        ctypes.cast(minor, ctypes.POINTER(ctypes.c_int))[0] = 0
        return 0


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nvcc is installed."""
    real = toolchain.find_tool
    monkeypatch.setattr(toolchain, "find_tool", lambda name: None if name == "nvcc" else real(name))


def test_nvcc_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library", FakeNvrtc)
    monkeypatch.setattr(toolchain, "find_tool", lambda name: Path("/tools") / name)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/bin/{name}")
    assert not toolchain.uses_nvrtc()
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    assert toolchain.uses_nvrtc()  # nvcc calls gcc


@pytest.mark.usefixtures("no_nvcc")
def test_without_nvcc_the_library_compiles_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library", FakeNvrtc)
    assert toolchain.uses_nvrtc()
    assert toolchain.compiler_identity().startswith("nvrtc 13.0 ")
    with pytest.raises(MissingToolError, match=r"sm_70 needs nvcc .*<13\.0.*NVRTC is 13\.0"):
        toolchain.compile_cuda("", get_device("cuda/sm_70"), "cubin")


@pytest.mark.usefixtures("no_nvcc")
def test_a_compiler_that_was_named_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "library", FakeNvrtc)
    with knobs.override(nvcc=tmp_path / "missing"):
        assert not toolchain.uses_nvrtc()
        with pytest.raises(MissingToolError, match="LADDER_NVCC"):
            toolchain.compile_cuda("", HOPPER, "cubin")


@needs_nvrtc
@pytest.mark.usefixtures("no_nvcc")
def test_it_compiles_a_kernel_and_reports_its_registers(tmp_path: Path) -> None:
    function = emit_decode(Gemm(64, 64, "uint4"), HOPPER, "decode")
    done = toolchain.compile_functions({"decode": function}, HOPPER, tmp_path / "k.so")
    assert done.binary[:4] == b"\x7fELF"
    (kernel,) = done.resources.values()
    assert 0 < kernel["registers"] <= 255


@needs_nvrtc
@pytest.mark.usefixtures("no_nvcc")
def test_it_quotes_what_it_rejects() -> None:
    with pytest.raises(CompilerError, match=r"NVRTC rejected the kernel(.|\n)*nonsense"):
        toolchain.compile_cuda("nonsense", HOPPER, "cubin")
