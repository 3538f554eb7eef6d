"""``torch.compile(model, backend="ladder")``: torch finds it by the entry point in ``pyproject.toml``."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from ladder import faults
from ladder.api.aliasing import Separated
from ladder.api.compiler import Compiler
from ladder.capture.captured import run_as_is
from ladder.capture.trace.graph_module import respell, switched
from ladder.integrations.decoded_weights import Decoded
from ladder.runtime.model.build import Built
from tile_types.errors import ValueRangeError


class DynamoCompiler(Compiler):
    """Compiles graphs of many functions."""

    def _remember(self, run: Separated, built: Built) -> None:
        """Know of a plan as long as torch keeps what runs it: this compiler stays as long as the process."""
        run.built = built
        self._built = [get for get in self._built if get() is not None] + [weakref.ref(built)]

    def program(self) -> object:
        """Return the number of the code that torch is capturing."""
        current = torch._guards.CompileContext.current_compile_id()
        return None if current is None else current.frame_id


compiler = DynamoCompiler()
"""What compiles every graph; `Compiler.built` and `Compiler.refused` say what became of each."""


def backend(
    module: torch.fx.GraphModule, examples: list[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """Compile a graph that torch's own capture made; see `ladder.compile` for ours.

    Sizes that torch left open are symbols of the plan. Floats that it left open it is asked to fix: a plan
    takes none.

    mode, options: Of `torch.compile`, with a meaning for torch's own backend alone; a mode gives a warning.
    Raises ValueRangeError if there are options.
    """
    if options:
        raise ValueRangeError(f"the backend 'ladder' takes no options, got {', '.join(map(str, options))}")
    if mode is not None:
        faults.warn_once(f"mode {mode}", f"the backend 'ladder' has no modes: mode={mode!r} changes nothing")
    fix_floats(module)
    examples = with_full_precision(module, examples)
    decoded = Decoded(module, examples)
    decoded.refuse_writes()
    examples = decoded.plain(examples)
    respell(module)
    if any(isinstance(each, FakeTensor) for each in given_for(module)):
        return decoded.marked(
            run_as_is(module, examples)
        )  # for such arguments alone, as torch guards; they have no values
    module, held = without_held(module)
    examples = [*examples, *held]
    read = [*examples, *module.parameters(), *module.buffers()]
    if why := switched(module.graph, read, torch.is_grad_enabled()):
        module.meta["switches"] = why
    opened = opened_examples(module, examples)
    if opened is not None:
        module.meta["open"] = opened
    run = compiler(module, examples)
    return decoded.marked((lambda *given: run(*given, *held)) if held else run)


def given_for(module: torch.fx.GraphModule) -> Iterator[Any]:
    """Yield what the arguments of a graph were in the call for which torch made it, as far as it tells."""
    for node in module.graph.nodes:
        if node.op == "placeholder" and (origin := node.meta.get("grapharg")) is not None:
            with suppress(AttributeError, AssertionError):  # it is let go of once guards are made
                yield origin.example


def with_full_precision(module: torch.fx.GraphModule, examples: list[Any]) -> list[Any]:
    """Return examples in which Python's floats that arrive as tensors are of float64.

    So torch hands them over, though it shows those of ``random`` as float32.
    """
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = []
    for node, example in zip(places, examples, strict=True):
        origin = node.meta.get("grapharg")
        number = getattr(origin, "pass_arg_as_tensor", False) and not origin.is_tensor  # as of numpy
        if number and isinstance(example, torch.Tensor) and example.is_floating_point():
            example = node.meta["example_value"] = example.double()
        found.append(example)
    return found


def without_held(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Return a graph whose last arguments are the tensors that the given one holds, and these tensors.

    torch leaves weights there where its own compiler is to freeze them; as arguments they are read, and
    written, anew in each call.
    """
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    held = {node.target: value for node in nodes if isinstance(value := _held(module, node), torch.Tensor)}
    if not held:
        return module, []
    copied = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta |= module.meta
    first = next(node for node in copied.graph.nodes if node.op != "placeholder")
    with copied.graph.inserting_before(first):
        places = {target: copied.graph.placeholder(f"held_{at}") for at, target in enumerate(held)}
    for node in copied.graph.nodes:
        if node.op == "get_attr" and node.target in held:
            places[node.target].meta = node.meta
            node.replace_all_uses_with(places[node.target])
            copied.graph.erase_node(node)
    copied.recompile()
    return copied, list(held.values())


def _held(module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def opened_examples(module: torch.fx.GraphModule, examples: list[Any]) -> list[Any] | None:
    """Return the examples with torch's symbols for open sizes; None if there are none."""
    places = (node for node in module.graph.nodes if node.op == "placeholder")
    known = [node.meta.get("example_value", value) for node, value in zip(places, examples, strict=True)]
    sizes = (
        size for value in known for size in (value.shape if isinstance(value, torch.Tensor) else [value])
    )
    return known if any(isinstance(size, torch.SymInt) for size in sizes) else None


def fix_floats(module: torch.fx.GraphModule) -> None:
    """Let torch begin anew with the floats as constants that it left open, guarded as such.

    They arrive as numbers, or as tensors that the graph asks for their item. Floats that are computed of
    sizes stay: `BySizes` has a plan for each.

    Raises TensorifyScalarRestartAnalysis if there are any: that is how torch is asked to.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    values = (node.meta.get("example_value") for node in module.graph.nodes)
    found = {s for v in values if isinstance(v, torch.SymFloat) for s in v.node._expr.free_symbols}
    symbols = [symbol for symbol in found if symbol_is_type(symbol, SymT.FLOAT)]
    for symbol in symbols:
        TensorifyState.specialize(str(symbol))
    if symbols:
        raise TensorifyScalarRestartAnalysis
