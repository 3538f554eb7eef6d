"""Graphs with operators whose result shapes depend on values: those run in torch, what lies between as plans.

How many rows ``nonzero`` gives is known once it has run. So the graph is compiled piece by piece as it runs:
up to such an operator, the operator itself, and on with what it gave; once for each set of sizes. A piece
also ends where tensors of another device begin.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ladder.api.tensor_program import target_of
from ladder.capture.values.fakes import fake_in
from ladder.interrupts import pass_on

Node = torch.fx.Node
Make = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]

MOST_PLANS = 8
"""Sets of sizes for which what begins at one operator gets plans."""

FEWEST_STEPS = 16
"""Operators, views aside, of a piece that gets a plan: fewer take less time in torch than a plan does."""

PLANNED = ("cpu", "cuda")
"""Kinds of devices that plans are made for."""

PLAIN = ("placeholder", "call_function", "call_method", "output")
"""Kinds of nodes that graphs in pieces may have."""

STATEFUL = (
    "autocast",
    "_enter",
    "_exit",
    "_nesting",
    "_set_grad_enabled",
    "_set_default_dtype",
    "manual_seed",
)
"""Parts of names of functions that change torch's state: nothing may be cut between them."""


class Piece(NamedTuple):
    """A piece of a graph: its callable, its operands and results, and the index of the node after it."""

    run: Callable[..., Any]
    reads: Sequence[Node]
    gives: Sequence[Node]
    end: int


def can_be_cut(module: torch.fx.GraphModule) -> bool:
    """Tell whether a graph may run piece by piece; a piece may not."""
    if module.meta.get("piece"):
        return False
    calls = _calls(module)
    names = [getattr(node.target, "__name__", "") for node in calls]
    state = any(word in name for name in names for word in STATEFUL)
    several = sum(not _takes_part(node) for node in calls) > 1
    return several and not state and all(node.op in PLAIN for node in module.graph.nodes)


def _calls(module: torch.fx.GraphModule) -> list[Node]:
    """Return the nodes that are to be run."""
    return [n for n in module.graph.nodes if n.op.startswith("call") and not _changes_nothing(n)]


def _changes_nothing(node: Node) -> bool:
    """Tell whether a node switches the recording of gradients off that is off, as ``torch.no_grad`` does."""
    return node.target is torch._C._set_grad_enabled and not torch.is_grad_enabled() and node.args == (False,)


def _takes_part(node: Node) -> bool:
    """Tell whether a node takes one of several results."""
    taken = node.target is operator.getitem and isinstance(node.args[0], Node)
    return taken and isinstance(node.args[1], int)


