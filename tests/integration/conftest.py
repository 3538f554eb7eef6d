"""A plain compiler for tests of what lies above it: float32 weights, one loop nest, no schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ladder import knobs
from ladder.ir.gemm import Gemm
from ladder.lower.build import BuiltModule, entry_name
from ladder.runtime import compile as runtime_compile
from schedules.schedule import Plan
from targets import TileDevice

DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def plain_pack(gemm: Gemm, weight: Any, *kernels: Any) -> dict[str, Any]:
    """Return the decoded weights as the only packed array."""
    import torch

    return {"dense": torch.as_tensor(weight.dequantize("float32"))}


def plain_kernel(gemm: Gemm, name: str) -> Any:
    """Emit ``y = (x · denseᵀ) * token_scale + bias`` in float32."""
    from tvm import te

    m, k_x, n, k = te.var("m"), te.var("k_x"), te.var("n"), te.var("k")
    x = te.placeholder((m, k_x), DTYPES.get(gemm.activation, gemm.activation), "x")
    dense = te.placeholder((n, k), "float32", "dense")
    scale = [te.placeholder((m,), "float32", "token_scale")] if gemm.token_scale else []
    bias = [te.placeholder((n,), gemm.output, "bias")] if gemm.bias else []
    axis = te.reduce_axis((0, k), "axis")
    total = te.compute((m, n), lambda i, j: te.sum(x[i, axis].astype("float32") * dense[j, axis], axis))

    def finish(i: Any, j: Any) -> Any:
        value = total[i, j] * scale[0][i] if scale else total[i, j]
        return (value + bias[0][j].astype("float32") if bias else value).astype(gemm.output)

    y = te.compute((m, n), finish, "y")
    function = te.create_prim_func([x, dense, *scale, *bias, y])
    return function.with_attr("global_symbol", name)


def compile_plain(gemm: Gemm, device: TileDevice, plan: Plan, folder: Path) -> BuiltModule:
    """Compile the plain kernel for every entry of a plan."""
    import tvm

    names = tuple(entry_name(gemm, device.name, schedule) for _, schedule in plan.entries)
    functions = {name: plain_kernel(gemm, name) for name in names}
    path = folder / "kernel.so"
    tvm.compile(tvm.IRModule(functions), target="llvm").export_library(str(path))
    return BuiltModule(path, names, {"tir": "plain " + functions[names[0]].script()})


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder of the plain compiler's kernels."""
    return tmp_path_factory.mktemp("plain-cache")


@pytest.fixture
def plain_compiler(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> Iterator[list[Gemm]]:
    """Use the plain compiler; yields the list of what was built."""
    calls: list[Gemm] = []

    def plain_build(gemm: Gemm, device: TileDevice, plan: Plan, folder: Path) -> BuiltModule:
        calls.append(gemm)
        return compile_plain(gemm, device, plan, folder)

    monkeypatch.setattr("ladder.lower.build.build", plain_build)
    monkeypatch.setattr("ladder.lower.cpu.pack", plain_pack)
    runtime_compile.forget()
    with knobs.override(cache_dir=shared_cache):
        yield calls
    runtime_compile.forget()


@pytest.fixture
def empty_cache(plain_compiler: list[Gemm], tmp_path: Path) -> Iterator[Path]:
    """Use the plain compiler with an empty cache folder."""
    with knobs.override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"
