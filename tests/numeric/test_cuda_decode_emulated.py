"""Generated decoders, run on the host: every register of a tile as the proof's machine computes it.

What is proven is a recipe executed by `NumpyMachine`; this closes the gap to the CUDA text.
"""

from __future__ import annotations

from pathlib import Path

import cuda_emulator
import pytest
from decode_kernels import CORES, PLACEMENTS, arguments, differing, emit_decode, problems

from targets import get_device

pytestmark = pytest.mark.skipif(bool(cuda_emulator.missing_tools()), reason=cuda_emulator.missing_tools())


@pytest.mark.daily(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("core", CORES)
def test_generated_decoders_equal_the_proven_ones(core: str, placement: str, tmp_path: Path) -> None:
    device = get_device("cuda/sm_89")
    cases = problems(core)
    kernel = cuda_emulator.Kernel(emit_decode(cases, device, "decode", placement), device, tmp_path)
    out = arguments(cases, device)
    kernel(*out)
    assert not differing(cases, device, out[-1], placement)
