"""`Linear`: BitBLAS's layer."""

from __future__ import annotations

from typing import Any

import torch

from ladder.formats.bits import words_to_codes
from ladder.integrations.bitblas.cache import global_operator_cache
from ladder.integrations.bitblas.config import ELEMENTS, MatmulConfig
from ladder.integrations.bitblas.layouts import Layout
from ladder.integrations.bitblas.matmul import Matmul
from tile_types.errors import LadderError, ShapeError

DIVISOR = 16
"""What BitBLAS's layers' extents are multiples of."""


class Linear(torch.nn.Module):
    """BitBLAS's ``Linear``, its buffers ``weight``, or ``qweight``, ``scales`` and ``zeros``, and ``bias``.

    Parameters
    ----------
    in_features, out_features
        K and N: multiples of 16.
    bias
        Whether there is a bias.
    A_dtype, W_dtype, accum_dtype, out_dtype, group_size, with_scaling, with_zeros, zeros_mode
        See `MatmulConfig`.
    fast_decoding, propagate_b
        Likewise: how the weight is stored.
    opt_M
        Its M.
    enable_tuning
        See `Matmul`.
    """

    opt_M = (16, 32, 64, 128, 256, 512)
    STORAGE_DTYPE = "int8"
    TORCH_STORAGE_DTYPE = torch.int8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        A_dtype: str = "float16",
        W_dtype: str = "float16",
        accum_dtype: str = "float16",
        out_dtype: str = "float16",
        group_size: int = -1,
        with_scaling: bool | None = None,
        with_zeros: bool = False,
        zeros_mode: Any = None,
        opt_M: Any = opt_M,
        enable_tuning: bool = True,
        fast_decoding: bool | None = None,
        propagate_b: Any = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group_size = in_features if group_size in (-1, None) else group_size
        if in_features % DIVISOR or out_features % DIVISOR or in_features % self.group_size:
            raise ShapeError(
                f"extents must be multiples of {DIVISOR} and in_features one of the group size,"
                f" got {in_features}, {out_features} and {self.group_size}"
            )
        config = MatmulConfig(
            M=opt_M,
            N=out_features,
            K=in_features,
            A_dtype=A_dtype,
            W_dtype=W_dtype,
            accum_dtype=accum_dtype,
            out_dtype=out_dtype,
            with_bias=bias,
            group_size=self.group_size,
            with_scaling=bool(with_scaling),
            with_zeros=with_zeros,
            zeros_mode=zeros_mode,
            fast_decoding=fast_decoding,
            propagate_b=propagate_b,
        )
        self.bitblas_matmul = global_operator_cache.get(config) or Matmul(config, enable_tuning=enable_tuning)
        self.bits, self.source_format = self.bitblas_matmul.bit, self.bitblas_matmul.source_format
        self.torch_dtype = ELEMENTS[A_dtype].dtype
        self.consistent = A_dtype == W_dtype
        self._register(bias)

    @property
    def config(self) -> MatmulConfig:
        """The product."""
        return self.bitblas_matmul.config

    def _register(self, bias: bool) -> None:
        stored, groups = self.bitblas_matmul.retrieve_weight_shape(), self.in_features // self.group_size
        if self.consistent:
            self.register_buffer("weight", torch.zeros(stored, dtype=self.torch_dtype or torch.int8))
        else:
            self.register_buffer("qweight", torch.zeros(stored, dtype=torch.int8))
            shape, dtype = (self.out_features, groups), self.torch_dtype
            self.register_buffer("scales", torch.zeros(shape, dtype=dtype))
            if self.config.zeros_mode == "quantized":
                shape, dtype = (groups, self.out_features * self.bits // 8), torch.int8
            self.register_buffer("zeros", torch.zeros(shape, dtype=dtype))
        self.register_buffer("bias", torch.zeros(self.out_features, dtype=self.torch_dtype) if bias else None)

    def forward(self, A: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``A[..., in_features]``."""
        config = self.config
        names = ["weight" if self.consistent else "qweight"]
        names += (
            ["scales"] * config.with_scaling + ["zeros"] * config.with_zeros + ["bias"] * config.with_bias
        )
        return self.bitblas_matmul.multiply(A, [getattr(self, name) for name in names], output)

    def warmup(self, topk: int = 20) -> None:
        """Measure kernels; see `Matmul.hardware_aware_finetune`."""
        self.bitblas_matmul.hardware_aware_finetune(topk=topk)

    def load_and_transform_weight(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Take a weight that is not stored yet (see `Matmul.transform_weight`), and what goes with it."""
        if self.consistent and (scales is not None or zeros is not None):
            raise LadderError(f"{self.config.W_dtype} weights have no scales and no zeros")
        given = {"scales": scales, "zeros": zeros, "bias": bias}
        given["weight" if self.consistent else "qweight"] = self.bitblas_matmul.transform_weight(weight)
        self._take(**{name: tensor for name, tensor in given.items() if tensor is not None})

    def repack_from_gptq(self, gptq_module: Any, device: Any = None) -> None:
        """Take the weight of AutoGPTQ's layer, whose zero points are stored less one."""
        self._repack(gptq_module, 1, device)

    def repack_from_gptq_v2(self, gptq_module: Any, device: Any = None) -> None:
        """Take the weight of GPTQModel's layer in its own format, "gptq_v2"."""
        self._repack(gptq_module, 0, device)

    def _repack(self, source: Any, less: int, device: Any) -> None:
        """Take a layer's ``qweight``, ``qzeros``, ``scales`` and ``bias``, to a device or where ours are.

        Raises
        ------
        LadderError
            If its columns are in an order of their own (``desc_act``): BitBLAS's layers have none.
        """
        k, n = self.in_features, self.out_features
        index, plain = getattr(source, "g_idx", None), torch.arange(k) // self.group_size
        if index is not None and index.numel() == k and not torch.equal(index.cpu().long(), plain):
            raise LadderError("g_idx orders columns (desc_act), BitBLAS's layers cannot: use ladder.Linear")
        codes = words_to_codes(source.qweight.cpu().t().contiguous(), self.bits, k)
        points = (words_to_codes(source.qzeros.cpu(), self.bits, n) + less) & ((1 << self.bits) - 1)
        fields = {
            "qweight": self.bitblas_matmul._store(codes.view(torch.int8)),
            "scales": source.scales.t().contiguous().to(self.torch_dtype),
        }
        if self.config.with_zeros:
            fields["zeros"] = self._zeros_of(points, fields["scales"].cpu())
        if self.bias is not None:
            fields["bias"] = source.bias.data.to(self.torch_dtype)
        self._take(device, **fields)

    def _zeros_of(self, points: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return zero points ``[G, N]`` as the zeros mode has them."""
        if self.config.zeros_mode == "quantized":
            return Layout(len(points), self.out_features, self.bits).store(points)
        real = points.t().contiguous().to(scales.dtype)
        return real if self.config.zeros_mode == "original" else real * scales

    def _take(self, device: Any = None, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            where = getattr(self, name).device if device is None else device
            if isinstance(getattr(self, name), torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            setattr(self, name, tensor.to(where))