class Pieces:
    """Runs a graph piece by piece.

    module: The graph.
    make: Compiles a piece.
    tell: Called with the name of each operator that runs in torch, and why.
    """

    def __init__(self, module: torch.fx.GraphModule, make: Make, tell: Callable[[str], None]) -> None:
        self.make, self.tell = make, tell
        self.places = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.nodes = _with_parts_behind(_calls(module))
        self.results = module.graph.output_node().args[0]
        self.live = self._live()
        self.steps: list[dict[tuple[Node, ...], dict[Any, Piece]]] = [{} for _ in self.nodes]
        self.plans = dict.fromkeys(range(len(self.nodes)), 0)

    def _live(self) -> list[list[Node]]:
        """Return the values that are read from each node on and made before it."""
        numbers = {node: at for at, node in enumerate(self.nodes)}
        last: dict[Node, int] = {}
        for at, node in enumerate(self.nodes):
            last.update(dict.fromkeys(node.all_input_nodes, at))
        map_arg(self.results, lambda node: last.__setitem__(node, len(self.nodes)))
        made = {**dict.fromkeys(self.places, -1), **numbers}
        return [
            [node for node, until in last.items() if until >= at and made[node] < at]
            for at in range(len(self.nodes) + 1)
        ]

    def __call__(self, *values: Any) -> Any:
        known: dict[Node, Any] = dict(zip(self.places, values, strict=True))
        at = 0
        while at < len(self.nodes):
            step = self._known_step(at, known) or self._new_step(at, known)
            found = step.run(*(known[node] for node in step.reads))
            known.update(zip(step.gives, found, strict=True))
            at = step.end
        return map_arg(self.results, known.__getitem__)

    def _known_step(self, at: int, known: dict[Node, Any]) -> Piece | None:
        """Return the piece that begins at a node, for these sizes or for all, if there is one."""
        for sizes, steps in self.steps[at].items():
            if step := steps.get(_signatures(sizes, known)):
                return step
        return None

    def _new_step(self, at: int, known: dict[Node, Any]) -> Piece:
        """Make the piece that begins at a node, as far as a trace goes; a short one takes what is behind."""
        self.plans[at] += 1
        end, why, fakes = self._reach(at, known)
        made = [fakes[node] for node in self.nodes[at:end]]
        few = sum(isinstance(each, torch.Tensor) and not each._is_view() for each in made) < FEWEST_STEPS
        whole = few or self.plans[at] > MOST_PLANS
        if few and end < len(self.nodes):
            self.tell(f"{target_of(self.nodes[end])} runs in torch: {why}")
            end = self._behind(end)
        reads, gives = self._around(at, end)
        module = _piece(self.nodes[at:end], reads, gives)
        run = module.forward if whole else self.make(module, [known[node] for node in reads])
        step = Piece(run, reads, gives, end)
        sizes = () if whole else tuple(self._around(at, min(end + 1, len(self.nodes)))[0])
        self.steps[at].setdefault(sizes, {})[_signatures(sizes, known)] = step
        return step

    def _reach(self, at: int, known: dict[Node, Any]) -> tuple[int, str, dict[Node, Any]]:
        """Return the number of the first node from one on that cannot be traced, why, and fakes of values."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes, strange = _fakes(mode, {node: known[node] for node in self.live[at]})
        devices: set[torch.device] = set()
        for number in range(at, len(self.nodes)):
            node = self.nodes[number]
            if odd := [value for value in node.all_input_nodes if value in strange]:
                return number, f"{odd[0]} has no fake tensor: {strange[odd[0]]}", fakes
            try:
                args, kwargs = map_arg((node.args, node.kwargs), fakes.__getitem__)
                with mode:
                    found = _called(node, args, kwargs)
            except Exception as error:
                return number, _why(error), fakes
            met = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)]
            devices |= {each.device for each in met}
            if len(devices) > 1 or any(each.type not in PLANNED for each in devices):
                return number, f"tensors lie on {', '.join(sorted(map(str, devices)))}", fakes
            fakes[node] = found
        return len(self.nodes), "", fakes

    def _behind(self, at: int) -> int:
        """Return the number of the node behind one and what takes its results apart."""
        rest = self.nodes[at + 1 :]
        parts = takewhile(lambda node: _takes_part(node) and node.args[0] is self.nodes[at], rest)
        return at + 1 + len(list(parts))

    def _around(self, at: int, end: int) -> tuple[list[Node], list[Node]]:
        """Return the values from outside that a piece reads, and its own values that later nodes read."""
        inside = set(self.nodes[at:end])
        read = dict.fromkeys(value for node in self.nodes[at:end] for value in node.all_input_nodes)
        return [node for node in read if node not in inside], [n for n in self.live[end] if n in inside]


def _with_parts_behind(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes with what takes results apart right behind what makes them."""
    parts: dict[Node, list[Node]] = {}
    for node in nodes:
        if _takes_part(node):
            parts.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
    found: list[Node] = []
    ahead = [node for node in reversed(nodes) if not (_takes_part(node) and node.args[0] in set(nodes))]
    while ahead:
        node = ahead.pop()
        found.append(node)
        ahead += reversed(parts.get(node, []))
    return found


def _piece(nodes: Iterable[Node], reads: Sequence[Node], gives: Sequence[Node]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in reads}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in gives))
    piece = torch.fx.GraphModule(torch.nn.Module(), graph)
    piece.meta["piece"] = True
    return piece


def _signatures(nodes: Iterable[Node], known: dict[Node, Any]) -> tuple[Any, ...]:
    """Return what a piece depends on that is for the sizes of `nodes`."""
    return tuple([_signature(known[node]) for node in nodes])


def _signature(value: Any) -> Any:
    """Return what the pieces for a value depend on."""
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and not value.is_nested
        return (value.shape, value.stride(), value.dtype) if strided else (value.layout, value.dtype)
    return tuple(map(_signature, value)) if isinstance(value, tuple | list) else (type(value), value)


def _why(error: Exception) -> str:
    pass_on(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _fakes(mode: FakeTensorMode, known: dict[Node, Any]) -> tuple[dict[Node, Any], dict[Node, str]]:
    """Return fake tensors of values, and why other values, such as nested tensors, have none."""
    fakes: dict[Node, Any] = {}
    strange: dict[Node, str] = {}
    for node, value in known.items():
        try:
            fakes[node] = _fake(mode, value)
        except Exception as error:  # what torch raises for a layout or a type is not documented
            strange[node] = _why(error)
    return fakes, strange


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fake_in(mode, value)
    return type(value)(_fake(mode, item) for item in value) if type(value) in (tuple, list) else value


def _called(node: Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
