"""What every engine that multiplies by a quantized matrix has in common."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from benchmarks.harness import BOUNDS
from benchmarks.peers import drawn_types
from ladder.ir.rounding import ROUNDOFF
from tile_types import get_type, quantize
from tile_types.quantized import QuantizedTensor

DRAWN_TYPES = tuple(drawn_types.VALUES)
"""Types of the kinds that users invent, which a process that uses one registers."""


@dataclass(frozen=True)
class Work:
    """What an engine multiplies, shapes apart.

    Parameters
    ----------
    weight
        Ladder's name of the weight type; ``"float16"`` and ``"bfloat16"`` are dense.
    activation
        Type that the multiply sees.
    group_size
        Columns that share a scale; 0 is the type's own block or one scale per row.
    dynamic
        Whether 16-bit activations arrive and are quantized to ``activation`` within the timed call.
    output
        Type of the result; empty: the engine's own choice.
    zero
        Zero points of groups: ``""``, ``"integer"`` or ``"float"``.
    step
        For Ladder only, a key of `benchmarks.peers.ladder_engine.STEPS`: optimisations of the
        schedule that come after it are held back.
    """

    weight: str
    activation: str = "float16"
    group_size: int = 0
    dynamic: bool = False
    output: str = ""
    step: str = ""
    zero: str = ""

    def __str__(self) -> str:
        group = f" g{self.group_size}" if self.group_size else ""
        zero = f" with {self.zero} zero points" if self.zero else ""
        quantized = " (quantized in the call)" if self.dynamic else ""
        return f"{self.weight}{group}{zero} × {self.activation}{quantized}"

    @property
    def source(self) -> str:
        """Type in which activations are drawn."""
        return self.activation if self.activation in ("float16", "bfloat16") else "float16"

    def quantized(self, weight: Any) -> QuantizedTensor:
        """Quantize ``[n, k]`` as Ladder does: scales in the 16-bit type, one-sided types clip."""
        drawn_types.register(self.weight)
        ttype = get_type(self.weight)
        options: dict[str, Any] = {"group_size": self.group_size} if self.group_size else {}
        if not ttype.is_block and ttype.elem_bits <= 8:
            options["scale_type"] = self.source
        if self.zero:
            options["zero"] = self.zero
        elif ttype.element_type.maximum <= 0 or ttype.element_type.minimum >= 0:
            options["scaling"] = "absmax"
        return quantize(weight, self.weight, **options)

    @property
    def bound(self) -> float:
        """Largest relative error of a right result: the coarser of arithmetic and output."""
        zero = ROUNDOFF.get(self.activation, 0.0) if self.zero else 0.0
        return max(BOUNDS[self.activation], BOUNDS.get(self.output, 0.0), zero)


class Operand(ABC):
    """One weight matrix ``[n, k]`` as an engine stores it, ready to be multiplied.

    Attributes
    ----------
    nbytes
        Bytes that one product must read for the weight, scales included.
    """

    nbytes: int

    @abstractmethod
    def dense(self) -> Any:
        """Return the weights that the stored codes stand for, float64 ``[n, k]``."""

    def given(self, x: Any) -> tuple[Any, ...]:
        """Return the arguments of a call for activations x ``[m, k]``, prepared outside the timing."""
        return (x,)

    def seen(self, *given: Any) -> Any:
        """Return the activations that the product really sees, float64 ``[m, k]``."""
        return given[0].double()

    @abstractmethod
    def __call__(self, *given: Any) -> Any:
        """Multiply: ``[m, n]``."""

    def clone(self) -> Operand:
        """Return the same weight in memory of its own."""
        return copy.deepcopy(self)


class Engine(ABC):
    """One library, or one function of torch.

    Attributes
    ----------
    distribution
        Package whose version is reported.
    module
        What must be importable.
    warms
        Whether first calls compile or tune for a shape on the GPU, so that other processes do it
        beforehand.
    """

    distribution: ClassVar[str] = "torch"
    module: ClassVar[str] = "torch"
    warms: ClassVar[bool] = False

    def absence(self) -> str:
        """Return why the engine cannot be used here at all, or nothing."""
        if importlib.util.find_spec(self.module) is None:
            return f"not installed: {self.distribution}"
        return ""

    def version(self) -> str:
        """Return the version of the library."""
        return importlib.metadata.version(self.distribution)

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        """Return why this product cannot or need not be measured, or nothing."""
        return ""

    @abstractmethod
    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        """Quantize and pack ``weight`` ``[n, k]`` (float16 on the GPU) for products with these M."""


ENGINES: Mapping[str, str] = {
    "ladder": "benchmarks.peers.ladder_engine:Ladder",
    "humming": "benchmarks.peers.humming_engine:Humming",
    "gemlite": "benchmarks.peers.gemlite_engine:Gemlite",
    "bitsandbytes": "benchmarks.peers.bitsandbytes_engine:Bitsandbytes",
    "cublas": "benchmarks.peers.torch_engine:Dense",
    "scaled_mm": "benchmarks.peers.torch_engine:ScaledMatmul",
    "scaled_mm by tensor": "benchmarks.peers.torch_engine:TensorScaledMatmul",
    "int_mm": "benchmarks.peers.torch_engine:IntegerMatmul",
    "tinygemm": "benchmarks.peers.torch_engine:Tinygemm",
    "machete": "benchmarks.peers.vllm_engine:Machete",
    "marlin": "benchmarks.peers.vllm_engine:Marlin",
    "cutlass": "benchmarks.peers.vllm_engine:Cutlass",
}
"""Module and class of each engine."""


@cache
def engine(name: str) -> Engine:
    """Return an engine by name."""
    module, _, kind = ENGINES[name].partition(":")
    made: Engine = getattr(importlib.import_module(module), kind)()
    return made


def versions() -> dict[str, str]:
    """Return version or reason of absence of every engine's package."""
    found = {}
    for name in ENGINES:
        one = engine(name)
        found[one.distribution] = one.absence() or one.version()
    return found
