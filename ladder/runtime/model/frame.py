"""The memory of a plan, and its steps bound to it; sizes that are open are those of the call at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ladder.runtime.compile import Request, target_of
from ladder.runtime.convolve import launch
from ladder.runtime.model.attention import attention_call
from ladder.runtime.model.chain_calls import bind_chain
from ladder.runtime.model.given import Given
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
from ladder.runtime.model.ordered import Ordered
from ladder.runtime.model.plan import Step
from ladder.runtime.model.rows import Rows
from ladder.runtime.model.sizes import Now, Sizes, evaluator
from ladder.runtime.threads import keep_apart
from targets import get_device
from tile_types.errors import ShapeError

if TYPE_CHECKING:
    from ladder.runtime.model.executable import Executable

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
        self.given = Given(self.inputs)
        for name, tensor in owner.held.items():
            self.slots[self.slot[name]] = tensor
        chains = (step.part for step in plan.steps if step.part.kind in ("chain", "rows") and step.sizes)
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
        self.given.put(values, slots, self.owner.made_from(values))
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
        self.given.drop(slots)
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
        mine = shown - constants - set(self.owner.bindings)
        self.results = [self.slot[value] for value in mine if value in self.slot]
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

    def is_own(self, value: str) -> bool:
        """Tell whether a value is written into the frame's own memory: contiguous, aligned, and no number."""
        written = value in self.kept or value in self.places
        return written and self.owner.plan.tiles[value].shape != ()

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
                if value in self.slot
                and last[value] <= number
                and value not in constant
                and value not in self.owner.bindings
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
        return step.part.kind in ("gemm", "rows", "chain", "attention")


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


def _bind_rows(frame: Frame, step: Step) -> Bound:
    """Multiply by the matrix in panels, as long as it is the one that was put in order; else by torch."""
    graph, entry = step.part.graph, frame.owner.kernels.get(step.entry)
    rows = Rows(graph, frame.now, frame.owner.where)
    outside = dict(zip((node.name for node in graph.inputs), step.part.inputs, strict=True))
    weights = Ordered(rows.order) if rows.form.matrix in frame.lasting_inputs(step) else None
    x, matrix = (frame.slot[outside[name]] for name in (rows.form.x, rows.form.matrix))
    others = [frame.slot[outside[name]] for name in rows.form.others]
    value = step.part.outputs[0]
    place, target = frame.slot[value], frame.target(value)
    still = {name for name, outer in {**outside, "": value}.items() if outer in frame.kept}
    by_kernel = rows.by_kernel(entry, still)

    def run(slots: Slots) -> None:
        slots[place] = out = target()
        given, weight = slots[x], slots[matrix]
        known = None if weights is None else weights.of(weight, given)
        beside = [slots[slot] for slot in others]
        if known is None or not out.numel():
            rows.by_torch(given, weight, beside, out)
        else:
            by_kernel(given, known, beside, out)

    return run


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
    "chain": bind_chain,
    "gemm": _bind_gemm,
    "rows": _bind_rows,
    "attention": _bind_attention,
    "product": _bind_product,
    "library": _bind_library,
    "view": _bind_view,
    "torch": _bind_nodes,
}
"""Kind of part -> how it is bound to memory."""
