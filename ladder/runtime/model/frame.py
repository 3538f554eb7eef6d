"""The memory of a plan, and its steps bound to it; sizes that are open are those of the call at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ladder.ir.build import bind
from ladder.partition.puts import numbered, written
from ladder.runtime.compile import Request, target_of
from ladder.runtime.convolve import launch
from ladder.runtime.kernel import ALIGNMENT
from ladder.runtime.model.attention import attention_call
from ladder.runtime.model.graphs import Replay
from ladder.runtime.model.library import (
    library_run,
    product_run,
    product_takes_out,
    torch_type,
    view_run,
)
from ladder.runtime.model.memory import Block, Result, divided
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.plan import Step
from ladder.runtime.model.sizes import Now, Sizes, evaluator
from ladder.runtime.threads import keep_apart
from targets import get_device
from tile_types.errors import ShapeError

if TYPE_CHECKING:
    from ladder.ir.graph import Graph
    from ladder.runtime.model.executable import Executable
    from tile_types.tile import Extent

Slots = list[Any]
Bound = Callable[[Slots], None]

MOST = (1 << 31) - 1
"""Elements that 32 bits count."""

STATES = 64
"""Sets of sizes whose buffers and CUDA graph a frame keeps."""


@dataclass(frozen=True)
class State:
    """What a frame keeps of a set of sizes.

    Parameters
    ----------
    buffers
        Memory of results of open shapes, in order.
    extents
        What steps ask for, as `Now.known` has it.
    some_empty
        Whether a value of a chain of open sizes has no elements.
    replay
        The CUDA graph; None on CPUs, and where chains are computed by reference.
    """

    buffers: list[torch.Tensor]
    extents: list[tuple[int, ...]]
    some_empty: bool
    replay: Replay | None


class Frame:
    """Slots for values, memory for those that steps write, and the steps as closures.

    Parameters
    ----------
    owner
        The executable.
    """

    def __init__(self, owner: Executable) -> None:
        self.owner, self.now = owner, Now(owner.names)
        plan = owner.plan
        self.slot = {value: at for at, value in enumerate(plan.tiles)}
        self.slots: Slots = [None] * len(self.slot)
        fixed, open_ = divided(self._results())
        self.fixed = Block(fixed, (), owner.where)
        self.open = Block(open_, self.now.names, owner.where)
        self.kept = dict(zip((result.name for result in fixed), self.fixed.buffers(()), strict=True))
        self.places = {result.name: at for at, result in enumerate(open_)}
        views = (step.part for step in plan.steps if step.part.kind == "view")
        self.shown_by = {part.outputs[0]: part.inputs[0] for part in views}
        self.buffers: list[torch.Tensor] = []
        self.states: dict[Sizes, State] = {}
        self.packed: dict[str, tuple[int, ...]] = owner.packs
        self.values: Sequence[Any] = ()
        self.inputs = [(self.slot[name], at) for name, at in owner.bindings.items()]
        self.plain: dict[int, tuple[Any, int, Any]] = {}
        for name, tensor in owner.held.items():
            self.slots[self.slot[name]] = tensor
        chains = (step.part for step in plan.steps if step.part.kind == "chain" and step.sizes)
        shapes = {tile.shape for part in chains for node in part.graph.nodes for tile in node.tiles}
        self.counted = [evaluator(shape, self.now.names) for shape in shapes if 0 not in shape]
        self.sizes: Sizes = ()
        self.some_empty = False
        self.steps: list[tuple[Bound, tuple[int, ...]]] = []
        self._bind(plan.steps)

    def call(self, values: Sequence[Any], sizes: Sizes, generation: int = 0) -> list[Any]:
        """Run with arguments of given sizes, by a CUDA graph where there is one.

        Parameters
        ----------
        values, sizes
            The arguments, and what they show.
        generation
            Grows when a tensor that stayed so far lies elsewhere, as `Look.generation`.
        """
        state = self.enter(sizes)
        return self.run(values) if state.replay is None else state.replay.run(values, generation)

    def enter(self, sizes: Sizes) -> State:
        """Let the steps run for these sizes from now on."""
        state = self.states.get(sizes)
        if state is None:
            state = self._opened(sizes)
        elif len(self.states) > 1:  # the last used is the last to go
            self.states[sizes] = self.states.pop(sizes)
        self.sizes, self.buffers, self.now.known = sizes, state.buffers, state.extents
        self.some_empty = state.some_empty
        return state

    def _opened(self, sizes: Sizes) -> State:
        """Return the state of sizes that are new.

        Raises
        ------
        ShapeError
            If a chain would read or write a tensor of so many elements that 32 bits do not count them.
        """
        elements = [prod(shape(sizes)) for shape in self.counted]
        if max(elements, default=0) > MOST:
            raise ShapeError(f"a tensor has more than {MOST} elements: chains of open sizes do not count on")
        grown = self.open.grown
        buffers = self.open.buffers(sizes)
        if self.open.grown != grown:
            self.states.clear()  # what lies in the memory before would keep it
        elif len(self.states) >= STATES:
            self.states.pop(next(iter(self.states)))
        some_empty = 0 in elements
        replay = Replay(self) if self.owner.where.type == "cuda" and not some_empty else None
        extents = self.now.evaluated(sizes)
        self.states[sizes] = state = State(buffers, extents, some_empty, replay)
        return state

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run every step; returns the graph's outputs."""
        slots, self.values = self.slots, values
        for slot, at in self.inputs:
            value = values[at]
            slots[slot] = self._without_gradient(at, value) if value.requires_grad else value
        if self.owner.where.type == "cpu":
            keep_apart()
        for step, dead in self.steps:
            step(slots)
            for slot in dead:
                slots[slot] = None
        found = [slots[self.slot[value]] for value in self.owner.plan.outputs]
        if self.owner.copied:
            self._update(values, found)
        for at in self.lasting:
            found[at] = found[at].clone()  # the caller may write into what it gets
        for slot, _ in self.inputs:
            slots[slot] = None
        for slot in self.results:
            slots[slot] = None
        self.values = ()
        return found

    def _update(self, values: Sequence[Any], found: Sequence[Any]) -> None:
        """Let arguments take outputs; the executable counts that they were written."""
        targets = [values[at] for at, _ in self.owner.copied]
        counted = tuple(target for target in targets if not target.is_inference())
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(counted):
            torch._foreach_copy_(targets, [found[output] for _, output in self.owner.copied])

    def _without_gradient(self, at: int, value: Any) -> Any:
        """Return the plain tensor of a parameter: kernels take no other; kept from call to call."""
        known = self.plain.get(at)
        if known is not None and known[0] is value and known[1] == value.data_ptr():
            return known[2]
        plain = value.detach()
        self.plain[at] = (value, value.data_ptr(), plain)
        return plain

    # memory ---------------------------------------------------------------------------------------
    @property
    def arena(self) -> int:
        """Bytes that intermediate results take."""
        return self.fixed.memory.numel() + self.open.memory.numel()

    def total(self) -> int:
        """Return the bytes of intermediate results side by side, of the sizes of the last call."""
        return self.fixed.total(()) + self.open.total(self.sizes)

    def _results(self) -> list[Result]:
        """Return what steps of ours write and what is no result of the plan."""
        plan = self.owner.plan
        kept = self._shown(plan.outputs)
        found = []
        for number, step in enumerate(plan.steps):
            if step.constant or not self._writes_in_place(step):
                continue
            for value in step.part.outputs:
                if value not in kept and value not in plan.in_place:
                    tile = plan.tiles[value]
                    dtype = torch_type(tile.ttype.name)
                    found.append(Result(value, tile.shape, dtype, number, plan.last_use[value]))
        return found

    def _shown(self, outputs: Sequence[str]) -> set[str]:
        """Return the results and what they are views of."""
        shown = set(outputs)
        for step in reversed(self.owner.plan.steps):
            if step.part.shares and shown & set(step.part.outputs):
                shown |= set(step.part.inputs)
        constants = self._constants()
        self.results = [self.slot[value] for value in shown - constants if value in self.slot]
        for step in self.owner.plan.steps:
            if step.part.shares and constants & set(step.part.inputs):
                constants |= set(step.part.outputs)
        self.lasting = [at for at, value in enumerate(outputs) if value in constants]
        return shown

    def _constants(self) -> set[str]:
        """Return the values that stay from call to call."""
        return {*self.owner.held, *(v for s in self.owner.plan.steps if s.constant for v in s.part.outputs)}

    def target(self, value: str) -> Callable[[], torch.Tensor]:
        """Return what gives the memory that a step writes a value to."""
        base = self.owner.plan.in_place.get(value)
        if base is not None:
            slot = self.slot[base]
            return lambda: self.slots[slot]
        if value in self.kept:
            buffer = self.kept[value]
            return lambda: buffer
        if value in self.places:
            at = self.places[value]
            return lambda: self.buffers[at]
        tile, where = self.owner.plan.tiles[value], self.owner.where
        shape, dtype = self.now.numbers(tile.shape), torch_type(tile.ttype.name)
        return lambda: torch.empty(shape(), dtype=dtype, device=where)

    def lies_still(self, value: str) -> bool:
        """Tell whether a value is in the frame's own memory, or a view of what is."""
        if value in self.kept or value in self.places:
            return True
        return value in self.shown_by and self.lies_still(self.shown_by[value])

    # steps ----------------------------------------------------------------------------------------
    def _bind(self, steps: Sequence[Step]) -> None:
        last = self.owner.plan.last_use
        constant = self._constants()
        for number, step in enumerate(steps):
            bound = _BINDERS[step.part.kind](self, step)
            if step.constant:
                bound(self.slots)
                continue
            mine = [*step.part.inputs, *step.part.outputs]
            dead = {
                self.slot[value]
                for value in mine
                if value in self.slot and last[value] <= number and value not in constant
            }
            self.steps.append((bound, tuple(dead)))

    def reads(self, step: Step) -> tuple[int, ...]:
        """Return the slots that a step reads."""
        return tuple(self.slot[value] for value in step.part.inputs)

    def lasting_inputs(self, step: Step) -> frozenset[str]:
        """Return the inputs of a step's graph, on a CPU, that no step writes: what stays, or says if not."""
        if self.owner.where.type != "cpu":
            return frozenset()
        constants, bindings, changed = self._constants(), self.owner.bindings, self.owner.changed
        inside = (node.name for node in step.part.graph.inputs)
        given = zip(inside, step.part.inputs, strict=True)
        return frozenset(
            name
            for name, value in given
            if value in constants or (value in bindings and bindings[value] not in changed)
        )

    def _writes_in_place(self, step: Step) -> bool:
        """Tell whether a step writes into memory that it is given."""
        if step.part.kind == "product":
            return product_takes_out(step.part.graph, self.lasting_inputs(step))
        return step.part.kind in ("gemm", "chain", "attention")


