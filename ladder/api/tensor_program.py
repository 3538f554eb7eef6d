"""From a torch function to a program over named dimensions, which the superoptimizer takes.

The function runs once under `ladder.capture`, which gives its graph of tensor operators. Axes that must have
the same extent, whatever it is, are one dimension: equal numbers alone are no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ladder.ir.build import GraphBuilder, prune
from ladder.ir.graph import Graph
from ladder.superopt.generator import Program
from tile_types import group_scaled
from tile_types.errors import ConversionError, ShapeError
from tile_types.quantized import QuantizedTensor

if TYPE_CHECKING:
    import torch

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Traced:
    """A value of the traced function.

    Parameters
    ----------
    number
        Of the step that computes it; inputs come first.
    axes
        The dimension of each axis, as `Dimensions` numbers them; 0 for an axis of one element.
    transposed
        Whether the last two axes are meant the other way round: only a product's second operand may be.
    inverse
        Whether it stands for its reciprocal: ``x * rsqrt(y)`` is ``x / sqrt(y)``.
    """

    number: int
    axes: tuple[int, ...]
    transposed: bool = False
    inverse: bool = False


@dataclass
class Dimensions:
    """Dimensions by number, joined where axes must agree."""

    sizes: list[int] = field(default_factory=lambda: [1])
    parents: list[int] = field(default_factory=lambda: [0])

    def new(self, size: int) -> int:
        """Return a new dimension, or 0 for one element."""
        if size == 1:
            return 0
        self.sizes.append(size)
        self.parents.append(len(self.parents))
        return len(self.parents) - 1

    def root(self, dimension: int) -> int:
        """Return the dimension that stands for all that were joined with one."""
        while self.parents[dimension] != dimension:
            dimension = self.parents[dimension]
        return dimension

    def join(self, a: int, b: int) -> int:
        """Make two dimensions one."""
        a, b = self.root(a), self.root(b)
        if self.sizes[a] != self.sizes[b]:
            raise ShapeError(f"axes of {self.sizes[a]} and {self.sizes[b]} elements must agree")
        self.parents[max(a, b)] = min(a, b)
        return min(a, b)


@dataclass(frozen=True)
class OverSize:
    """The number 1 / size of a dimension: while tracing its number, in a program its name."""

    dimension: int | str


@dataclass(frozen=True)
class Step:
    """One operator: a row of the operator table, operands, attributes; an attribute may be `OverSize`."""

    operator: str
    operands: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...]

    def completed(self, sizes: Sizes) -> dict[str, Any]:
        """Return the attributes as numbers."""
        return {
            name: 1.0 / sizes[str(value.dimension)] if isinstance(value, OverSize) else value
            for name, value in self.attributes
        }


@dataclass(frozen=True)
class Definition:
    """A program as steps: what `Program.define` is; it can go to other processes.

    Parameters
    ----------
    name, dtype
        Of the program and of its inputs.
    shapes
        Dimensions of each input, by name or 1.
    steps
        In order.
    output
        Number of the result.
    """

    name: str
    dtype: str
    shapes: tuple[tuple[str | int, ...], ...]
    steps: tuple[Step, ...]
    output: int

    def __call__(self, extents: Mapping[str, Any], sizes: Sizes) -> Graph:
        """Return the graph with these extents; constants follow the sizes."""
        g = GraphBuilder(self.name)
        values = [
            g.input(f"X{i}", self.dtype, [extents[x] if isinstance(x, str) else x for x in shape])
            for i, shape in enumerate(self.shapes)
        ]
        for step in self.steps:
            attributes = step.completed(sizes)
            if step.operator == "constant":
                attributes["type"] = self.dtype
            values.append(g.add(step.operator, *(values[i] for i in step.operands), **attributes))
        return prune(g.finish(values[self.output]))


class Tracer:
    """Translates a graph of torch operators.

    Parameters
    ----------
    epsilon
        What norms add to a mean square unless told otherwise: torch takes the type's own.
    """

    def __init__(self, epsilon: float = 0.0) -> None:
        self.epsilon = epsilon
        self.dimensions = Dimensions()
        self.inputs: list[Traced] = []
        self.steps: list[Step] = []

    def input(self, shape: Sequence[int]) -> Traced:
        """Declare an input."""
        found = Traced(len(self.inputs), tuple(self.dimensions.new(size) for size in shape))
        self.inputs.append(found)
        return found

    def weight(self, shape: Sequence[int]) -> Traced:
        """Declare a quantized input ``[N, K]``: the program has it as ``[K, N]``, as products take it."""
        found = self.input(shape[::-1])
        return replace(found, axes=found.axes[::-1], transposed=True)

    def add(
        self, operator: str, operands: Sequence[Traced], axes: Sequence[int], **attributes: Any
    ) -> Traced:
        """Add a step."""
        for operand in operands:
            if operand.transposed:
                raise ConversionError(
                    f"{operator} takes a transposed tensor; only matmul's second operand may be"
                )
        numbers = tuple(operand.number for operand in operands)
        self.steps.append(Step(operator, numbers, tuple(attributes.items())))
        return Traced(len(self.inputs) + len(self.steps) - 1, tuple(axes))

    def constant(self, value: Any) -> Traced:
        """Add a number, or one that depends on sizes."""
        return self.add("constant", (), (), value=value)

    def value(self, x: Any) -> Traced:
        """Return a tensor as it is, and a number as a constant."""
        if isinstance(x, Traced):
            return self.reciprocal(x) if x.inverse else x
        return self.constant(float(x))

    def reciprocal(self, x: Traced) -> Traced:
        """Return ``1 / x`` of what stands for its reciprocal."""
        return self.add("div", (self.constant(1.0), replace(x, inverse=False)), x.axes)

    def elementwise(self, operator: str, *operands: Any) -> Traced:
        """Apply an element-wise operator; axes align at the right, those of one element stretch."""
        values = [self.value(x) for x in operands]
        rank = max(len(x.axes) for x in values)
        axes = [0] * rank
        for value in values:
            for offset, dimension in enumerate(value.axes, rank - len(value.axes)):
                joined = axes[offset] and dimension
                axes[offset] = (
                    self.dimensions.join(axes[offset], dimension) if joined else axes[offset] or dimension
                )
        return self.add(operator, values, axes)

    def name(self, dimension: int) -> str | int:
        """Return a dimension's name, or 1."""
        root = self.dimensions.root(dimension)
        return f"D{root}" if root else 1

    def program(self, name: str, result: Traced, dtype: str) -> Program:
        """Return the program."""
        shapes = [tuple(self.name(axis) for axis in x.axes) for x in self.inputs]
        used = [name for shape in shapes for name in shape if isinstance(name, str)]
        sizes = {name: self.dimensions.sizes[int(name[1:])] for name in dict.fromkeys(used)}
        steps = tuple(
            replace(step, attributes=tuple((n, self._named(value)) for n, value in step.attributes))
            for step in self.steps
        )
        definition = Definition(name, dtype, tuple(shapes), steps, result.number)
        return Program(name, definition, sizes)

    def _named(self, value: Any) -> Any:
        """Return an attribute with its dimension's name: all that must agree are joined by now."""
        return OverSize(self.name(int(value.dimension))) if isinstance(value, OverSize) else value


