"""Arguments of attention kernels, the same for all GPUs: extents, strides, and tensors of one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script.builder import ir as I

from ladder.ir.attention import Attention
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import tir_name

Expr = Any

ALIGNMENT = {"q": 16, "k": 16, "v": 16, "out": 16}
"""Bytes at which tensors begin that are accessed in wide pieces."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of a kernel: extents and strides, and tensors of one axis."""

    numbers: Mapping[str, Expr]
    tensors: Mapping[str, Any]


def declare_inputs(form: Attention) -> Inputs:
    """Declare the arguments in calling order."""
    numbers = {name: I.arg(name, I.int32()) for name in form.numbers()}
    tensors = {
        name: b.tensor(name, (b.symbol(f"{name}_length"),), _tir(ttype), align=ALIGNMENT.get(name, 1))
        for name, ttype in form.tensors().items()
    }
    return Inputs(numbers, tensors)


def _tir(ttype: str) -> str:
    """Return the TIR type of a tensor; truth values are bytes."""
    return "uint8" if ttype == "bool" else tir_name(ttype)
