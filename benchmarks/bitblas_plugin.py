"""A pytest plug-in that puts Ladder's drop-in in BitBLAS's place: ``pytest -p benchmarks.bitblas_plugin``.

With ``--bitblas-device cpu`` tests that ask for a GPU get the CPU: what they move to ``"cuda"`` stays.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ladder.integrations.bitblas as dropin

SUBMODULES = {
    "cache": dropin.cache,
    "ops": dropin.ops,
    "ops.ladder_permutate": dropin.ops,
    "ops.lop3_permutate": dropin.ops,
    "ops.quant_compress": dropin.ops,
    "quantization": dropin.quantization,
    "quantization.utils": dropin.quantization,
    "utils": dropin,
}
"""What BitBLAS has a module of -> where it is here."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--bitblas-device", default="cuda", choices=("cuda", "cpu"))


def pytest_configure(config: pytest.Config) -> None:
    """Put the modules in place before tests are collected."""
    device = config.getoption("--bitblas-device")
    install(on_cpu=device == "cpu")
    if device == "cpu":
        OnCpu().__enter__()  # type: ignore[no-untyped-call]


def install(*, on_cpu: bool) -> None:
    """Make ``import bitblas`` give the drop-in, and ``bitblas.testing`` what its tests use."""
    package = ModuleType("bitblas")
    package.__dict__.update({name: getattr(dropin, name) for name in dropin.__all__})
    package.__path__ = []
    modules = {
        **SUBMODULES,
        "testing": testing(on_cpu),
        "tl": ModuleType("bitblas.tl"),
        "tl.lower": lowering(),
    }
    for name, module in modules.items():
        sys.modules[f"bitblas.{name}"] = module
        if "." not in name:
            setattr(package, name, module)
    package.__dict__["tvm"] = importlib.import_module("tvm")
    folders = ModuleType("tvm.contrib.utils")  # TVM 0.27 has it no more, BitBLAS's tests take folders from it
    folders.__dict__["tempdir"] = lambda: SimpleNamespace(path=tempfile.mkdtemp())
    sys.modules.setdefault("tvm.contrib.utils", folders)
    importlib.import_module("tvm.contrib").utils = folders  # type: ignore[attr-defined]
    sys.modules["bitblas"] = package


def lowering() -> ModuleType:
    """Return ``bitblas.tl.lower``, whose function lowers BitBLAS's own programs: there are none here."""
    module = ModuleType("bitblas.tl.lower")

    def tl_lower(func: Any) -> Any:
        raise NotImplementedError("only TileLang lowers BitBLAS's TileLang programs")

    module.__dict__["tl_lower"] = tl_lower
    return module


def testing(on_cpu: bool) -> ModuleType:
    """Return ``bitblas.testing``."""
    module = ModuleType("bitblas.testing")

    def requires_cuda_compute_version(major: int, minor: int = 0) -> Callable[[Any], Any]:
        enough = on_cpu or torch.cuda.get_device_capability() >= (major, minor)
        return pytest.mark.skipif(not enough, reason=f"needs compute capability {major}.{minor}")

    def requires_package(*names: str) -> Callable[[Any], Any]:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")

    module.__dict__.update(
        requires_cuda_compute_version=requires_cuda_compute_version,
        requires_package=requires_package,
        torch_assert_close=assert_close,
        main=pytest.main,
    )
    return module


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    rtol: float = 1e-2,
    atol: float = 1e-3,
    max_mismatched_ratio: float = 0.001,
    verbose: bool = False,
) -> None:
    """Raise unless all but a share of the elements are close."""
    wrong = (actual - expected).abs() > atol + rtol * expected.abs()
    share = float(wrong.double().mean())
    assert share <= max_mismatched_ratio, f"{share:.2%} of the elements differ"


class OnCpu(TorchFunctionMode):
    """Keep on the CPU what a program moves to, or makes on, ``"cuda"``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, with the CPU in place of the GPU."""
        if func is torch.Tensor.cuda:
            return args[0]
        names = dict(kwargs or {})
        return func(*map(_here, args), **{name: _here(value) for name, value in names.items()})


def _here(value: Any) -> Any:
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value
