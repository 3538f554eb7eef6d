"""Emitted decoders on a GPU: every register of a tile, bit for bit as the proof's machine computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_kernels import conversions, emit_decode, tile_codes

from ladder.ir.gemm import Gemm
from schedules.layouts import FragmentLayout, lane_of
from targets import get_device
from tile_types import get_type, representable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ARCHITECTURES = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a"}
SCALES = (0.375, 1.25)
ZEROS = (1.0, 0.0)
REMAINDERS = (0.25, -0.125)


def problems(core: str) -> list[Gemm]:
    """Return a decode problem for every type, with every kind of zero point."""
    scale = lane_of(core) == 16
    found = [Gemm(64, 64, t, core, zero=z, scale=scale) for t, c, z in conversions() if c == core]
    names = {gemm.weight for gemm in found} if scale else set()
    return found + [
        Gemm(64, 64, t, core, zero="float") for t in sorted(names) if representable(t, core, "float")
    ]


def operand(core: str, values: tuple[float, ...]) -> torch.Tensor:
    """Return values repeated in every lane of a register."""
    if lane_of(core) == 8:
        bits = np.array(values).astype(np.int8).view(np.uint8).astype(np.uint32) * np.uint32(0x01010101)
    else:
        narrow = torch.tensor(values, dtype=torch.float64).to(getattr(torch, core))
        bits = narrow.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) * np.uint32(0x00010001)
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.uint32)


def zero_values(gemm: Gemm) -> tuple[float, ...]:
    """Return the zero points of rows g and g+8, each followed by its remainder if real."""
    low, high = (max(z, get_type(gemm.weight).minimum) for z in ZEROS) if gemm.zero == "integer" else ZEROS
    return (low, REMAINDERS[0], high, REMAINDERS[1]) if gemm.zero == "float" else (low, high)


def reference(gemm: Gemm, decoder: Any, own: list[Any], zeros: Any, scales: Any) -> Any:
    """Return ``[register, thread]`` words by the machine that proofs run on."""
    from ladder.lower.cuda.proof import NumpyMachine

    m = NumpyMachine()
    words = [m.input(word) for word in own]
    zero = [m.input(np.array([z], np.uint32)) for z in zeros.view(torch.int32).numpy().view(np.uint32)]
    scale = [m.input(np.array([s], np.uint32)) for s in scales.view(torch.int32).numpy().view(np.uint32)]
    rows = []
    for register in range(decoder.lane):
        h = register % 2
        inside = zero[h] if gemm.zero == "integer" else None
        value = decoder.choice.recipe.register(m, words, register, inside)
        for part in zero[2 * h : 2 * h + 2] if gemm.zero == "float" else ():
            value = m.float_sub(decoder.operand, value, part)
        if gemm.scale:
            value = m.float_mul(decoder.operand, value, scale[h])
        rows.append(np.broadcast_to(value.content, (128,)))
    return np.stack(rows)


@pytest.mark.parametrize("core", ["float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_decoded_registers_equal_the_proven_ones(core: str, tmp_path: Path) -> None:
    from ladder.lower.cuda.decode import load_order, make_decoder
    from ladder.lower.cuda.toolchain import compile_functions

    capability = torch.cuda.get_device_capability()
    device = get_device(f"cuda/{ARCHITECTURES[capability]}")
    cases = {f"decode_{i}": gemm for i, gemm in enumerate(problems(core))}
    functions = {name: emit_decode(gemm, device, name) for name, gemm in cases.items()}
    compile_functions(functions, device, tmp_path / "decode.so")
    import tvm_ffi

    module = tvm_ffi.load_module(str(tmp_path / "decode.so"))
    threads = np.arange(128)
    wrong = []
    for name, gemm in cases.items():
        decoder, bits = make_decoder(gemm, device), get_type(gemm.weight).elem_bits
        codes = torch.from_numpy(tile_codes(get_type(gemm.weight)).astype(np.int32))
        packed = FragmentLayout(bits, decoder.lane).pack(codes)
        scales = operand(core, SCALES) if decoder.lane == 16 else torch.zeros(2, dtype=torch.uint32)
        zeros = operand(core, zero_values(gemm))
        out = torch.zeros(decoder.lane, 128, dtype=torch.int32, device="cuda").view(torch.uint32)
        module[name](packed.cuda(), scales.cuda(), zeros.cuda(), out)
        flat = packed.view(torch.int32).numpy().view(np.uint32)
        own = [flat[o + threads * w + v] for o, w in load_order(bits) for v in range(w)]
        expected = reference(gemm, decoder, own, zeros, scales)
        if not np.array_equal(out.view(torch.int32).cpu().numpy().view(np.uint32), expected):
            wrong.append(f"{gemm.weight} zero={gemm.zero} by {decoder.choice.strategy}")
    assert not wrong
