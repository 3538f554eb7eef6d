"""From a torch function to a program over named dimensions, which the superoptimizer takes.

The function runs once under `ladder.capture`, which gives its graph of tensor operators; `tensor_operators`
translates each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ladder.superopt.generator import Program
from ladder.superopt.operators import OPERATORS
from ladder.superopt.tracer import Tracer
from tile_types import group_scaled
from tile_types.errors import ConversionError
from tile_types.quantized import QuantizedTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Recorded:
    """A function's graph of tensor operators.

    name: Of the function.
    module, examples: The graph, and what its placeholders stand for.
    results: What the function returned.
    order: For each result, which output of the graph it is; None if the function returns a tensor, not a
        tuple.
    """

    name: str
    module: Any
    examples: Sequence[Any]
    results: tuple[Any, ...]
    order: tuple[int, ...] | None


def recorded(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Recorded:
    """Return a function's graph of tensor operators.

    Raises ConversionError if it is not one graph, or does not return tensors that the graph computes.
    """
    import torch

    from ladder.capture import capture

    graphs: list[tuple[Any, list[Any]]] = []
    outputs: list[Any] = []

    def keep(module: Any, examples: list[Any]) -> Any:
        graphs.append((module, examples))

        def run(*values: Any) -> Any:
            outputs[:] = module(*values)
            return tuple(outputs)

        return run

    name = name_of(function)
    call = capture(function, backend=keep)
    with torch.no_grad():
        call(*inputs)
        result = call(*inputs)  # through the graph: which of its outputs is which result
    if len(graphs) != 1:
        raise ConversionError(
            f"{name} is {len(graphs)} graphs of tensor operators under capture; one is taken"
        )
    results = result if type(result) is tuple else (result,)
    numbers = {id(output): number for number, output in enumerate(outputs)}
    if any(id(y) not in numbers for y in results):
        raise ConversionError(f"{name} returns other than a tensor or a tuple of tensors that it computes")
    order = tuple(numbers[id(y)] for y in results)
    if len(set(order)) < len(outputs):  # the others are what it looked at
        raise ConversionError(f"what {name} computes depends on values of tensors, which it reads")
    return Recorded(name, *graphs[0], results, order if type(result) is tuple else None)


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name, ``program`` if it has none."""
    return getattr(function, "__name__", "program").strip("<>")


def decoded(inputs: Sequence[Any], dtype: Any = None) -> list[torch.Tensor]:
    """Return inputs as tensors, quantized ones decoded to the others' type; all in ``dtype``, if given."""
    own = dtype or next((x.dtype for x in inputs if not isinstance(x, QuantizedTensor)), None)
    if own is None:
        raise ConversionError("all inputs are quantized; one must be a tensor")
    return [
        x.dequantize(own) if isinstance(x, QuantizedTensor) else x if dtype is None else x.to(dtype)
        for x in inputs
    ]


def packed_types(inputs: Sequence[Any]) -> dict[int, str]:
    """Return the type of each quantized input, by number."""
    quantized = {number: x for number, x in enumerate(inputs) if isinstance(x, QuantizedTensor)}
    return {number: type_of(x) for number, x in quantized.items()}


def type_of(weight: QuantizedTensor) -> str:
    """Return the type of a quantized matrix with its scales.

    Raises ConversionError if a scale is shared by rows, or there is one of the whole tensor: tiles have none
        of these.
    """
    unlike = {
        "without scales": weight.scale is None,
        f"with scales of {weight.block[0]} rows": weight.block[0] != 1,
        "with a scale of the whole tensor": weight.tensor_scale is not None,
        "with an offset or an order of columns": not (weight.offset is None is weight.columns),
    }
    for what, found in unlike.items():
        if found:
            raise ConversionError(
                f"{weight.type_name} {what}: block graphs read matrices with scales along K alone"
            )
    scale, zero = weight.scale_type, weight.zero_kind
    return group_scaled(weight.ttype.name, weight.block[1], scale=scale, zero=zero).name


def translated(
    name: str,
    module: Any,
    examples: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    packed: Mapping[int, str] | None = None,
) -> Program:
    """Return the program of a captured graph.

    module, examples: The graph, and what its placeholders stand for.
    inputs: In the order of the program's.
    packed: Types of the inputs that are quantized ``[N, K]``.
    Raises ConversionError: Names an operator or a use of one that block graphs cannot express.
    """
    import torch

    dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in inputs})
    if len(dtypes) != 1:
        raise ConversionError(f"{name} takes inputs of one type, got {', '.join(dtypes)}")
    _require_precisions(name, module, examples, inputs[0].dtype)
    tracer = Tracer(torch.finfo(inputs[0].dtype).eps)
    packed = packed or {}
    declared = {
        id(tensor): tracer.weight(tensor.shape) if number in packed else tracer.input(tensor.shape)
        for number, tensor in enumerate(inputs)
    }
    bare = [number for number, tensor in enumerate(inputs) if not tensor.ndim]
    if bare:
        raise ConversionError(f"{name}: input {bare[0]} has no axes; block graphs have tiles of one or more")
    unused = [number for number, tensor in enumerate(inputs) if not any(tensor is x for x in examples)]
    if unused:
        raise ConversionError(f"{name} does not use input {unused[0]}: leave it out")
    values: dict[Any, Any] = {}
    placeholders = iter(examples)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            example = next(placeholders)
            if id(example) not in declared:
                raise ConversionError(f"{name} uses a tensor that is none of its inputs; pass it as one")
            values[node] = declared[id(example)]
        elif node.op == "output":
            results = node.args[0]
            if len(results) != 1:
                raise ConversionError(f"{name} returns {len(results)} tensors; one is taken")
            program = tracer.program(name, tracer.value(values[results[0]]), dtypes[0])
            return replace(program, packed={f"X{number}": ttype for number, ttype in packed.items()})
        else:
            values[node] = step_of(tracer, name, node, values)
    raise ConversionError(f"{name} returns nothing")


def require_precision(what: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """Check that block graphs compute a value as asked: in a program's type, or in float32.

    Raises ConversionError if it is rounded to another type, or computed in a finer one.
    """
    import torch

    if found not in (wanted, torch.float32):
        raise ConversionError(f"{what} computes in {found}: block graphs of {wanted} do in it and in float32")


def _require_precisions(name: str, module: Any, examples: Sequence[Any], wanted: torch.dtype) -> None:
    """Check all values of a graph, by running it."""
    import torch
    import torch.fx

    class Checked(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                require_precision(f"{name}: torch's {target_of(n)}", value.dtype, wanted)
            return value

    with torch.no_grad():
        Checked(module).run(*examples)


def step_of(tracer: Tracer, name: str, node: Any, values: Mapping[Any, Any]) -> Any:
    """Translate an operator, and return its value.

    Raises ConversionError: Names what block graphs cannot express.
    """
    target = target_of(node)
    translate = OPERATORS.get(target)
    if node.op not in ("call_function", "call_method") or translate is None:
        raise ConversionError(f"{name}: torch's {target} has no counterpart in block graphs ({node.op})")

    def resolved(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(resolved, x))
        return values.get(x, x) if type(x).__name__ == "Node" else x

    arguments = [resolved(x) for x in node.args]
    options = {key: resolved(x) for key, x in node.kwargs.items() if x is not None}
    try:
        return translate(tracer, *arguments, **options)
    except TypeError as error:
        raise ConversionError(
            f"{name}: torch's {target} is not taken with {node.args} {node.kwargs}"
        ) from error


def target_of(node: Any) -> str:
    """Return the name of what a node of a captured graph calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