# ---- torch's operators -----------------------------------------------------------------------------------
def _matmul(t: Tracer, a: Traced, b: Traced) -> Traced:
    a, b = t.value(a), t.value(b)
    inner = b.axes[-2]
    if len(a.axes) < 2 or len(b.axes) < 2:
        raise ConversionError("matmul of a vector is not taken; give it an axis of one element")
    t.dimensions.join(a.axes[-1], inner)
    leading = []
    for x, y in zip(_leading(a, b), _leading(b, a), strict=True):
        leading.append(t.dimensions.join(x, y) if x and y else x or y)
    plain = replace(b, transposed=False)
    return t.add("matmul", (a, plain), (*leading, a.axes[-2], b.axes[-1]), transpose_b=b.transposed)


def _linear(t: Tracer, x: Traced, weight: Traced, bias: Any = None) -> Traced:
    y = _matmul(t, x, _transpose(t, weight))
    return y if bias is None else t.elementwise("add", y, bias)


def _leading(x: Traced, other: Traced) -> tuple[int, ...]:
    missing = max(len(other.axes) - len(x.axes), 0)
    return (0,) * missing + x.axes[:-2]


def _transpose(t: Tracer, x: Traced, *axes: int) -> Traced:
    rank = len(x.axes)
    swapped = {axis % rank for axis in (axes or (-1, -2))}
    if swapped != {rank - 1, rank - 2}:
        raise ConversionError("only the last two axes are transposed")
    flipped = (*x.axes[:-2], x.axes[-1], x.axes[-2])
    return replace(x, axes=flipped, transposed=not x.transposed)


