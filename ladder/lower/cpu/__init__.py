"""What CPU kernels share: the packed weight, 512-bit values in TIR, quantization of activations, LLVM.

Products are emitted by `ladder.lower.skeletons.loopnest`. Codes stay packed until they sit in a
register. With AVX-512 one permutation of a 32-entry table turns 32 codes of up to five bits into
bfloat16 values, whatever the type; other machines evaluate the type's decode expression in
vectorised loops. Call order of an entry:
``(x, words, scales?, zeros?, row_scale, token_scale?, bias?, y)``.
May import ``tile_types``, ``targets``, ``schedules``, ``ladder.ir`` and ``ladder.lower.builder``.
"""

from __future__ import annotations

from typing import Any

from ladder.lower.cpu.pack import factors_of, pack, unpack, widened
from targets import TileDevice

__all__ = ["emit_quantize", "factors_of", "pack", "unpack", "widened"]


def emit_quantize(source: str, device: TileDevice, name: str) -> Any:
    """Emit the PrimFunc ``(x[M,K], codes int8[M,K], token_scale float32[M])``.

    source: ``"bfloat16"``, ``"float16"`` or ``"float32"``: the element type of x.
    device: The CPU to emit for.
    name: Name of the entry.
    """
    from ladder.lower.cpu.quantize import emit_quantize_kernel

    return emit_quantize_kernel(source, device, name)
