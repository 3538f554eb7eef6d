"""Arguments and results of a superoptimized function, checked at every call.

Kernels are for shapes, types and devices, compute no gradients and write into nothing that they are given.
So arguments may lie in each other's memory or be results of earlier calls. Where some are the same tensor,
the function may ask whether they are: it is recorded again for each such pattern, once, and must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

import torch
import torch.fx

from ladder.api.tensor_program import Recorded, decoded, recorded
from tile_types.errors import ConversionError, DeviceError, DTypeError, ShapeError
from tile_types.quantized import QuantizedTensor

TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of inputs that kernels compute with; halves are computed in float32 in between."""

IN_PLACE = ("setitem", "copy_", "__setitem__")


@dataclass(frozen=True)
class Argument:
    """Requirements on one argument.

    shape, dtype, device: Of a tensor; of a quantized matrix, its type's name and no device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    device: torch.device | None

    @staticmethod
    def of(given: Any) -> Argument:
        """Return the requirements that an example meets."""
        if isinstance(given, QuantizedTensor):
            return Argument(tuple(given.shape), given.type_name, None)
        return Argument(tuple(given.shape), given.dtype, given.device)

    def is_met(self, given: Any) -> bool:
        """Tell whether a tensor meets the requirements; cheap, since it runs in every call."""
        return (
            type(given) is torch.Tensor
            and given.shape == self.shape
            and given.dtype == self.dtype
            and given.device == self.device
            and given.is_contiguous()
            and not (given.requires_grad and torch.is_grad_enabled())
        )

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
    """Signature of a function, and the layout of its results.

    name: Of the function.
    arguments: In order.
    strides: Of each result.
    graph: What it computes of distinct tensors, as text.
    patterns: Which arguments may be the same tensor: for each, the number of the first that is the same.
    """

    name: str
    arguments: tuple[Argument, ...]
    strides: tuple[tuple[int, ...], ...]
    function: Callable[..., Any]
    graph: str
    patterns: set[tuple[int, ...]] = field(default_factory=set)

    @staticmethod
    def of(
        function: Callable[..., Any], inputs: Sequence[Any], tensors: Sequence[torch.Tensor], found: Recorded
    ) -> Contract:
        """Return the contract of a function by its examples, their copies, and what was recorded of these."""
        arguments = tuple(map(Argument.of, inputs))
        strides = tuple(result.stride() for result in found.results)
        apart = tuple(range(len(inputs)))
        graph = text_of(found, tensors, apart)
        contract = Contract(found.name, arguments, strides, function, graph, {apart})
        contract.require_pattern(inputs)
        return contract

    def require(self, inputs: Sequence[Any]) -> None:
        """Check the arguments of a call.

        Raises ShapeError, DTypeError, DeviceError if one is not what the function was optimised for.
        Raises ConversionError if gradients are asked for.
        """
        if len(inputs) != len(self.arguments):
            raise ShapeError(f"{self.name} takes {len(self.arguments)} tensors, got {len(inputs)}")
        for number, (argument, given) in enumerate(zip(self.arguments, inputs, strict=True)):
            if not argument.is_met(given):
                argument.require(f"input {number} of {self.name}", given)
        self.require_pattern(inputs)

    def require_pattern(self, inputs: Sequence[Any]) -> None:
        """Check that the function computes the same where some of its arguments are the same tensor."""
        firsts: dict[int, int] = {}
        pattern = tuple(firsts.setdefault(id(given), number) for number, given in enumerate(inputs))
        if pattern not in self.patterns:
            self._learn(pattern, inputs)

    def _learn(self, pattern: tuple[int, ...], inputs: Sequence[Any]) -> None:
        made = copies(self.name, decoded(inputs))
        tensors = [made[first] for first in pattern]
        with torch.random.fork_rng():
            found = recorded(self.function, tensors)
        numbers = [number for number, first in enumerate(pattern) if number != first]
        if text_of(found, tensors, pattern) != _merged(self.graph, pattern):
            raise ConversionError(
                f"{self.name} computes something else where its input {numbers[0]} is input"
                f" {pattern[numbers[0]]}: give it a copy"
            )
        self.patterns.add(pattern)

    def laid_out(self, results: Any) -> Any:
        """Return results with the strides that the function's own have."""
        if isinstance(results, tuple):
            return tuple(map(_with_strides, results, self.strides))
        return _with_strides(results, self.strides[0])


def _with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def text_of(found: Recorded, tensors: Sequence[torch.Tensor], pattern: Sequence[int]) -> str:
    """Return a recorded graph as text, which calls inputs by their numbers."""
    numbers = {id(tensor): first for tensor, first in zip(tensors, pattern, strict=True)}
    names: dict[torch.fx.Node, str] = {}
    examples = iter(found.examples)
    lines: list[str] = []
    renamed: Any = torch.fx.node.map_arg
    for node in found.module.graph.nodes:
        if node.op == "placeholder":
            example = next(examples)
            number = numbers.get(id(example))
            names[node] = f"held {id(example)}" if number is None else f"<input {number}>"
            continue
        names[node] = f"%{len(lines)}"
        arguments = renamed((node.args, node.kwargs), lambda n: _Named(names[n]))
        lines.append(f"{node.op} {node.target} {arguments}")
    return "\n".join([*lines, str(found.order)])


class _Named:
    """A node by its name, as part of a text."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _merged(graph: str, pattern: Sequence[int]) -> str:
    """Return a text in which inputs that are the same tensor have the same name."""
    for number, first in enumerate(pattern):
        graph = graph.replace(f"<input {number}>", f"<input {first}>")
    return graph


# ---- examples --------------------------------------------------------------------------------------------
def copies(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of examples, each in memory of its own: what a function does to them is not seen.

    Raises ConversionError if one is of a type that kernels do not compute with.
    Raises ShapeError if one is not contiguous.
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

    given, after: Its inputs, and the copies that it was run on.
    Raises ConversionError: Names what it writes into.
    """
    for node in module.graph.nodes:
        what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        method = what.endswith("_") and not what.endswith("__") and not iskeyword(what[:-1])
        in_place = what in IN_PLACE or method
        if node.op in ("call_function", "call_method") and (in_place or node.kwargs.get("out") is not None):
            raise ConversionError(f"{name}: {what} writes in place; only functions without effects are taken")
    for number, (before, now) in enumerate(zip(given, after, strict=True)):
        if not torch.equal(before.view(torch.uint8), now.view(torch.uint8)):
            raise ConversionError(
                f"{name} writes into its input {number}; only functions without effects are taken"
            )