def _attribute(t: Tracer, x: Traced, name: str) -> Traced:
    if name != "mT" and (name != "T" or len(x.axes) != 2):
        raise ConversionError(f"a tensor's attribute {name} is not taken; .T of a matrix and .mT are")
    return _transpose(t, x)


def _multiply(t: Tracer, a: Any, b: Any) -> Traced:
    if isinstance(a, Traced) and a == b:
        return t.elementwise("square", a)
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Traced) and y.inverse and not (isinstance(x, Traced) and x.inverse):
            return t.elementwise("div", x, replace(y, inverse=False))
    return t.elementwise("mul", a, b)


def _divide(t: Tracer, a: Any, b: Any) -> Traced:
    return t.elementwise("div", a, b) if isinstance(b, Traced) else t.elementwise("mul", a, 1.0 / b)


def _power(t: Tracer, x: Traced, exponent: float) -> Traced:
    if exponent != 2:
        raise ConversionError(f"the power {exponent} is not taken; squares are")
    return t.elementwise("square", x)


def _axis(x: Traced, dim: Any, keepdim: bool, what: str) -> int:
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    if len(axes) != 1 or not keepdim:
        raise ConversionError(f"{what} is taken along one axis, with keepdim=True")
    return int(axes[0]) % len(x.axes)


def _reduction(operator: str) -> Callable[..., Traced]:
    def reduce(t: Tracer, x: Traced, dim: Any, keepdim: bool = False) -> Traced:
        x = t.value(x)
        axis = _axis(x, dim, keepdim, operator)
        axes = (*x.axes[:axis], 0, *x.axes[axis + 1 :])
        return t.add(operator, (x,), axes, axis=axis)

    return reduce


def _mean(t: Tracer, x: Traced, dim: Any, keepdim: bool = False) -> Traced:
    axis = _axis(x, dim, keepdim, "mean")
    total = _reduction("reduce_sum")(t, x, dim, keepdim)
    return t.elementwise("mul", total, t.constant(OverSize(x.axes[axis])))


def _softmax(t: Tracer, x: Traced, dim: int, **rest: Any) -> Traced:
    most = _reduction("reduce_max")(t, x, dim, True)
    exponential = t.elementwise("exp", t.elementwise("sub", x, most))
    return t.elementwise("div", exponential, _reduction("reduce_sum")(t, exponential, dim, True))


