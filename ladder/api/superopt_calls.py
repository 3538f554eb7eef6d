"""Arguments and results of a superoptimized function, checked at every call.

Kernels are for shapes, types and devices, compute no gradients and write into nothing that they are given.
So arguments may lie in each other's memory or be results of earlier calls. Where some are the same tensor or
not contiguous, the function may ask for that: it is recorded again for each such pattern, once, and must be
the same. Kernels read contiguous tensors: they are given copies of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx

from ladder.api.tensor_program import Recorded, decoded, recorded, target_of
from ladder.runtime.fused import ALIGNMENT
from tile_types.errors import ConversionError, DeviceError, DTypeError, ShapeError
from tile_types.quantized import QuantizedTensor

TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of inputs that kernels compute with; halves are computed in float32 in between."""


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
            and given.layout is torch.strided
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
    """Check that a tensor has strides, and that no gradients are asked for."""
    if given.layout is not torch.strided:
        raise ConversionError(f"{name} is of {given.layout}; call .to_dense()")
    if given.requires_grad and torch.is_grad_enabled():
        raise ConversionError(
            f"{name} requires gradients, and superoptimized functions are for inference: call under"
            " torch.no_grad(), or detach it"
        )


Strides = tuple[int, ...]

Results = tuple[tuple[Strides, Strides], ...]
"""Shape and strides of each result."""


class Pattern(NamedTuple):
    """How the arguments of a call lie in memory.

    firsts: For each argument, the number of the first that is the same tensor.
    layout: Strides of each that is not contiguous, None for the others.
    """

    firsts: tuple[int, ...]
    layout: tuple[Strides | None, ...]

    @staticmethod
    def of(inputs: Sequence[Any]) -> Pattern:
        """Return the pattern of the arguments of a call."""
        firsts: dict[int, int] = {}
        same = tuple(firsts.setdefault(id(given), number) for number, given in enumerate(inputs))
        return Pattern(same, tuple(map(_strides_of, inputs)))

    @property
    def copied(self) -> list[int]:
        """Numbers of the arguments that kernels are given copies of."""
        return [number for number, strides in enumerate(self.layout) if strides is not None]


def _strides_of(given: Any) -> Strides | None:
    if not isinstance(given, torch.Tensor) or given.is_contiguous():
        return None
    return given.stride()


def readable(given: Any) -> Any:
    """Return an argument as kernels read it: contiguous, from a multiple of `ALIGNMENT` bytes on."""
    if not isinstance(given, torch.Tensor):
        return given
    dense = given.contiguous()
    return dense.clone() if dense.data_ptr() % ALIGNMENT else dense


