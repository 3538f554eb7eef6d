"""What torch itself offers: cuBLAS, cuBLASLt fp8, integer cuBLAS and tinygemm."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.engine import Engine, Operand, Work

FP8_LIMIT = 448.0
INT8_LIMIT = 127.0
TINY = 1e-12


def rows_to_eight_bits(values: Any, kind: torch.dtype) -> tuple[Any, Any]:
    """Quantize each row by its largest magnitude; return codes and scales float32 ``[rows, 1]``."""
    limit = INT8_LIMIT if kind == torch.int8 else FP8_LIMIT
    wide = values.float()
    scale = (wide.abs().amax(1, keepdim=True) / limit).clamp_min(TINY)
    units = (wide / scale).clamp(-limit, limit)
    return (units.round() if kind == torch.int8 else units).to(kind).contiguous(), scale.contiguous()


class DenseOperand(Operand):
    """A dense matrix in 16 bits."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def dense(self) -> Any:
        return self.weight.double()

    def __call__(self, *given: Any) -> Any:
        return torch.matmul(given[0], self.weight.t())


class Dense(Engine):
    """cuBLAS on dense 16-bit weights."""

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        return DenseOperand(weight.to(getattr(torch, work.activation)).contiguous())


class ScaledOperand(Operand):
    """fp8 codes as `torch._scaled_mm` takes them, with one scale per row or one for all."""

    def __init__(self, weight: Any, by_row: bool) -> None:
        self.by_row = by_row
        self.codes, scale = self._codes(weight)
        self.scale = scale.t().contiguous()
        self.nbytes = self.codes.nbytes + self.scale.nbytes

    def _codes(self, values: Any) -> tuple[Any, Any]:
        """Quantize; scales are ``[rows, 1]``, or ``[1, 1]`` for all rows."""
        shape = values.shape if self.by_row else (1, -1)
        codes, scale = rows_to_eight_bits(values.reshape(shape), torch.float8_e4m3fn)
        return codes.reshape(values.shape), scale

    def dense(self) -> Any:
        return self.codes.double() * self.scale.double().t()

    def given(self, x: Any) -> tuple[Any, ...]:
        return self._codes(x)

    def seen(self, *given: Any) -> Any:
        return given[0].double() * given[1].double()

    def __call__(self, *given: Any) -> Any:
        codes, scale = given
        return torch._scaled_mm(
            codes,
            self.codes.t(),
            scale_a=scale,
            scale_b=self.scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


class ScaledMatmul(Engine):
    """cuBLASLt fp8; with scales per row torch gives bfloat16 only, so both do."""

    def __init__(self, by_row: bool = True) -> None:
        self.by_row = by_row

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        return ScaledOperand(weight, self.by_row)


class TensorScaledMatmul(ScaledMatmul):
    """cuBLASLt fp8 with one scale for the whole weight and one for all activations: less work."""

    def __init__(self) -> None:
        super().__init__(by_row=False)


class IntegerOperand(Operand):
    """int8 codes; the result stays int32 unless ``scaled``, as the bare function gives it."""

    def __init__(self, weight: Any) -> None:
        self.codes, self.scale = rows_to_eight_bits(weight, torch.int8)
        self.nbytes = self.codes.nbytes

    def dense(self) -> Any:
        return self.codes.double()

    def given(self, x: Any) -> tuple[Any, ...]:
        return (rows_to_eight_bits(x, torch.int8)[0],)

    def __call__(self, *given: Any) -> Any:
        return torch._int_mm(given[0], self.codes.t())


class IntegerMatmul(Engine):
    """`torch._int_mm`: int32 sums, without the scaling that a user still needs."""

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        return "" if m > 16 else "torch._int_mm needs M > 16"

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        return IntegerOperand(weight)


class TinygemmOperand(Operand):
    """Ladder's int4 codes as `torch._weight_int4pack_mm` takes them: offset by 8, even K in the high half."""

    INNER_TILES = 8

    def __init__(self, held: Any) -> None:
        codes = torch.as_tensor(held.codes()).to(torch.uint8) ^ 8
        packed = ((codes[:, ::2] << 4) | codes[:, 1::2]).contiguous()
        scale = torch.as_tensor(held.scale).to(torch.bfloat16)
        self.group_size = held.group_size
        self.words = torch.ops.aten._convert_weight_to_int4pack(packed, self.INNER_TILES)
        self.scales = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
        self.nbytes = self.words.nbytes + self.scales.nbytes
        self.held = held

    def dense(self) -> Any:
        return self.held.dequantize("float64")

    def clone(self) -> Operand:
        twin = object.__new__(TinygemmOperand)
        twin.__dict__.update(self.__dict__)
        twin.words, twin.scales = self.words.clone(), self.scales.clone()
        return twin

    def __call__(self, *given: Any) -> Any:
        return torch.ops.aten._weight_int4pack_mm(given[0], self.words, self.group_size, self.scales)


class Tinygemm(Engine):
    """torch's int4 kernel, which torchao calls too: bfloat16 activations only."""

    LARGEST_M = 64

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        if m > self.LARGEST_M:
            return f"not run above M = {self.LARGEST_M}, where it was more than ten times slower than cuBLAS"
        return ""

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        return TinygemmOperand(work.quantized(weight))
