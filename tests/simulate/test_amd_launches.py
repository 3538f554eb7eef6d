"""Every family of AMD kernels launched by its host part, through a HIP runtime that checks each argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import hip_stub
import pytest
import test_amd_attention as attention
import test_amd_blocks as blocks
import test_amd_experts as experts
import test_amd_scaled as scaled
import test_machine_code as products
import test_quantize
import test_random_chains as chains
from test_machine_code import machine_code  # noqa: F401  a fixture

from ladder.simulate import launch

EXPERTS = {
    "gfx90a": "offsets of few tokens",
    "gfx942": "counts of fp8",
    "gfx950": "groups in columns",
    "gfx1100": "gfx1100",
    "gfx1201": "counts of gfx1201",
}
PRODUCTS = {
    "gfx90a": "mfma of int8",
    "gfx942": "any five bits",
    "gfx950": "converted e5m2",
    "gfx1100": "dot32 of int8",
    "gfx1201": "wmma_split of fp8",
}


def _product(arch: str) -> None:
    *options, m, schedule = products.PRODUCTS[PRODUCTS[arch]]
    products.check_product(*options, m, schedule, 83, 264)


def _experts(arch: str) -> None:
    result, exact = experts.simulated(EXPERTS[arch])
    owned = exact.isfinite().numpy()
    error = abs(result.y[owned] - exact.numpy()[owned]).max() / abs(exact.numpy()[owned]).max()
    assert error <= experts.BOUNDS[experts.CASES[EXPERTS[arch]][2]]


def _block_graph(name: str, arch: str) -> None:
    make, schedule = blocks.CASES[name]
    blocks.check(make(), schedule, arch, stage="code")


def _scaled(arch: str) -> None:
    _, error = scaled.run("stored as vectors", stage="code")
    assert error < scaled.BOUNDS["bfloat16"]


CHECKS: dict[str, Callable[[str], None]] = {
    "product": _product,
    "experts": _experts,
    "chain": lambda arch: chains.check(4, f"rocm/{arch}"),
    "attention": lambda arch: attention.check("int8, bfloat16, mask", arch, stage="code"),
    "attention by positions": lambda arch: attention.check("positions per token", arch, stage="code"),
    "quantizer": lambda arch: test_quantize.test_codes_and_scales("groups of 128, odd K", f"rocm/{arch}"),
    "block graph": partial(_block_graph, "norm, steps not even"),
    "packed block graph": lambda arch: blocks.check_packed(
        *blocks.WEIGHTS["nf4"], blocks.PACKED[0], arch, stage="code"
    ),
    "scaled": _scaled,
}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("family", "arch"),
    [(name, arch) for name in CHECKS for arch in EXPERTS if name != "scaled" or arch == "gfx950"],
)
@pytest.mark.usefixtures("machine_code")
def test_launches(family: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hip_stub.installed(arch, tmp_path) as stub:
        monkeypatch.setattr(
            launch,
            "_on_code",
            lambda function, _, arrays, outputs: hip_stub.launched(stub, function, arrays, outputs),
        )
        CHECKS[family](arch)
    assert not stub.refusals
    assert not stub.findings
    assert stub.launches
    assert not stub.memory
