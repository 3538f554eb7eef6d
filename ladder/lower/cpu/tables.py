"""Values of a type as a constant array of a kernel, which every lane of a vector reads at its code.

For types whose decode chooses among many values: as selections these take seconds to compile, and
longer to execute than sixteen loads from the first-level cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from tvm.script import tirx as T

from ladder.lower import Expr
from schedules.cpu_layout import LANES
from tile_types import TType


def look_up(ttype: TType, codes: Expr) -> Expr:
    """Return the float32x16 values of uint32x16 codes; needs `helper`."""
    return T.call_pure_extern(f"float32x{LANES}", _name(ttype), codes)


def helper(ttype: TType) -> str:
    """Return LLVM IR of the function that `look_up` calls, and of its array."""
    bits, name = _bits(ttype), _name(ttype)
    words, array = f"<{LANES} x i32>", f"[{len(bits)} x i32]"
    entries = ", ".join(f"i32 {entry}" for entry in bits)
    lines = [
        f"@{name}_values = internal unnamed_addr constant {array} [{entries}], align 64",
        f"define internal <{LANES} x float> @{name}({words} %codes) alwaysinline {{",
        *_reads(name, array, words),
        f"  %r = bitcast {words} %v{LANES - 1} to <{LANES} x float>",
        f"  ret <{LANES} x float> %r",
        "}",
    ]
    return "\n".join(lines)


def _reads(name: str, array: str, words: str) -> Iterable[str]:
    """Yield the lines that read one entry per lane."""
    for lane in range(LANES):
        before = f"%v{lane - 1}" if lane else "undef"
        yield f"  %c{lane} = extractelement {words} %codes, i32 {lane}"
        yield f"  %w{lane} = zext i32 %c{lane} to i64"
        yield f"  %p{lane} = getelementptr {array}, ptr @{name}_values, i64 0, i64 %w{lane}"
        yield f"  %e{lane} = load i32, ptr %p{lane}, align 4"
        yield f"  %v{lane} = insertelement {words} {before}, i32 %e{lane}, i32 {lane}"


def _bits(ttype: TType) -> list[int]:
    """Return the float32 bits of the value of every code."""
    with np.errstate(over="ignore"):
        return [int(entry) for entry in ttype.values().astype(np.float32).view(np.uint32)]


def _name(ttype: TType) -> str:
    """Return a name that other values do not have: a module holds kernels of several types."""
    digest = hashlib.sha256(np.array(_bits(ttype), "<u4").tobytes()).hexdigest()
    return f"ladder_values_{digest[:16]}"
