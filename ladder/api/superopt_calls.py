"""What a superoptimized function takes and returns, checked at every call.

Kernels are for shapes, types and devices, compute no gradients and write into nothing that they are given.
So arguments may be the same tensor, lie in each other's memory, or be results of earlier calls: the program
was recorded of distinct tensors, and is right for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tile_types.errors import ConversionError, DeviceError, DTypeError, ShapeError
from tile_types.quantized import QuantizedTensor

TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of inputs that kernels compute with; halves are computed in float32 in between."""

IN_PLACE = ("setitem", "copy_", "__setitem__")


@dataclass(frozen=True)
class Argument:
    """What one argument must be.

    Parameters
    ----------
    shape, dtype, device
        Of a tensor; of a quantized matrix, its type's name and no device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    device: torch.device | None

    @staticmethod
    def of(given: Any) -> Argument:
        """Return what an example is."""
        if isinstance(given, QuantizedTensor):
            return Argument(tuple(given.shape), given.type_name, None)
        return Argument(tuple(given.shape), given.dtype, given.device)

    def require(self, name: str, given: Any) -> None:
        """Check an argument; raises ShapeError, DTypeError, DeviceError or ConversionError."""
        if not isinstance(given, (torch.Tensor, QuantizedTensor)):
            raise DTypeError(f"{name} is a {type(given).__name__}, not a tensor")
        found = Argument.of(given)
        if found.shape != self.shape:
            raise ShapeError(f"{name} is {found.shape}, it was optimised for {self.shape}")
        if found.dtype != self.dtype:
            raise DTypeError(f"{name} is {found.dtype}, it was optimised for {self.dtype}")
        if found.device != self.device:
            raise DeviceError(f"{name} is on {found.device}, it was optimised for {self.device}")
        if isinstance(given, torch.Tensor):
            require_plain(name, given)


def require_plain(name: str, given: torch.Tensor) -> None:
    """Check that a tensor is contiguous, and that no gradients are asked for."""
    if not given.is_contiguous():
        raise ShapeError(f"{name} is not contiguous; call .contiguous()")
    if given.requires_grad and torch.is_grad_enabled():
        raise ConversionError(
            f"{name} requires gradients, and superoptimized functions are for inference: call under"
            " torch.no_grad(), or detach it"
        )


@dataclass(frozen=True)
class Contract:
    """What a function takes, and how its results lie.

    Parameters
    ----------
    name
        Of the function.
    arguments
        In order.
    strides
        Of each result.
    """

    name: str
    arguments: tuple[Argument, ...]
    strides: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(name: str, inputs: Sequence[Any], results: Sequence[torch.Tensor]) -> Contract:
        """Return the contract of a function by its examples and what it returned for them."""
        return Contract(name, tuple(map(Argument.of, inputs)), tuple(result.stride() for result in results))

    def require(self, inputs: Sequence[Any]) -> None:
        """Check the arguments of a call.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            If one is not what the function was optimised for.
        ConversionError
            If gradients are asked for.
        """
        if len(inputs) != len(self.arguments):
            raise ShapeError(f"{self.name} takes {len(self.arguments)} tensors, got {len(inputs)}")
        for number, (argument, given) in enumerate(zip(self.arguments, inputs, strict=True)):
            argument.require(f"input {number} of {self.name}", given)

    def laid_out(self, results: Any) -> Any:
        """Return results with the strides that the function's own have."""
        if isinstance(results, tuple):
            return tuple(map(_with_strides, results, self.strides))
        return _with_strides(results, self.strides[0])


def _with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


# ---- examples --------------------------------------------------------------------------------------------
def copies(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of examples, each in memory of its own: what a function does to them is not seen.

    Raises
    ------
    ConversionError
        If one is of a type that kernels do not compute with.
    ShapeError
        If one is not contiguous.
    """
    for number, tensor in enumerate(tensors):
        if tensor.dtype not in TYPES:
            raise ConversionError(
                f"{name}: input {number} is {tensor.dtype}; kernels compute in float32, float16 or bfloat16"
            )
        if not tensor.is_contiguous():
            raise ShapeError(f"input {number} of {name} is not contiguous; call .contiguous()")
    return [tensor.detach().clone() for tensor in tensors]


def require_pure(
    name: str, module: torch.fx.GraphModule, given: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> None:
    """Check that a function writes into nothing.

    Parameters
    ----------
    module
        Its graph.
    given, after
        Its inputs, and the copies that it was run on.

    Raises
    ------
    ConversionError
        Names what it writes into.
    """
    for node in module.graph.nodes:
        what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = what in IN_PLACE or (what.endswith("_") and not what.endswith("__"))
        if node.op in ("call_function", "call_method") and (in_place or node.kwargs.get("out") is not None):
            raise ConversionError(f"{name}: {what} writes in place; only functions without effects are taken")
    for number, (before, now) in enumerate(zip(given, after, strict=True)):
        if not torch.equal(before.view(torch.uint8), now.view(torch.uint8)):
            raise ConversionError(
                f"{name} writes into its input {number}; only functions without effects are taken"
            )
