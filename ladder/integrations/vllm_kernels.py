"""vLLM: a kernel for the integer weights that vLLM's own methods load (GPTQ, AWQ, compressed-tensors)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum

from ladder.api.linear import Linear
from ladder.formats.bits import flipped, octets_of, words_to_codes
from ladder.integrations.engine_layers import build_ahead
from tile_types import QuantizedTensor, get_type

TYPES = {"uint4b8": "int4", "uint8b128": "int8", "uint4": "uint4", "uint8": "uint8"}
"""Type of vLLM -> type here; a bias of half the range makes two's complement."""

PLATFORMS = (PlatformEnum.CUDA, PlatformEnum.CPU)


class LadderMPLinearKernel(MPLinearKernel):  # type: ignore[misc]
    """Ladder's product of 16-bit activations and integers of 4 or 8 bits, in groups or per output."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Tell whether a layer can be served, and why not."""
        if str(c.weight_type) not in TYPES:
            return False, f"Ladder serves {', '.join(TYPES)}, not {c.weight_type}"
        if c.act_type not in (torch.float16, torch.bfloat16):
            return False, f"Ladder serves 16-bit activations, not {c.act_type}"
        k = c.partition_weight_shape[0]
        if c.group_size > 0 and k % c.group_size:
            return False, f"{k} inputs per rank end within a group of {c.group_size}"
        if c.zero_points == (str(c.weight_type) in ("uint4b8", "uint8b128")):
            return False, "weights have either a bias or zero points"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack what vLLM loaded: codes ``[K, N]`` packed along K, scales ``[G, N]``, zeros packed along N."""
        words = self._laid(layer, self.w_q_name, packed_dim=0)
        scales = self._laid(layer, self.w_s_name)
        zeros = self._laid(layer, self.w_zp_name, packed_dim=1) if self.config.zero_points else None
        where = words.device
        product = Linear.from_quantized(
            self._matrix(words.cpu(), scales, zeros),
            None,
            dtype=self.config.act_type,
            device=where,
            keep_canonical=False,
        )
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name):
            if name is not None and hasattr(layer, name):
                delattr(layer, name)
        layer.product = build_ahead(product, where)

    def _laid(self, layer: torch.nn.Module, name: str | None, **packed: int) -> torch.Tensor:
        parameter = getattr(layer, name or "")
        return permute_param_layout_(parameter, input_dim=0, output_dim=1, **packed).data  # type: ignore[no-any-return]

    def _matrix(
        self, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> QuantizedTensor:
        k, n = self.config.partition_weight_shape
        element = get_type(TYPES[str(self.config.weight_type)])
        stored = octets_of(words.t().contiguous())
        signed = zeros is None
        points = None if zeros is None else words_to_codes(zeros.cpu(), element.elem_bits, n).t().contiguous()
        return QuantizedTensor(
            element,
            (n, k),
            flipped(stored, element.elem_bits) if signed else stored,
            (1, k if self.config.group_size <= 0 else self.config.group_size),
            scales.t().contiguous().cpu(),
            zero=points,
            zero_kind="none" if signed else "integer",
            scale_type=str(scales.dtype).removeprefix("torch."),
        )

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[..., N]``."""
        y: torch.Tensor = layer.product(x)  # type: ignore[operator]
        return y if bias is None else y + bias


def offer() -> None:
    """Put the kernel before vLLM's own on each platform; ``VLLM_DISABLED_KERNELS`` takes it away again."""
    possible: dict[Any, list[type]] = linear._POSSIBLE_KERNELS
    for platform in PLATFORMS:
        if LadderMPLinearKernel not in possible.get(platform, ()):
            linear.register_linear_kernel(LadderMPLinearKernel, platform, "mp")
            possible[platform].insert(0, possible[platform].pop())
