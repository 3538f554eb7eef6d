"""bitsandbytes: NF4 and FP4 codes; fused kernels for few rows, else dequantization and cuBLAS."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch

from benchmarks.peers.engine import Engine, Operand, Work

FORMATS: Mapping[str, tuple[str, int]] = {"nf4": ("nf4", 64), "mxfp4": ("fp4", 64)}
"""bitsandbytes' format and block size that is nearest to a weight type; its FP4 has no e8m0 scales."""


class BitsandbytesOperand(Operand):
    """A quantized weight of bitsandbytes."""

    def __init__(self, codes: Any, state: Any) -> None:
        self.codes, self.state = codes, state
        self.nbytes = codes.nbytes + state.absmax.nbytes

    def dense(self) -> Any:
        functional = import_module("bitsandbytes.functional")
        exact = copy.copy(self.state)
        exact.dtype = torch.float32
        return functional.dequantize_4bit(self.codes, exact).double()

    def clone(self) -> Operand:
        state = copy.copy(self.state)
        state.absmax = self.state.absmax.clone()
        return BitsandbytesOperand(self.codes.clone(), state)

    def __call__(self, *given: Any) -> Any:
        return import_module("bitsandbytes").matmul_4bit(given[0], self.codes, quant_state=self.state)


class Bitsandbytes(Engine):
    """bitsandbytes' 4-bit product."""

    distribution: ClassVar[str] = "bitsandbytes"
    module: ClassVar[str] = "bitsandbytes"

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        return "" if work.weight in FORMATS else f"bitsandbytes has no format for {work.weight}"

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        kind, block = FORMATS[work.weight]
        functional = import_module("bitsandbytes.functional")
        source = weight.to(getattr(torch, work.source)).contiguous()
        codes, state = functional.quantize_4bit(
            source, blocksize=block, quant_type=kind, compress_statistics=False
        )
        return BitsandbytesOperand(codes, state)
