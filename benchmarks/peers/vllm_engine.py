"""vLLM's own kernels for int4 weights on Hopper GPUs: Machete, Marlin and CUTLASS W4A8.

They are called through ``torch.ops._C``, so nothing else of vLLM is imported. The library that registers
them is that of an installed ``vllm``, or the file that the environment variable ``VLLM_KERNELS`` names: the
kernels use torch's stable ABI and run with other versions of torch than the one that vLLM pins.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.peers.engine import Engine, Operand, Work
from benchmarks.peers.torch_engine import FP8_LIMIT

LIBRARY = "VLLM_KERNELS"
PLAIN_INT4 = 4 << 8 | 1 << 50
"""vLLM's number of the type of unsigned 4-bit codes."""

BIASED_INT4 = PLAIN_INT4 | 8 << 17
"""vLLM's number of the type of unsigned 4-bit codes that stand for themselves less 8."""

GROUP = 128
"""The group size that all three kernels take."""

INT4_SPAN = 8.0
"""The largest magnitude of an int4 code: codes times scales must stay in fp8."""


@cache
def library() -> Path | None:
    """Return the file that registers vLLM's operators, or None."""
    if named := os.environ.get(LIBRARY):
        return Path(named)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("_C_stable_libtorch*.so"), None)


@cache
def operators() -> Any:
    """Load vLLM's operators and return their namespace."""
    namespaces: Any = torch.ops
    namespaces.load_library(str(library()))
    return namespaces._C


def packed(codes: Any) -> Any:
    """Pack 4-bit codes ``[n, k]`` eight to an int32 along k, the first in the low bits, ``[n, k / 8]``."""
    places = torch.arange(0, 32, 4, device=codes.device)
    words = (codes.reshape(codes.shape[0], -1, 8).to(torch.int64) << places).sum(-1)
    return (words & 0xFFFFFFFF).to(torch.int32)


class VllmOperand(Operand):
    """A packed weight: ``tensors`` are what the kernel reads, `dense` what they stand for."""

    def __init__(self, values: Any, *tensors: Any) -> None:
        self.values, self.tensors = values, tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    def dense(self) -> Any:
        return self.values.double()

    def clone(self) -> Operand:
        twin = copy.copy(self)
        twin.tensors = tuple(tensor.clone() for tensor in self.tensors)
        return twin


class Vllm(Engine):
    """What the three kernels have in common; none of them tunes or compiles."""

    distribution: ClassVar[str] = "vllm"
    module: ClassVar[str] = "vllm"
    zeros: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Further weights and their zero points."""

    def absence(self) -> str:
        return "" if library() else f"not installed: vllm, and {LIBRARY} names no library"

    def version(self) -> str:
        return importlib.metadata.version("vllm") if LIBRARY not in os.environ else os.environ[LIBRARY]

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        if (work.weight, work.zero) not in (("int4", ""), *self.zeros) or work.group_size != GROUP:
            return f"taken for int4 in groups of {GROUP} only"
        return f"K = {k} is no multiple of {GROUP}" if k % GROUP else ""


def biased(held: Any) -> Any:
    """Return int4 codes plus 8, uint8 ``[n, k]`` on the GPU."""
    return torch.as_tensor(held.codes()).cuda().to(torch.uint8) ^ 8


def plain(held: Any) -> Any:
    """Return uint4 codes, uint8 ``[n, k]`` on the GPU."""
    return torch.as_tensor(held.codes()).cuda().to(torch.uint8)


def spread(codes: Any, scales: Any, offsets: Any) -> Any:
    """Return ``codes * scale + offset`` of groups, float64 ``[n, k]``."""
    groups = codes.double().reshape(codes.shape[0], -1, GROUP)
    return (groups * scales.double().unsqueeze(-1) + offsets.double().unsqueeze(-1)).reshape(codes.shape)


def scales_of(held: Any, dtype: torch.dtype) -> Any:
    """Return the scales of groups ``[n, k / group]`` on the GPU."""
    return torch.as_tensor(held.scale).cuda().to(dtype)


def zeros_of(held: Any) -> Any:
    """Return integer zero points of groups ``[n, k / group]`` on the GPU, int32."""
    return torch.as_tensor(held.zero).cuda().to(torch.int32)


class MacheteOperand(VllmOperand):
    """Words in Machete's order, scales ``[groups, n]`` and perhaps zero points times scales."""

    def __call__(self, *given: Any) -> Any:
        words, scales, *zeros = self.tensors
        kind = PLAIN_INT4 if zeros else BIASED_INT4
        last = zeros[0] if zeros else None
        return operators().machete_mm(given[0], words, kind, None, scales, last, GROUP, None, None, None)