@dataclass(frozen=True)
class Contract:
    """Signature of a function, and the layout of its results.

    name: Of the function.
    arguments: In order.
    example: How the examples lie in memory.
    graph: What it computes of distinct tensors, as text.
    patterns: How arguments may lie in memory: for each pattern, the layouts of the results.
    """

    name: str
    arguments: tuple[Argument, ...]
    example: Pattern
    function: Callable[..., Any]
    graph: str
    patterns: dict[Pattern, Results] = field(default_factory=dict)

    @staticmethod
    def of(
        function: Callable[..., Any], inputs: Sequence[Any], tensors: Sequence[torch.Tensor], found: Recorded
    ) -> Contract:
        """Return the contract of a function by its examples, their copies, and what was recorded of these."""
        arguments = tuple(map(Argument.of, inputs))
        example, apart = Pattern.of(inputs), tuple(range(len(inputs)))
        known = {Pattern(apart, example.layout): _results(found)}
        graph = text_of(found, tensors, apart)
        contract = Contract(found.name, arguments, example, function, graph, known)
        contract.results(example, inputs)
        return contract

    @property
    def copies(self) -> str:
        """Which of the examples kernels are given copies of, as the end of a sentence; empty if none."""
        numbers = ", ".join(map(str, self.example.copied))
        return f"; copied for kernels, since not contiguous: input {numbers}" if numbers else ""

    def call(self, kernels: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Check the arguments of a call, and return what kernels give, laid out as by the function.

        Raises ShapeError, DTypeError, DeviceError if one is not what the function was optimised for.
        Raises ConversionError if gradients are asked for.
        """
        self.require(inputs)
        pattern = Pattern.of(inputs)
        layouts = self.results(pattern, inputs)
        results = kernels(*map(readable, inputs))
        if isinstance(results, tuple):
            return tuple(map(_laid_out, results, layouts))
        return _laid_out(results, layouts[0])

    def require(self, inputs: Sequence[Any]) -> None:
        """Check the arguments of a call; raises as `call` does."""
        if len(inputs) != len(self.arguments):
            raise ShapeError(f"{self.name} takes {len(self.arguments)} tensors, got {len(inputs)}")
        for number, (argument, given) in enumerate(zip(self.arguments, inputs, strict=True)):
            if not argument.is_met(given):
                argument.require(f"input {number} of {self.name}", given)

    def results(self, pattern: Pattern, inputs: Sequence[Any]) -> Results:
        """Return the layouts of the results where arguments lie so.

        Raises ConversionError if the function computes something else then.
        """
        if pattern not in self.patterns:
            self.patterns[pattern] = self._learned(pattern, inputs)
        return self.patterns[pattern]

    def _learned(self, pattern: Pattern, inputs: Sequence[Any]) -> Results:
        made = copies(self.name, decoded(inputs))
        tensors = [made[first] for first in pattern.firsts]
        with torch.random.fork_rng():
            found = recorded(self.function, tensors)
        if text_of(found, tensors, pattern.firsts) != _merged(self.graph, pattern.firsts):
            same = [(number, first) for number, first in enumerate(pattern.firsts) if number != first]
            where = f"its input {same[0][0]} is input {same[0][1]}" if same else self._unlike(pattern)
            raise ConversionError(f"{self.name} computes something else where {where}: give it a copy")
        return _results(found)

    def _unlike(self, pattern: Pattern) -> str:
        """Say how a pattern differs from the examples' layout."""
        pairs = enumerate(zip(pattern.layout, self.example.layout, strict=True))
        number, (strides, _) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        return f"its input {number} is " + ("contiguous" if strides is None else f"of strides {strides}")


def _results(found: Recorded) -> Results:
    return tuple((tuple(result.shape), result.stride()) for result in found.results)


def _laid_out(result: torch.Tensor, layout: tuple[Strides, Strides]) -> torch.Tensor:
    """Return a result with the function's strides; as it is if its shape depends on values."""
    shape, strides = layout
    if result.stride() == strides or result.shape != shape:
        return result
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)


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
    """Return copies of examples with their strides, each in memory of its own.

    What a function does to copies is not seen. Raises ConversionError if an example is not what kernels
    compute with.
    """
    for number, tensor in enumerate(tensors):
        if tensor.dtype not in TYPES:
            raise ConversionError(
                f"{name}: input {number} is {tensor.dtype}; kernels compute in float32, float16 or bfloat16"
            )
        if tensor.layout is not torch.strided:
            raise ConversionError(f"{name}: input {number} is of {tensor.layout}; kernels read strided ones")
        if tensor.device != tensors[0].device:
            raise ConversionError(f"{name}: inputs on {tensors[0].device} and {tensor.device}")
        if not tensor.numel():
            raise ConversionError(
                f"{name}: input {number} has no elements; kernels are made for extents from 1 on"
            )
    return [_copied(tensor.detach()) for tensor in tensors]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, those of an axis that repeats elements included."""
    made = tensor.clone()
    if made.stride() == tensor.stride():
        return made
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((extent - 1) * stride for extent, stride in pairs)
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


class _Watched(torch.fx.Interpreter):
    """Runs a graph, and finds which operator writes into a tensor that it is given, or sets a state of torch.

    effect: What the first of these does, empty if there is none.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.effect = ""

    def run_node(self, n: torch.fx.Node) -> Any:
        given = [self.env[node] for node in n.all_input_nodes]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        before = [value._version for value in tensors]
        result = super().run_node(n)
        if n.op not in ("output", "placeholder") and not self.effect:
            if before != [value._version for value in tensors]:
                self.effect = f"{target_of(n)} writes in place"
            elif not n.users and not isinstance(result, (torch.Tensor, tuple, list)):
                self.effect = f"{target_of(n)} sets a state of torch"
        return result


def require_pure(found: Recorded, given: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    """Check that a function writes into nothing, and draws no random numbers.

    given, after: Its inputs, and the copies that it was run on.
    Raises ConversionError: Names what it writes into.
    """
    watched = _Watched(found.module)
    states = _random_states(given[0].device)
    with torch.no_grad():
        watched.run(*found.examples)
    if watched.effect:
        raise ConversionError(f"{found.name}: {watched.effect}; only functions without effects are taken")
    for number, (before, now) in enumerate(zip(given, after, strict=True)):
        if not torch.equal(_bytes(before), _bytes(now)):
            raise ConversionError(
                f"{found.name} writes into its input {number}; only functions without effects are taken"
            )
    if not all(map(torch.equal, states, _random_states(given[0].device))):
        raise ConversionError(f"{found.name} draws random numbers; what is proved has none")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _random_states(where: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(where)] if where.type == "cuda" else states
