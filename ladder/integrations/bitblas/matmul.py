"""`Matmul`: BitBLAS's operator on Ladder's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ladder.api.lowered import Lowered
from ladder.api.matmul import Matmul as Product
from ladder.integrations.bitblas.config import ACTIVATIONS, ELEMENTS, SIGN, MatmulConfig
from ladder.integrations.bitblas.layouts import Layout
from ladder.integrations.bitblas.timing import milliseconds
from ladder.runtime.compile import target_of
from ladder.runtime.packed import PackedWeight
from tile_types import QuantizedTensor, get_type, register_type
from tile_types.errors import DeviceError, ShapeError
from tile_types.library import NF4_VALUES
from tile_types.packing import pack_codes

EXACT = 1 << 24
"""Integers up to this are float32 numbers: what a kernel's sums of integers must stay below."""


def auto_detect_nvidia_target(gpu_id: int = 0) -> str:
    """Return the name of a GPU's target, such as ``"cuda/sm_90a"``; ``"cuda"`` where there is none."""
    if not torch.cuda.is_available():
        return "cuda"
    return target_of(torch.device("cuda", gpu_id))


@dataclass(frozen=True, eq=False)
class Part:
    """Some columns of a weight, packed.

    product, packed: Their product with as many activations, and the weight as its kernels read it.
    """

    columns: slice
    product: Product
    packed: PackedWeight


