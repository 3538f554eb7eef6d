"""The trace: what the tensor operators of a segment compute, as one fx graph.

It knows tensors by the variables of the code around the graph, and nothing of how they were found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx

from ladder.capture.trace.assumptions import MOST_COUNTS, Assumption
from ladder.capture.trace.idle import Idle
from ladder.capture.trace.undo import Effect, to_keep
from ladder.capture.values.aliasing import storage_of, version_of
from ladder.capture.values.indices import Proven
from ladder.capture.values.kinds import is_a
from ladder.capture.values.monitor import Monitor, Place
from ladder.capture.values.settings import Setting
from ladder.capture.values.shapes import Shapes
from ladder.runtime.registered import ReadOnly
from tile_types.errors import LadderError


@dataclass(eq=False, slots=True)
class Value:
    """A tensor, or a tuple or list of them, that the graph takes or computes.

    `fx`: its node; None for an input that nothing has used yet. `dynamic`: its shape depends on values.
    `ranked`: its number of axes does not. `constant`: it is made of numbers alone, and so the same in every
    run that matches; `held`: of these and of tensors that the program holds. `inference`: whether an operator
    made it in inference mode.
    """

    var: str
    obj: Any
    fx: torch.fx.Node | None = None
    dynamic: bool = False
    constant: bool = False
    held: bool = False
    ranked: bool = True
    inference: bool = False


class Apart(NamedTuple):
    """What a trace had before a side of a branch."""

    results: list[Value]
    nodes: set[torch.fx.Node]
    proven: Proven


class Trace:
    """The graph of one segment, and what running it does besides computing.

    placeholders: (node, variable, example) of each input, in order; `versions`: how often each was written
        before.
    results: What operators gave, in order; `values`: the same and inputs, by variable.
    modules: The graphs inside of conditionals.
    written: Storage -> variable of a tensor from outside that is written; `writes`: whether any memory is.
    effects: What the operators of nodes did; conditionals and loops have none.
    impure: Whether a tensor is changed otherwise than by writing its memory.
    late: Storage -> how often it was written by what has run and is not in the graph.
    settings: Each setting of torch that is written -> what it is before the first write.
    replaced: Variable of a tensor whose data are set -> the tensor, and what it held before.
    read_only: Storage -> a tensor in it, and why it must not be written.
    idle: The results whose memory may be given back.
    inference: The instruction that first enters inference mode, or leaves it; None if none does.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.graph = torch.fx.Graph()
        self.operators = 0
        self.placeholders: list[tuple[torch.fx.Node, str, Any]] = []
        self.placed: dict[str, torch.fx.Node] = {}
        self.versions: dict[str, int | None] = {}
        self.values: dict[str, Value] = {}
        self.results: list[Value] = []
        self.modules: dict[str, torch.nn.Module] = {}
        self.assumed: list[Assumption] = []
        self.proven = Proven()
        self.written: dict[int, str] = {}
        self.effects: dict[torch.fx.Node, Effect] = {}
        self.late: Mapping[int, int] = Counter[int]()
        self.writes = self.impure = self.random = False
        self.asserts = self.may_fail = self.state_written = False
        self.settings: dict[Setting, Any] = {}
        self.replaced: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.read_only: dict[int, tuple[torch.Tensor, ReadOnly]] = {}
        self.inference: Any = None
        self.idle = Idle()

    def release(self) -> None:
        """Drop all references to tensors."""
        self.values, self.results, self.effects, self.replaced, self.read_only = {}, [], {}, {}, {}
        self.idle.release()
        self.shapes.quick.clear()

    def refuse_writes(self, storages: AbstractSet[int], name: str) -> None:
        """Raise LadderError, as eager programs do, if an operation writes what is read-only."""
        for storage in storages & self.read_only.keys():
            raise LadderError(f"{name} {self.read_only[storage][1].why}")

    @property
    def changes_tensors(self) -> bool:
        return self.impure or bool(self.written) or bool(self.replaced)

    @property
    def switches(self) -> bool:
        """Whether the state of torch is written."""
        return self.state_written or bool(self.settings)

    # values -----------------------------------------------------------------------------------
    def value(self, var: str, tensor: Any) -> Value:
        """Return what is known of a tensor by its variable."""
        known = self.values.get(var)
        if known is None:
            known = self.values[var] = Value(var, tensor)
        return known

    def is_dynamic(self, var: str) -> bool:
        """Say whether the shape of a tensor depends on values."""
        known = self.values.get(var)
        return known is not None and known.dynamic

    def is_constant(self, var: str) -> bool:
        """Say whether a tensor is made of numbers alone."""
        known = self.values.get(var)
        return known is not None and known.constant

    def placeholder(self, var: str, example: Any) -> torch.fx.Node:
        """Return the input that variable `var` of the code is given to."""
        known = self.placed.get(var)
        if known is not None:
            return known
        graph, last = self.graph, self.placeholders[-1][0] if self.placeholders else None
        with graph.inserting_before(None) if last is None else graph.inserting_after(last):
            node = graph.placeholder(var if var.isidentifier() else f"a{len(self.placeholders)}")
        self.placeholders.append((node, var, example))
        self.placed[var] = node
        self.versions[var] = version_of(example)
        return node

    def stand_in(self, var: str, place: Place) -> None:
        """Let an input of the graph that lies otherwise now have an example that lies as it did."""
        for at, (node, given, example) in enumerate(self.placeholders):
            if given == var:
                try:
                    lying = example.detach().as_strided(*place)
                except RuntimeError:  # its memory is another, and smaller
                    lying = example.new_empty_strided(*place[:2])
                self.placeholders[at] = node, var, lying

    def add(self, value: Value) -> Value:
        """Register what an operator has given."""
        self.values[value.var] = value
        self.results.append(value)
        self.idle.add(value)
        return value

    @contextmanager
    def at_entry(self) -> Iterator[None]:
        """Let tensors hold what they held when the segment began."""
        held = [(tensor, tensor.data) for tensor, _ in self.replaced.values()]
        for tensor, before in self.replaced.values():
            tensor.data = before
        try:
            yield
        finally:
            for tensor, after in held:
                tensor.data = after

    def assume(self, var: str, number: Any, here: Any) -> None:
        """Take a number that the graph computes to be what it is in this run."""
        made = Assumption(var, number, here, MOST_COUNTS)
        if made not in self.assumed:
            self.assumed.append(made)

    # effects ----------------------------------------------------------------------------------
    def note(self, monitor: Monitor, outside: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note what an operator did: to results, and to tensors from `outside` that it wrote, by variable."""
        self.random |= monitor.random
        self.asserts |= [] in monitor.risks
        if not monitor.mutated:
            return
        self.writes = True
        for value in self.results:
            if (value.constant or value.held) and self._is_written(value.obj, monitor):
                value.constant = value.held = False
        for var, tensor in outside:
            self.written[storage_of(tensor)] = var

    def _is_written(self, tensor: Any, monitor: Monitor) -> bool:
        strided = is_a(tensor, torch.Tensor) and tensor.layout is torch.strided
        return strided and storage_of(tensor) in monitor.mutated

    def to_keep(self) -> list[str]:
        """Return the tensors from outside whose memory is put back where a run of the graph fails."""
        if self.assumed or self.modules:  # what runs instead may be another way
            return [*self.written.values()]
        kept = to_keep(self.graph, self.effects, self.written) if self.may_fail else ()
        return [var for key, var in self.written.items() if key in kept]

    def can_fail(self, monitor: Monitor) -> bool:
        """Tell whether what has just run may raise in a later run; its indices are known to be good then."""
        risks = monitor.risks
        fails = any(risk is None or not all(map(self.proven.covers, risk)) for risk in risks)
        for use in (use for risk in risks for use in risk or ()):
            self.proven.add(use)
        return fails

    # sides of branches ------------------------------------------------------------------------
    def set_apart(self) -> Apart:
        """Begin a side of a branch; return what `take_back` needs to forget it."""
        kept = Apart(self.results, set(self.graph.nodes), self.proven)
        self.results, self.proven = [], self.proven.copy()
        return kept

    def take_back(self, kept: Apart) -> None:
        """Forget what was computed on a side."""
        self.results, self.proven = kept.results, kept.proven

    def added(self, kept: Apart, returned: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
        """Return the nodes of a side that returns `returned`."""
        without_unused_parts(self.graph, {*returned, *kept.nodes})
        return [node for node in self.graph.nodes if node not in kept.nodes and node.op != "placeholder"]


def without_unused_parts(graph: torch.fx.Graph, kept: Iterable[torch.fx.Node] = ()) -> None:
    """Erase the nodes that only take a part of a result and that nothing uses, besides `kept`."""
    needed = set(kept)
    for node in reversed(list(graph.nodes)):
        if node.meta.get("part") and not node.users and node not in needed:
            graph.erase_node(node)