def _rms_norm(
    t: Tracer, x: Traced, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Traced:
    if len(shape) != 1:
        raise ConversionError("rms_norm is taken along the last axis")
    mean = _mean(t, _power(t, x, 2), -1, True)
    eps = t.epsilon if eps is None else eps
    if eps:
        mean = t.elementwise("add", mean, eps)
    y = t.elementwise("div", x, t.elementwise("sqrt", mean))
    return y if weight is None else t.elementwise("mul", y, weight)


def _unary(operator: str) -> Callable[..., Traced]:
    return lambda t, x, **rest: t.elementwise(operator, x)


def _binary(operator: str) -> Callable[..., Traced]:
    return lambda t, a, b: t.elementwise(operator, a, b)


def _unchanged(t: Tracer, x: Traced, *rest: Any, **options: Any) -> Traced:
    """Conversions among a program's type and float32: block graphs compute in float32 and store that type."""
    return x


def _inverse_root(t: Tracer, x: Traced) -> Traced:
    return replace(t.elementwise("sqrt", x), inverse=True)


OPERATORS: Mapping[str, Callable[..., Traced]] = {
    "matmul": _matmul, "mm": _matmul, "bmm": _matmul, "add": _binary("add"), "sub": _binary("sub"),
    "mul": _multiply, "truediv": _divide, "div": _divide, "pow": _power,
    "square": lambda t, x: _power(t, x, 2),
    "exp": _unary("exp"), "sqrt": _unary("sqrt"), "rsqrt": _inverse_root, "silu": _unary("silu"),
    "sigmoid": _unary("sigmoid"), "tanh": _unary("tanh"), "neg": _unary("neg"), "relu": _unary("relu"),
    "sum": _reduction("reduce_sum"), "amax": _reduction("reduce_max"), "mean": _mean, "softmax": _softmax,
    "rms_norm": _rms_norm, "linear": _linear, "transpose": _transpose, "t": _transpose,
    "getattr": _attribute, "float": _unchanged, "half": _unchanged,
    "to": _unchanged, "type_as": _unchanged, "contiguous": _unchanged,
}  # fmt: skip
"""torch function or method -> what translates it."""


@dataclass(frozen=True)
class Recorded:
    """A function's graph of tensor operators.

    Parameters
    ----------
    name
        Of the function.
    module, examples
        The graph, and what its placeholders stand for.
    results
        What the function returned.
    order
        For each result, which output of the graph it is; None if the function returns a tensor, not a tuple.
    """

    name: str
    module: Any
    examples: Sequence[Any]
    results: tuple[Any, ...]
    order: tuple[int, ...] | None


def recorded(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Recorded:
    """Return a function's graph of tensor operators.

    Raises
    ------
    ConversionError
        If it is not one graph, or does not return tensors that the graph computes.
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
    results = result if isinstance(result, tuple) else (result,)
    numbers = {id(output): number for number, output in enumerate(outputs)}
    if any(id(y) not in numbers for y in results):
        raise ConversionError(f"{name} returns other than a tensor or a tuple of tensors that it computes")
    order = tuple(numbers[id(y)] for y in results)
    return Recorded(name, *graphs[0], results, order if isinstance(result, tuple) else None)


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name, ``program`` if it has none."""
    return getattr(function, "__name__", "program").strip("<>")


def program_of(function: Callable[..., Any], inputs: Sequence[Any]) -> Program:
    """Return the program that a function of tensors is.

    Parameters
    ----------
    function
        Takes the inputs, quantized ones as decoded ``[N, K]`` tensors, and returns one tensor.
    inputs
        Examples of one floating-point type, and quantized matrices; their shapes are the program's sizes.

    Raises
    ------
    ConversionError
        Names an operator or a use of one that block graphs cannot express.
    """
    tensors = decoded(inputs)
    found = recorded(function, tensors)
    return translated(found.name, found.module, found.examples, tensors, packed_types(inputs))


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

    Raises
    ------
    ConversionError
        If a scale is shared by rows, or there is one of the whole tensor: tiles have none of these.
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

    Parameters
    ----------
    module, examples
        The graph, and what its placeholders stand for.
    inputs
        In the order of the program's.
    packed
        Types of the inputs that are quantized ``[N, K]``.

    Raises
    ------
    ConversionError
        Names an operator or a use of one that block graphs cannot express.
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

    Raises
    ------
    ConversionError
        If it is rounded to another type, or computed in a finer one.
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

    Raises
    ------
    ConversionError
        Names what block graphs cannot express.
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