class Matmul:
    """BitBLAS's ``Matmul``: ``forward(A, W, scale, zeros, bias)``, where W is what `transform_weight` gave.

    Parameters
    ----------
    config
        The product.
    name
        Kept.
    target
        Device to compile for: a name of Ladder's, or None and ``"cuda"``: where the tensors are.
    enable_tuning
        Kept: a fitted model and shipped measurements choose kernels. `hardware_aware_finetune` measures.
    from_database, backend
        Kept.

    Notes
    -----
    A weight is packed for the kernels when it is first seen, and again when it, its scales or its zeros were
    changed. What was written through ``.data`` in place is not noticed: call `cleanup` after that.
    """

    BITBLAS_TRICK_DTYPE_MAP: ClassVar = {name: (kind.source, kind.bits) for name, kind in ELEMENTS.items()}

    def __init__(
        self,
        config: MatmulConfig,
        name: str = "matmul",
        target: Any = None,
        enable_tuning: bool = True,
        from_database: bool = False,
        backend: str = "tl",
    ) -> None:
        self.config, self.name, self.backend = config, name, backend
        self.target = auto_detect_nvidia_target() if target is None else target
        self.source_format, self.bit = config.weight.source, config.weight.bits
        self.torch_output_dtype = ELEMENTS[config.out_dtype].dtype
        self.stored = _layout(config)
        self._parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        """Return a field of the configuration."""
        if name != "config" and name in MatmulConfig.__dataclass_fields__:
            return getattr(self.config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def dynamic_range(self) -> dict[str, tuple[int, ...]] | None:
        """The rows that the configuration lists, if it lists several."""
        return {"m": self.config.M} if isinstance(self.config.M, tuple) else None

    @property
    def lut(self) -> torch.Tensor | None:
        """The values of ``nf4``, in the activations' type."""
        if self.source_format != "nf":
            return None
        where = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.tensor(NF4_VALUES, dtype=ELEMENTS[self.config.A_dtype].dtype, device=where)

    @property
    def input_transform(self) -> None:
        """None: activations are read as they are."""

    @property
    def weight_transform(self) -> Any:
        """What stores codes that are biased already; None if they are stored as they come."""
        plain = self.bit >= 8 and not self.stored.kind
        return None if plain else self._store

    def retrieve_weight_shape(self) -> list[int]:
        """Return the shape of a stored weight."""
        return self.stored.shape

    def transform_input(self, A: torch.Tensor) -> torch.Tensor:
        """Return the activations as they are."""
        return A

    def transform_weight(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a weight as it is stored.

        Parameters
        ----------
        weight
            ``[N, K]`` (transposed in layout ``"nn"``): values of the activations' type, integers in the
            range of the weights' type, or codes of ``nf4`` and ``fp4_e2m1``.
        scale, zeros, bias
            Taken for compatibility and left as they are, as BitBLAS does.
        """
        weight = weight.contiguous()
        if self.config.is_native and self.bit >= 8:
            return self._store(weight) if self.stored.kind else weight
        if self.source_format.startswith("fp_"):
            weight = weight.view(torch.int8)
        if self.source_format == "int" and self.bit == 1:
            weight = weight > 0
        elif self.source_format == "int" and self.bit < 8 and not self.config.is_native:
            half = 1 << (self.bit - 1)
            weight = weight.clamp(-half, half - 1) + half
        return self._store(weight.to(torch.int8))

    def _store(self, codes: torch.Tensor) -> torch.Tensor:
        if self.bit < 8:
            codes = codes.view(torch.uint8) & ((1 << self.bit) - 1)
        elif self.config.layout[1] == "n":
            codes = codes.t()
        return self.stored.store(codes.contiguous())

    def forward(
        self,
        A: torch.Tensor,
        W: torch.Tensor,
        scale: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply.

        Parameters
        ----------
        A
            ``[..., K]``; ``[K, M]`` in layouts ``"tn"``, ``"tt"``; 4-bit ones int8 ``[..., K / 2]``.
        W
            From `transform_weight`, or stored by BitBLAS.
        scale, zeros, bias
            Those that the configuration has, in this order whatever place they are passed in.
        output
            Where to write.

        Returns
        -------
        ``[..., N]`` of ``out_dtype``.

        Raises
        ------
        ShapeError
            If there are more or fewer operands, or the weight has another size.
        """
        given = [W, *(operand for operand in (scale, zeros, bias) if operand is not None)]
        return self.multiply(A, given, output)

    __call__ = forward

    def multiply(
        self, A: torch.Tensor, operands: list[torch.Tensor], output: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply by W and the operands that the configuration has, in their order."""
        scale, zeros, bias = self._named(operands[1:])
        parts = self._packed(operands[0], scale, zeros, A.device)
        result = self._product(self._activations(A), parts, bias)
        if output is None:
            return result
        return output.copy_(result.view(output.shape))

    def _named(self, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
        config = self.config
        wanted = {"scale": config.with_scaling, "zeros": config.with_zeros, "bias": config.with_bias}
        names = [name for name, has in wanted.items() if has]
        if len(given) != len(names):
            raise ShapeError(f"after A and W come {names or 'no operands'}, got {len(given)} tensors")
        found = dict(zip(names, given, strict=True))
        return [found.get(name) for name in wanted]

    def _activations(self, A: torch.Tensor) -> torch.Tensor:
        if self.config.layout[0] == "t":
            A = A.t()
        bits = ELEMENTS[self.config.A_dtype].bits
        if bits != 4:
            return A.contiguous()
        pairs = torch.stack((A << 4, A), -1).flatten(-2)
        return (
            pairs >> 4
            if self.config.A_dtype == "int4"
            else pairs.view(torch.uint8).__rshift__(4).view(torch.int8)
        )

    def _product(self, x: torch.Tensor, parts: list[Part], bias: torch.Tensor | None) -> torch.Tensor:
        dtype = self.torch_output_dtype
        assert dtype is not None
        if dtype.is_floating_point:
            (part,) = parts
            return part.product(x, part.packed, None if bias is None else bias.to(dtype))
        sums = [
            part.product(x[..., part.columns].contiguous(), part.packed, None).to(torch.int32)
            for part in parts
        ]
        result = sum(sums[1:], start=sums[0])
        return (result if bias is None else result + bias.to(torch.int32)).to(dtype)

    def _packed(
        self, W: torch.Tensor, scale: torch.Tensor | None, zeros: torch.Tensor | None, where: torch.device
    ) -> list[Part]:
        """Return the parts of a weight, packed when it was last seen."""
        if W.device != where:
            raise DeviceError(f"the weight is on {W.device}, the activations are on {where}")
        state = tuple(_state(tensor) for tensor in (W, scale, zeros))
        if None in state:
            return self._pack(W, scale, zeros)
        seen = self._parts.get(W)  # type: ignore[no-untyped-call]
        if seen is None or seen[0] != state:
            seen = state, self._pack(W, scale, zeros)
            self._parts[W] = seen
        return list(seen[1])

    def _pack(self, W: torch.Tensor, scale: torch.Tensor | None, zeros: torch.Tensor | None) -> list[Part]:
        weight = self.quantized(W, scale, zeros)
        step = self._columns_at_once()
        k, parts = weight.shape[1], []
        for first in range(0, k, step):
            columns = slice(first, min(k, first + step))
            piece = weight if step >= k else _columns(weight, columns)
            product = self._operator(piece)
            parts.append(Part(columns, product, product.pack(piece, W.device)))
        return parts

    def _operator(self, weight: QuantizedTensor) -> Product:
        dtype = self.torch_output_dtype
        assert dtype is not None
        is_float = dtype.is_floating_point
        return Product(
            *weight.shape,
            weight.ttype,
            ACTIVATIONS[self.config.A_dtype],
            output=self.config.out_dtype if is_float else "float32",
            group_size=weight.block[1],
            zero="float" if weight.offset is not None else weight.zero_kind,
            bias=self.config.with_bias and is_float,
            token_scale=False,
        )

    def _columns_at_once(self) -> int:
        """Return the columns whose sum of products is exact in float32; all of them if results are floats.

        CPUs without products of bytes add in float32 codes that count from zero, as ``code + 128`` of int8.
        """
        k = self.config.extents[1]
        if self.torch_output_dtype is None or self.torch_output_dtype.is_floating_point:
            return k
        largest = 1 << (ELEMENTS[self.config.A_dtype].bits - 1 + (self.config.A_dtype[0] == "u"))
        return k if self.config.with_scaling else max(64, EXACT // (largest << self.bit) // 64 * 64)

    def quantized(
        self, W: torch.Tensor, scale: torch.Tensor | None = None, zeros: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Return a stored weight with its scales and zeros as Ladder's matrix ``[N, K]``."""
        if self.config.layout[1] == "n" and not self.stored.kind:
            W = W.t().contiguous()
        codes = self.stored.codes(W)
        n, k = self.config.extents
        name, kind = self.config.weight.name, self.config.zeros_mode
        if self.source_format == "int" and 1 < self.bit < 8 and not _is_small(self.config):
            if self.config.with_zeros and kind == "quantized":
                name = f"u{name}"
            else:
                codes = codes ^ (1 << (self.bit - 1))
        element = register_type(SIGN) if name == SIGN.name else get_type(name)
        block = (1, self.config.group)
        if zeros is not None and scale is None:
            scale = torch.ones(n, k // block[1], dtype=ELEMENTS[self.config.A_dtype].dtype, device=W.device)
        fields = _zero_points(self.config, zeros, self.bit)
        stored = pack_codes(_as_codes(codes, element.elem_bits), element.elem_bits)
        scale_type = "none" if scale is None else str(scale.dtype).removeprefix("torch.")
        return QuantizedTensor(
            element,
            (n, k),
            stored,
            block if scale is not None else (1, k),
            scale,
            scale_type=scale_type,
            **fields,
        )

    def _lowered(self) -> Lowered:
        """Return the operator, compiled for the GPU that is here or the CPU."""
        name = auto_detect_nvidia_target()
        return self._example()[1].product.lower("cpu" if name == "cuda" else name)

    def get_source(self, target: Any = None, kenrel_only: bool = False) -> str:
        """Return the kernel's source: CUDA where there is a GPU, else TIR. The arguments are kept."""
        lowered = self._lowered()
        return lowered.source("cuda" if lowered.request.target.is_gpu else "tir")

    @property
    def scheduled_ir_module(self) -> str:
        """The kernel's TIR, as text."""
        return self._lowered().source("tir")

    @property
    def prim_func(self) -> str:
        """The product's tile graph, as text."""
        return self._lowered().source("ir")

    def _example(self, where: str = "cpu") -> tuple[list[torch.Tensor], Part]:
        """Return operands of zeros (A left out) and the first part of their weight."""
        config, (n, k) = self.config, self.config.extents
        dtype = ELEMENTS[config.A_dtype].dtype or torch.int8
        held = torch.int8 if config.weight.dtype is None or not config.is_native else config.weight.dtype
        operands = [torch.zeros(self.retrieve_weight_shape(), dtype=held, device=where)]
        groups = k // config.group
        operands += [torch.ones(n, groups, dtype=dtype, device=where)] * config.with_scaling
        if config.with_zeros and config.zeros_mode == "quantized":
            operands.append(torch.zeros(groups, n * self.bit // 8, dtype=torch.int8, device=where))
        elif config.with_zeros:
            operands.append(torch.zeros(n, groups, dtype=dtype, device=where))
        operands += [torch.zeros(n, dtype=self.torch_output_dtype, device=where)] * config.with_bias
        scale, zeros, _ = self._named(operands[1:])
        return operands, self._pack(operands[0], scale, zeros)[0]

    def profile_latency(self, dynamic_symbolic_constraints: dict[str, int] | None = None) -> float:
        """Return the milliseconds of a call on the GPU that is here, or the CPU.

        Parameters
        ----------
        dynamic_symbolic_constraints
            ``{"m": rows}``; by default the most rows that the configuration names.
        """
        rows = self.config.M
        largest = rows if isinstance(rows, int) else max(rows or (1,))
        m = (dynamic_symbolic_constraints or {}).get("m", largest)
        where = "cuda" if torch.cuda.is_available() else "cpu"
        operands, _ = self._example(where)
        element, k = ELEMENTS[self.config.A_dtype], self.config.extents[1]
        shape = (m, k // 2 if element.bits == 4 else k)
        shape = shape[::-1] if self.config.layout[0] == "t" else shape
        A = torch.zeros(shape, dtype=element.dtype or torch.int8, device=where)
        return milliseconds(lambda: self.forward(A, *operands), where)

    def hardware_aware_finetune(self, topk: int = 20, parallel_build: bool = True) -> None:
        """Measure ``topk`` kernels per class of rows on the GPU that is here, and remember the fastest.

        Without a GPU nothing is measured: CPUs need no tuning.
        """
        if torch.cuda.is_available():
            from ladder.integrations.bitblas.timing import finetune

            _, part = self._example()
            rows = self.config.M
            finetune(part.product, [rows] if isinstance(rows, int) else list(rows or ()), topk)
            self.cleanup()

    def cleanup(self) -> None:
        """Forget all packed weights."""
        self._parts.clear()


def _is_small(config: MatmulConfig) -> bool:
    """Tell 4-bit activations: codes of integers beside them are two's complement."""
    return config.A_dtype in ("int4", "uint4")


def _layout(config: MatmulConfig) -> Layout:
    n, k = config.extents
    fast = (config.A_dtype, ELEMENTS[config.A_dtype].bits) if config.fast_decoding else None
    columns = config.tile_columns // config.unit
    return Layout(n, k, config.weight.bits, fast, int(config.propagate_b or 0), columns, config.unit)


def _as_codes(values: torch.Tensor, bits: int) -> torch.Tensor:
    return values.contiguous().view(
        {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}.get(bits, torch.uint8)
    )


def _zero_points(config: MatmulConfig, zeros: torch.Tensor | None, bits: int) -> dict[str, Any]:
    """Return the fields of a matrix that zeros are."""
    if zeros is None:
        return {}
    if config.zeros_mode == "rescale":
        return {"offset": -zeros}
    if config.zeros_mode == "original":
        return {"zero": zeros, "zero_kind": "float"}
    n, k = config.extents
    layout = Layout(k // config.group, n, bits)
    return {"zero": layout.codes(zeros).t().contiguous(), "zero_kind": "integer"}


def _columns(weight: QuantizedTensor, columns: slice) -> QuantizedTensor:
    """Return some columns of a matrix without scales of groups."""
    codes = weight.codes()[:, columns]
    return QuantizedTensor.from_codes(codes, weight.ttype, (1, codes.shape[1]))


def _state(tensor: torch.Tensor | None) -> Any:
    """Return what changes when a tensor is written; None if that cannot be told."""
    if tensor is None:
        return ()
    return None if tensor.is_inference() else (id(tensor), tensor.data_ptr(), tensor._version)
