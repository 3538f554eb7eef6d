"""Emitted decoders on a GPU: every register of a tile, bit for bit as the proof's machine computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_kernels import CORES, PLACEMENTS, arguments, differing, emit_decode, problems

from targets import TileDevice, get_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ARCHITECTURES = {(7, 5): "sm_75", (8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a"}
BATCH = 8
"""Decoders per kernel."""


def present_device() -> TileDevice:
    """Return the first GPU's architecture."""
    return get_device(f"cuda/{ARCHITECTURES[torch.cuda.get_device_capability()]}")


def to_device(array: Any) -> torch.Tensor:
    """Return a uint32 array on the GPU."""
    return torch.from_numpy(array.view(np.int32)).cuda().view(torch.uint32)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("core", CORES)
def test_decoded_registers_equal_the_proven_ones(core: str, placement: str, tmp_path: Path) -> None:
    import tvm_ffi

    from ladder.lower.cuda.toolchain import compile_functions

    device = present_device()
    if not device.cores_for(core):
        pytest.skip(f"{device.name} has no {core} core")
    cases = problems(core)
    batches = {f"decode_{i}": cases[i : i + BATCH] for i in range(0, len(cases), BATCH)}
    functions = {name: emit_decode(batch, device, name, placement) for name, batch in batches.items()}
    compile_functions(functions, device, tmp_path / "decode.so")
    module = tvm_ffi.load_module(str(tmp_path / "decode.so"))
    wrong = []
    for name, batch in batches.items():
        *inputs, out = (to_device(array) for array in arguments(batch, device))
        module[name](*inputs, out)
        registers = out.view(torch.int32).cpu().numpy().view(np.uint32)
        wrong += differing(batch, device, registers, placement)
    assert not wrong
