"""`Matmul`: one quantized matrix product, for any number of rows, on any device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ladder.api.lowered import Lowered
from ladder.api.problem import gemm_for
from ladder.api.scaled import ScaledMatmul, is_scaled
from ladder.ir.gemm import Gemm
from ladder.runtime import artifact, operator
from ladder.runtime.compile import Request, compiled, family_of, target_of, usable_device
from ladder.runtime.kernel import Call, CompiledGemm
from ladder.runtime.packed import (
    GPU,
    PackedWeight,
    check_packed,
    layout_of,
    own_order,
    pack,
    refuse_layout,
)
from ladder.runtime.tokens import EIGHT_BIT
from schedules.schedule import Plan
from targets import TileDevice, get_device
from tile_types import QuantizedTensor, TType
from tile_types.arrays import is_torch
from tile_types.errors import DeviceError
from tile_types.quantized import check_quantized


@dataclass(frozen=True)
class Facts:
    """Facts of a request that every call needs, known before: code that torch traces computes none of them.

    text: As `Request.text`.
    is_dynamic: Whether floats are quantized when it is called.
    layouts: Family of devices -> layout of the packed weight.
    """

    text: str
    is_dynamic: bool
    layouts: dict[str, str]

    @staticmethod
    def of(request: Request) -> Facts:
        gemm = request.gemm
        layouts = {"cpu": layout_of(gemm, "cpu"), GPU: layout_of(gemm, GPU, own_order(gemm, request.target))}
        return Facts(request.text, gemm.token_scale and gemm.activation in EIGHT_BIT, layouts)


class Matmul:
    """``y[..., N] = epilogue(x[..., K] · decode(weight[N, K])ᵀ + bias[N])``.

    Building one compiles nothing. A call compiles or loads the kernel that serves its M, and on a GPU has the
    others compiled in another process; `export` and ``lower(target).kernels`` compile those of every M.

    Parameters
    ----------
    N, K
        Outputs and inputs: the extents of the weight matrix.
    weight
        Type of the weights, or its name.
    activation
        ``"float16"``, ``"bfloat16"``, ``"float32"`` (CPUs), ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``;
        a block type (``"mxfp4"``, ``"nvfp4"``, ``"mxfp8_e4m3"``) makes a `ladder.api.scaled.ScaledMatmul`.
    output
        Result type: by default the activation's, float32 for int8 and float16 for fp8.
    group_size
        Elements along K that share a scale; None or -1: one scale per row, or the type's own blocks.
    zero
        Zero points: ``"none"``, ``"integer"`` or ``"float"`` (HQQ). They are subtracted from sums of x, so
        an infinity in a row makes NaN of its results.
    bias
        Whether calls pass a bias.
    epilogue
        Names of unary operators applied last, e.g. ``("silu",)``.
    token_scale
        Whether rows of x carry a float32 scale; by default those of 8-bit activations do.
    token_group
        Elements along K, a multiple of 64, that share a scale of a row of x; None: all of the row.
        With blocks of the weight (``ladder.quantize(..., block=(128, 128))``) this is the block
        scaling of fp8 checkpoints.
    target
        Device, e.g. ``"cuda/sm_90a"``; by default the one that x is on.
    plan
        Schedules to use instead of the policy's.
    batch_invariant
        Whether a row of x gives the same bits for every number of rows and wherever it stands among them; the
        policy then chooses only among kernels that add in one order.

    Raises
    ------
    LadderError
        A subclass says what cannot be: an unknown type, a conversion that loses values, a group size.

    Examples
    --------
    >>> w4 = ladder.quantize(weight, "int4", group_size=128)
    >>> op = ladder.Matmul(N=4096, K=4096, weight="int4", group_size=128)
    >>> y = op(x, op.pack(w4))
    """

    if not TYPE_CHECKING:  # a checker takes what is made for a `Matmul`

        def __new__(cls, *given: Any, **options: Any) -> Any:
            """Make the operator, or the one of products that cores scale themselves."""
            activation = options.get("activation", given[3] if len(given) > 3 else "")
            return ScaledMatmul(*given, **options) if is_scaled(activation) else super().__new__(cls)

    def __init__(
        self,
        N: int,
        K: int,
        weight: str | TType,
        activation: str = "float16",
        *,
        output: str | None = None,
        group_size: int | None = None,
        zero: str | None = None,
        bias: bool = False,
        epilogue: Sequence[str] = (),
        token_scale: bool | None = None,
        token_group: int | None = None,
        target: str | TileDevice | None = None,
        plan: Plan | None = None,
        batch_invariant: bool = False,
    ) -> None:
        gemm = gemm_for(
            N,
            K,
            weight,
            activation,
            output=output,
            group_size=group_size,
            zero=zero,
            bias=bias,
            epilogue=epilogue,
            token_scale=token_scale,
            token_group=token_group,
            batch_invariant=batch_invariant,
        )
        self.request = Request(gemm, "" if target is None else get_device(target).name, plan)
        self._facts = Facts.of(self.request)

    __signature__ = Signature([*signature(__init__).parameters.values()][1:])
    """What ``help`` shows: `__new__` takes any arguments."""

    @property
    def gemm(self) -> Gemm:
        """The problem's normal form."""
        return self.request.gemm

    @classmethod
    def from_request(cls, request: Request) -> Matmul:
        """Return the operator of a normal form, e.g. of a compiled expression."""
        operator = cls.__new__(cls)
        operator.request, operator._facts = request, Facts.of(request)
        return operator

    def layout(self, family: str) -> str:
        """Return what a packed weight must be for devices of a family (``"cpu"``, ``"cuda"``)."""
        return self._facts.layouts.get(family, "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by description; loaded kernels stay behind."""
        return _restore, (self._facts.text,)

    def __repr__(self) -> str:
        """Return the problem and the target."""
        return f"Matmul({self.gemm}, target={self.request.device or None!r})"

    def pack(self, weight: QuantizedTensor, device: torch.device | str | None = None) -> PackedWeight:
        """Bring a quantized matrix into the layout that the kernels stream.

        Parameters
        ----------
        weight
            What `ladder.quantize` returned.
        device
            torch device of the result; by default where ``weight`` is, or the GPU of a GPU target.

        Raises
        ------
        ShapeError
            If its extents, type, group size or zero points are not this operator's.
        DTypeError
            If it is not quantized.
        """
        check_quantized(weight)
        where = None if device is None else usable_device(device)
        if where is None and is_torch(weight.storage):
            where = weight.storage.device
        target = get_device(self.request.device or target_of(where or torch.device("cpu")))
        held = torch.device("cpu") if where is None else where
        packed = pack(self.gemm, target, weight.to(held))
        if held.type == "cpu" and family_of(target) == "cuda" and torch.cuda.is_available():
            return packed.to("cuda")
        return packed

    def __call__(
        self,
        x: torch.Tensor,
        packed: PackedWeight,
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply.

        Parameters
        ----------
        x
            ``[..., K]`` of the activation type. For 8-bit activations a 16- or 32-bit float x is
            quantized here, with one scale per row.
        packed
            The weight, from `pack`.
        bias
            ``[N]`` of the output type.
        token_scale
            float32 ``[...]``, or ``[..., groups]`` with ``token_group``: scales of an 8-bit x; 1 if left out.

        Returns
        -------
        ``[..., N]`` of the output type, on the device of x.

        Raises
        ------
        DTypeError, DeviceError, ShapeError
            If an argument does not fit.
        """
        if self._facts.is_dynamic and token_scale is None:
            x, token_scale = operator.with_token_scale(x, self.gemm)
        # The common case of `is_watched`, in place: a call of it takes a quarter of a microsecond.
        watched = type(x) is not Tensor or x.requires_grad or is_in_torch_dispatch_mode() or is_compiling()
        watched = watched or operator.is_transformed() or operator.is_recorded()
        watched = watched or operator.is_differentiated_forward()
        try:
            learns = (bias is not None and bias.requires_grad) or (
                token_scale is not None and token_scale.requires_grad
            )
            if (learns and torch.is_grad_enabled()) or (watched and operator.is_watched(x)):
                self._check_layout(x.device, packed)
                return operator.dispatch(x, packed.buffers, bias, token_scale, self._facts.text)
            call = packed.calls.get(self) or self._bind(x.device, packed)
        except AttributeError:
            check_packed(packed)
            operator.require_vectors(bias, token_scale)
            raise
        return call(x, bias, token_scale)

    def _check_layout(self, where: torch.device, packed: PackedWeight) -> None:
        """Raise unless the weight was packed for this operator."""
        check_packed(packed)
        expected = self._facts.layouts.get(where.type, packed.layout)
        if packed.layout != expected:
            refuse_layout(packed.layout, expected)

    def _bind(self, where: torch.device, packed: PackedWeight) -> Call:
        """Return the kernels' call for a weight; the weight remembers it."""
        if packed.layout not in self._facts.layouts.values():
            self._check_layout(where, packed)
        call = self.compiled_for(where).bind(packed)
        if where == packed.device:  # otherwise the call is about to say so
            packed.calls[self] = call
        return call

    def apply(
        self,
        x: torch.Tensor,
        weight: list[torch.Tensor],
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply by the bare tensors of a packed weight, through the registered operator."""
        if self._facts.is_dynamic and token_scale is None:
            x, token_scale = operator.with_token_scale(x, self.gemm)
        return operator.dispatch(x, weight, bias, token_scale, self._facts.text)

    def compiled_for(self, where: torch.device) -> CompiledGemm:
        """Return the loaded kernels for a torch device, building them on first use."""
        return compiled(self._facts.text, where)

    def lower(self, target: str | TileDevice | None = None) -> Lowered:
        """Return every stage of the compilation for a target; see `Lowered.source`."""
        return Lowered(self._aimed(target))

    def explain(self, target: str | TileDevice | None = None) -> str:
        """Return, as text, which schedule serves which M on a target, and why."""
        return self.lower(target).explain()

    def export(
        self,
        path: str | os.PathLike[str],
        packed: PackedWeight | None = None,
        target: str | TileDevice | None = None,
        *,
        sign: Any = None,
    ) -> Path:
        """Write the compiled operator to one file that `ladder.load` runs without a compiler.

        Parameters
        ----------
        path
            The file.
        packed
            A weight to put beside the kernels.
        target
            Device to compile for; by default this operator's, else where ``packed`` is, else this CPU.
        sign
            An Ed25519 key that signs the file: an object of ``cryptography``, PEM text or the path of it.
        """
        if target is None and not self.request.device and packed is not None:
            target = target_of(packed.device)
        request = self._aimed(target)
        if packed is not None and packed.family != family_of(request.target):
            raise DeviceError(
                f"the weight is packed for {packed.family!r}, the artefact is for {request.device}"
            )
        return artifact.export(request, path, packed, sign)

    def _aimed(self, target: str | TileDevice | None) -> Request:
        name = (
            get_device(target).name if target is not None else self.request.device or get_device("cpu").name
        )
        return Request(self.gemm, name, self.request.plan)


def _restore(text: str) -> Matmul:
    return Matmul.from_request(Request.parse(text))
