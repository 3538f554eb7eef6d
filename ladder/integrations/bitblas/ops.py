"""BitBLAS's operators that prepare weights. They run where their tensors are; ``target`` is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ladder.integrations.bitblas.config import ELEMENTS
from ladder.integrations.bitblas.layouts import Layout, into_tiles, tile_order
from ladder.integrations.bitblas.matmul import Matmul as Matmul
from ladder.integrations.bitblas.timing import milliseconds
from tile_types.errors import DTypeError


class Preparation:
    """An operator of one tensor; a subclass says what it computes and of what."""

    def __init__(
        self, config: Any, name: str = "", target: Any = "llvm", enable_tuning: bool = False, **_: Any
    ) -> None:
        self.config, self.name, self.target = config, name or type(self).__name__, target

    def __call__(self, inp: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return what it makes of a tensor, in ``out`` if that is given."""
        result = self.compute(inp)
        return result if out is None else out.copy_(result.view(out.shape))

    forward = __call__

    def compute(self, inp: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def example(self) -> torch.Tensor:
        """Return a tensor of zeros that it takes."""
        raise NotImplementedError

    def profile_latency(self, dynamic_symbolic_constraints: dict[str, int] | None = None) -> float:
        """Return the milliseconds of a call on the CPU."""
        example = self.example()
        return milliseconds(lambda: self(example), "cpu")


@dataclass(frozen=True)
class QuantCompressConfig:
    """Codes ``[M, N]`` of ``input_dtype`` to ``storage_dtype``, ``dequantize_bits`` each."""

    M: int
    N: int
    input_dtype: str = "int8"
    storage_dtype: str = "int8"
    dequantize_bits: int = 4


class QuantCompress(Preparation):
    """Pack codes, lowest bits first."""

    def compute(self, inp: torch.Tensor) -> torch.Tensor:
        """Return ``[M, N * bits / bits of the storage]``."""
        config = self.config
        layout = Layout(config.M, config.N, config.dequantize_bits)
        codes = inp.reshape(config.M, config.N).to(torch.uint8) & ((1 << config.dequantize_bits) - 1)
        return layout.store(codes).view(torch_dtype(config.storage_dtype))

    def example(self) -> torch.Tensor:
        return torch.zeros(self.config.M, self.config.N, dtype=torch_dtype(self.config.input_dtype))


@dataclass(frozen=True)
class LOP3PermutateConfig:
    """Packed codes of ``[M, N]``, interleaved for activations of ``datatype``."""

    M: int
    N: int
    datatype: str = "float16"
    storage_dtype: str = "int8"
    dequantize_bits: int = 4


class LOP3Permutate(Preparation):
    """Interleave packed codes in words of 32 bits."""

    def compute(self, inp: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape and type of the input."""
        config = self.config
        fast = config.datatype, ELEMENTS[config.datatype].bits
        plain = Layout(config.M, config.N, config.dequantize_bits)
        stored = Layout(config.M, config.N, config.dequantize_bits, fast)
        octets = inp.contiguous().reshape(config.M, -1).view(torch.int8)
        return stored.store(plain.codes(octets)).view(inp.dtype).view(inp.shape)

    def example(self) -> torch.Tensor:
        dtype = torch_dtype(self.config.storage_dtype)
        width = dtype.itemsize * 8 // self.config.dequantize_bits
        return torch.zeros(self.config.M, self.config.N // width, dtype=dtype)


@dataclass(frozen=True)
class LadderPermutateConfig:
    """A matrix ``[M, N]`` into tiles that tensor cores take as operand ``propagate_kind``.

    ``dequantize_bits`` of -1: elements are values of ``datatype``; else ``storage_dtype`` holds several.
    """

    M: int
    N: int
    datatype: str = "float16"
    dequantize_bits: int = -1
    storage_dtype: str = "float16"
    propagate_kind: str = "B"
    transpose_matrix: bool = False
    transform_kind: int = 2
    target_instruction: str = "nvidia-mma"


class LadderPermutate(Preparation):
    """Lay a matrix out in tiles of 16 rows and 32 bytes of activations."""

    def __init__(
        self, config: LadderPermutateConfig, name: str = "", target: Any = "llvm", **options: Any
    ) -> None:
        super().__init__(config, name, target, **options)
        element, operand = ELEMENTS[config.datatype], (config.propagate_kind, config.transpose_matrix)
        if element.bits not in (8, 16):
            raise DTypeError(f"tiles are of 8-bit and 16-bit types, not of {config.datatype}")
        if element.bits == 8 and operand not in (("A", False), ("B", True)):
            raise DTypeError(f"8-bit operand {config.propagate_kind} is not read transposed by tensor cores")
        storage = torch_dtype(config.storage_dtype).itemsize * 8
        small = 0 < config.dequantize_bits < element.bits
        self.scaled = storage // config.dequantize_bits if small else 1
        self.columns = 256 // element.bits
        self.order = tile_order(self.columns, config.transform_kind, config.transpose_matrix, self.scaled)

    def compute(self, inp: torch.Tensor) -> torch.Tensor:
        """Return ``[M / 16, N / columns, 16, columns / scaled]``."""
        config = self.config
        matrix = inp.reshape(config.M, config.N // self.scaled)
        return into_tiles(matrix, self.columns // self.scaled, self.order.to(inp.device))

    def example(self) -> torch.Tensor:
        dtype = torch_dtype(self.config.storage_dtype)
        return torch.zeros(self.config.M, self.config.N // self.scaled, dtype=dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of a name: BitBLAS's, or ``"uint32"`` and the like."""
    element = ELEMENTS.get(name)
    return element.dtype if element is not None and element.dtype is not None else getattr(torch, name)