def _bind_chain(frame: Frame, step: Step) -> Bound:
    entry: Any = frame.owner.kernels.get(step.entry)  # none where every result is known to be empty
    numbers = frame.now.numbers(step.sizes)
    in_place = set(written(step.part).values())
    reads = tuple(frame.slot[value] for value in step.part.inputs if value not in in_place)
    writes = tuple((frame.slot[value], frame.target(value)) for value in step.part.outputs)
    numbers_of_rows = _rows_to_check(frame, step)
    names = frame.now.names
    extents = evaluator(_extents_within(step.part.graph), names) if step.sizes else lambda sizes: ()

    def run(slots: Slots) -> None:
        operands = [slots[slot] for slot in reads]
        operands = [x if x.is_contiguous() and not x.data_ptr() % ALIGNMENT else _copied(x) for x in operands]
        for slot, extent in numbers_of_rows:
            _require_rows(slots[slot], extent()[0])
        results = []
        for slot, target in writes:
            slots[slot] = result = target()
            results.append(result)
        if (entry is None or frame.some_empty) and not any(result.numel() for result in results):
            return
        into = [y if y.is_contiguous() and not y.data_ptr() % ALIGNMENT else _copied(y) for y in results]
        if frame.some_empty and 0 in extents(frame.sizes):
            given = [slots[frame.slot[value]] for value in step.part.inputs]
            by_reference(bind(step.part.graph, dict(zip(names, frame.sizes, strict=True))), given, into)
        else:
            entry(*numbers(), *map(_at_least_1d, operands), *map(_at_least_1d, into))
        for result, copy in zip(results, into, strict=True):
            if copy is not result:  # an argument that lies otherwise
                result.copy_(copy)

    return run


