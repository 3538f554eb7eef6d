"""The problem of `ladder gemm` and `ladder explain`: one matrix product, with every default resolved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ladder.api.matmul import Matmul
from ladder.api.problem import gemm_for
from ladder.cli.model_report import PYTHON, imported
from ladder.ir.gemm import Gemm
from ladder.runtime import hip
from ladder.runtime.compile import Request
from targets import TileDevice, get_device, host_cpu, rocm_architectures, visible_gpus
from tile_types import TType, get_type, register_type
from tile_types.errors import ConversionError, LadderError, ParseError

DEFAULT_GROUP = 128
SIXTEEN_BIT = ("bfloat16", "float16")
"""Activation types to choose from where the user names none, best first."""


def type_named(name: str) -> TType:
    """Return a type of the library, or the one that ``python:module:name`` names, which is registered.

    Raises ParseError if nothing of that name can be imported, or it is no `TType`; UnknownNameError.
    """
    if not name.startswith(PYTHON):
        return get_type(name)
    found = imported(name)
    if not isinstance(found, TType):
        raise ParseError(f"{name!r} is a {type(found).__name__}, not a TType")
    return register_type(found)


@dataclass(frozen=True)
class Problem:
    """``C[M,N] = epilogue(A[M,K] · decode(B[N,K])ᵀ + bias[N])`` on one target.

    weight: Name of the weight's type, or ``python:module:name`` of a `TType`, whose own name it becomes.
    activation: Name of A's type; None chooses a 16-bit type that the target multiplies.
    group_size: Elements along K per scale, -1 for one scale per row; None takes a block type's own size, no
        groups for types above 8 bits, else 128.
    m, n, k: Extents.
    zero: Kind of zero points: ``"none"``, ``"integer"`` or ``"float"``.
    bias, epilogue, output: What follows the product; see `Gemm`. ``output`` None is A's type if that has 16
        bits, else float32 for int8 and float16 for fp8.
    target: Name of the device.
    seed: Of the random operands.
    experts, masked: Number of such products in one launch, 0 for one alone, and how their tokens lie; see
        `ladder.GroupedMatmul`. ``m`` is then the tokens of an expert.
    """

    weight: str = "int4"
    activation: str | None = None
    group_size: int | None = None
    m: int = 1
    n: int = 4096
    k: int = 4096
    zero: str = "none"
    bias: bool = False
    epilogue: tuple[str, ...] = ()
    output: str | None = None
    target: str = "cpu"
    seed: int = 0
    experts: int = 0
    masked: bool = False

    def __post_init__(self) -> None:
        if self.weight.startswith(PYTHON):
            object.__setattr__(self, "weight", type_named(self.weight).name)

    @property
    def device(self) -> TileDevice:
        """The target's data; raises UnknownNameError."""
        return get_device(self.target)

    @property
    def ttype(self) -> TType:
        """The weight's type; raises UnknownNameError."""
        return get_type(self.weight)

    @cached_property
    def activation_type(self) -> str:
        """Name of A's type."""
        if self.activation is not None:
            return get_type(self.activation).name
        usable = [name for name in SIXTEEN_BIT if self.device.cores_for(name)]
        # A 16-bit float weight is exact only in its own type.
        own = [name for name in usable if name == self.ttype.name]
        return (own or usable or ["float16"])[0]

    @cached_property
    def group(self) -> int | None:
        """Elements along K that share a scale; None if the type brings its own or there is one per row."""
        if self.group_size is not None:
            return None if self.group_size == -1 else self.group_size
        grouped = self.ttype.elem_bits <= 8 and not self.ttype.is_block
        return DEFAULT_GROUP if grouped and self.k > DEFAULT_GROUP else None

    @cached_property
    def gemm(self) -> Gemm:
        """The normal form with every default resolved; raises LadderError if the product cannot be."""
        if self._zero() and (self.ttype.is_block or self.ttype.elem_bits > 8):
            raise ConversionError(f"{self.ttype.name} takes no zero points; leave zero at none")
        return gemm_for(
            self.n,
            self.k,
            self.ttype,
            self.activation_type,
            output=self.output,
            group_size=self.group,
            zero=self._zero(),
            bias=self.bias,
            epilogue=self.epilogue,
        )

    def _zero(self) -> str | None:
        return None if self.zero == "none" else self.zero

    def operator(self) -> Matmul:
        """Return the operator.

        Raises LadderError if the product cannot be: the message says why.
        """
        return Matmul.from_request(Request(self.gemm, self.device.name))


def as_here(device: TileDevice) -> TileDevice:
    """Return the product of an architecture that this machine has; the device itself where it has none."""
    shown = [get_device(gpu.device) for gpu in visible_gpus() if gpu.device]
    return next((gpu for gpu in shown if gpu.row == device.name), device)


def why_not_here(device: TileDevice) -> str:
    """Return why this machine cannot run code for a device; empty if it can."""
    if device.kind == "llvm":
        missing = sorted(device.features - host_cpu().features)
        return f"this CPU lacks {', '.join(missing)}" if missing else ""
    shown = [gpu.device or f"sm_{gpu.capability[0]}{gpu.capability[1]}" for gpu in visible_gpus()]
    shown += [f"rocm/{arch}" for arch in rocm_architectures()]
    if device.row not in {name.partition(":")[0] for name in shown}:
        return f"no {device.name} GPU is visible here (visible: {', '.join(shown) or 'none'})"
    if device.kind == "rocm":
        return _why_hip_cannot()
    return _why_torch_cannot()


def _why_hip_cannot() -> str:
    try:
        hip.runtime()
    except LadderError as error:
        return str(error)
    return ""


def _why_torch_cannot() -> str:
    return (
        "" if torch.cuda.is_available() else f"torch {torch.__version__} is built without CUDA or sees no GPU"
    )