class Machete(Vllm):
    """vLLM's default for 16-bit activations on Hopper."""

    zeros = (("uint4", "integer"),)

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        held, dtype = work.quantized(weight), getattr(torch, work.activation)
        scales = scales_of(held, dtype)
        if work.zero:
            codes, offsets = plain(held), -scales * zeros_of(held).to(dtype)
            words = operators().machete_prepack_B(packed(codes).t(), dtype, PLAIN_INT4, dtype)
            values = spread(codes, scales, offsets)
            return MacheteOperand(values, words, scales.t().contiguous(), offsets.t().contiguous())
        words = operators().machete_prepack_B(packed(biased(held)).t(), dtype, BIASED_INT4, dtype)
        return MacheteOperand(held.dequantize("float64"), words, scales.t().contiguous())


class MarlinOperand(VllmOperand):
    """Words and scales in the order of Marlin's threads, and the locks of its blocks."""

    def __call__(self, *given: Any) -> Any:
        words, scales, locks = self.tensors
        x, n, k = given[0], scales.shape[1], scales.shape[0] * GROUP
        operands = (x, None, words, None, scales, None, None, None, locks, BIASED_INT4)
        return operators().marlin_gemm(*operands, x.shape[0], n, k, False, True, False)


class Marlin(Vllm):
    """The kernel for all GPUs since Ampere; sums in float32, as vLLM runs it."""

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        held = work.quantized(weight)
        n, k = weight.shape
        words = packed(biased(held)).t().contiguous()
        words = operators().gptq_marlin_repack(words, k, n, 4, False)
        scales = scales_of(held, getattr(torch, work.activation)).t()
        scales = scales.reshape(-1, 8, 8).transpose(1, 2).reshape(-1, n).contiguous()
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        locks = torch.zeros(4 * processors, dtype=torch.int32, device="cuda")
        return MarlinOperand(held.dequantize("float64"), words, scales, locks)


class CutlassOperand(VllmOperand):
    """Reordered int4 words, fp8 scales of groups and float32 scales of rows."""

    def __init__(self, values: Any, *tensors: Any, dynamic: bool) -> None:
        super().__init__(values, *tensors)
        self.dynamic = dynamic

    def given(self, x: Any) -> tuple[Any, ...]:
        return (x,) if self.dynamic else quantized_rows(x)

    def seen(self, *given: Any) -> Any:
        codes, scale = quantized_rows(given[0]) if self.dynamic else given
        return codes.double() * scale.double().unsqueeze(-1)

    def __call__(self, *given: Any) -> Any:
        codes, scale = quantized_rows(given[0]) if self.dynamic else given
        words, groups, rows = self.tensors
        return operators().cutlass_w4a8_mm(codes, words, groups, GROUP, rows, scale, None, None)


def quantized_rows(x: Any) -> tuple[Any, Any]:
    """Quantize activations ``[m, k]`` to fp8 by vLLM's kernel; return codes and scales ``[m]``."""
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    operators().dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)
    return codes, scale.reshape(-1)


class Cutlass(Vllm):
    """int4 by fp8 activations; scales of groups are rounded to fp8 within those of rows."""

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        return super().refusal(work, n, k, m) or (
            "" if work.activation == "fp8_e4m3" else "taken for fp8 activations only"
        )

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        held = work.quantized(weight)
        n, k = weight.shape
        codes, scales = biased(held), scales_of(held, torch.float32)
        rows = scales.amax(1, keepdim=True) / FP8_LIMIT * INT4_SPAN
        groups = (scales / rows).to(torch.float8_e4m3fn)
        words = operators().cutlass_encode_and_reorder_int4b(packed(codes ^ 8).t())
        products = (codes.float() - INT4_SPAN).reshape(n, -1, GROUP) * groups.float().unsqueeze(-1)
        values = products.to(torch.float8_e4m3fn).double().reshape(n, k) * rows.double()
        packed_groups = operators().cutlass_pack_scale_fp8(groups.t().contiguous())
        return CutlassOperand(
            values, words, packed_groups, rows.reshape(-1).contiguous(), dynamic=work.dynamic
        )