def _extents_within(graph: Graph) -> tuple[Extent, ...]:
    """Return the extents of all values of a chain of which a kernel does not know whether they are 0."""
    extents = (e for node in graph.nodes for tile in node.tiles for e in tile.shape)
    return tuple(dict.fromkeys(extent for extent in extents if extent != 0))


def by_reference(graph: Graph, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Compute a chain by the table's reference: kernels do not read tensors that have no elements."""
    from ladder.ir import evaluate

    given = [x.detach().cpu() for x in operands]
    arrays = [(x.double() if x.is_floating_point() else x).numpy() for x in given]
    found = evaluate(graph, arrays)
    for value, result in zip(found if isinstance(found, tuple) else (found,), results, strict=True):
        result.copy_(torch.from_numpy(np.array(value)))


def _rows_to_check(frame: Frame, step: Step) -> list[tuple[int, Callable[[], tuple[int, ...]]]]:
    """Return (slot, extent) of what says where a chain puts rows; GPUs leave out rows beyond the end."""
    if frame.owner.where.type != "cpu":
        return []
    return [(frame.slot[v], frame.now.numbers((extent,))) for v, extent in numbered(step.part).items()]


def _require_rows(numbers: torch.Tensor, extent: int) -> None:
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < extent:
        raise IndexError(f"rows {numbers.tolist()} are to be put into {extent}")


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels read it: rows one after the other, from an aligned address on."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that kernels take: numbers have one axis there."""
    return tensor if tensor.ndim else tensor.reshape(1)


def _bind_gemm(frame: Frame, step: Step) -> Bound:
    gemm = step.part.gemm
    assert gemm is not None  # that is what a gemm part has
    if "contract" in step.part.operators:
        return _bind_convolution(frame, step)
    kernel = frame.owner.operator(step.entry or Request(gemm).text)
    at = dict(step.part.roles)
    by_name = dict(zip((node.name for node in step.part.graph.inputs), step.part.inputs, strict=True))
    slots_of = {
        role: frame.slot[by_name[name]] for role, name in at.items() if role not in ("B", "row_scale")
    }
    arrays = frame.packed[by_name[at["B"]]]
    value = step.part.outputs[0]
    place, target = frame.slot[value], frame.target(value)
    rows, bias, scale = slots_of["A"], slots_of.get("bias"), slots_of.get("token_scale")

    def run(slots: Slots) -> None:
        slots[place] = out = target()
        weight = [frame.values[position] for position in arrays]
        extras = [None if slot is None else slots[slot] for slot in (bias, scale)]
        kernel.into(slots[rows], weight, out, *extras)

    return run


def _bind_convolution(frame: Frame, step: Step) -> Bound:
    kernel = frame.owner.operator(step.entry)
    outside = dict(zip((node.name for node in step.part.graph.inputs), step.part.inputs, strict=True))
    values = {role: outside[name] for role, name in step.part.roles}
    arrays = frame.packed[values.pop("B")]
    image = frame.slot[values["A"]]
    roles = ("bias", "residual", "factor")
    extras = [frame.slot[values[role]] if role in values else None for role in roles]
    value = step.part.outputs[0]
    place, target = frame.slot[value], frame.target(value)
    rank = len(frame.owner.plan.tiles[value].shape)

    def run(slots: Slots) -> None:
        x, out = slots[image], target()
        slots[place] = out
        further = [None if slot is None else slots[slot] for slot in extras]
        rows = [_image(tensor, rank) for tensor in (x, further[1], out)]
        weight = [frame.values[at] for at in arrays]
        launch(kernel, rows[0], weight, further[0], rows[1], rows[2], further[2])

    return run


def _image(tensor: Any, rank: int) -> Any:
    """Return a tensor of one spatial axis as an image of one row."""
    return tensor.unsqueeze(1) if tensor is not None and rank == 3 else tensor


def _bind_attention(frame: Frame, step: Step) -> Bound:
    entries = [frame.owner.kernels[name] for name in step.entry.split()]
    call = attention_call(entries, step.part.graph, get_device(target_of(frame.owner.where)))
    reads, value = frame.reads(step), step.part.outputs[0]
    place, target = frame.slot[value], frame.target(value)

    def run(slots: Slots) -> None:
        slots[place] = call(*(slots[slot] for slot in reads), target())

    return run


def _bind_product(frame: Frame, step: Step) -> Bound:
    lasting = frame.lasting_inputs(step)
    run_product = product_run(step.part, frame.now, lasting)
    in_place = product_takes_out(step.part.graph, lasting)
    reads, place = frame.reads(step), frame.slot[step.part.outputs[0]]
    target = frame.target(step.part.outputs[0])

    def run(slots: Slots) -> None:
        operands = [slots[slot] for slot in reads]
        slots[place] = run_product(*operands, out=target()) if in_place else run_product(*operands)

    return run


def _bind_library(frame: Frame, step: Step) -> Bound:
    return _bind_call(frame, step, library_run(step.part.graph, frame.now))


def _bind_nodes(frame: Frame, step: Step) -> Bound:
    return _bind_call(frame, step, graph_run(step.part.graph, frame.now, frame.owner.where))


def _bind_call(frame: Frame, step: Step, call: Callable[..., Any]) -> Bound:
    reads = frame.reads(step)
    places = tuple(frame.slot[value] for value in step.part.outputs)

    def run(slots: Slots) -> None:
        found = call(*(slots[slot] for slot in reads))
        for place, value in zip(places, found if isinstance(found, tuple | list) else (found,), strict=True):
            slots[place] = value

    return run


def _bind_view(frame: Frame, step: Step) -> Bound:
    view, (source,) = view_run(step.part.graph, frame.now), frame.reads(step)
    place = frame.slot[step.part.outputs[0]]
    if frame.lies_still(step.part.inputs[0]):
        return _kept_view(frame, view, source, place)

    def run(slots: Slots) -> None:
        slots[place] = view(slots[source])

    return run


def _kept_view(frame: Frame, view: Callable[[Any], Any], source: int, place: int) -> Bound:
    """Return a view of memory of the frame's own: it is made again for another buffer or other sizes."""
    of, made, sizes = None, None, frame.sizes

    def run(slots: Slots) -> None:
        nonlocal of, made, sizes
        given = slots[source]
        if given is of and frame.sizes == sizes:
            slots[place] = made
            return
        slots[place] = found = view(given)
        if found.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            of, made, sizes = given, found, frame.sizes

    return run


_BINDERS: Mapping[str, Callable[[Frame, Step], Bound]] = {
    "chain": _bind_chain,
    "gemm": _bind_gemm,
    "attention": _bind_attention,
    "product": _bind_product,
    "library": _bind_library,
    "view": _bind_view,
    "torch": _bind_nodes,
}
"""Kind of part -> how it is bound to memory."""
