"""The steps of a plan bound to its memory: one closure each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.partition.scatter import numbered, written
from ladder.partition.subgraphs import CALLS
from ladder.runtime.allocate import viewer
from ladder.runtime.compile import Request, target_of
from ladder.runtime.convolve import launch
from ladder.runtime.model.attention import attention_call
from ladder.runtime.model.cached_attention import bind_cached_attention
from ladder.runtime.model.chains import kernel_of
from ladder.runtime.model.codes import bind_codes
from ladder.runtime.model.entry_calls import Operand, bind_entry, ready
from ladder.runtime.model.found import bind_found
from ladder.runtime.model.library import library_run, product_run, product_takes_out, view_run
from ladder.runtime.model.memory import contiguous
from ladder.runtime.model.native_parts import bind_attention, bind_elements, bind_fourier
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.ordered import Keep, Ordered
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.prologues import bind_prologue
from ladder.runtime.model.recurrent import bind_recurrent
from ladder.runtime.model.rows import Rows
from ladder.runtime.model.sizes import evaluator
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from ladder.runtime.stored_codes import stays
from targets import get_device
from tile_types.tile import Extent


def bind_chain(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a chain."""
    entry: Any = memory.owner.kernels.get(step.entry)  # none where every result is known to be empty
    numbers = memory.now.numbers((*step.sizes, *step.starts))
    in_place = set(written(step.part).values())
    elements = _elements(step.part.graph) if memory.owner.where.type == "cpu" else ()
    kernel = kernel_of(entry, memory.now, elements, SERIAL)
    if entry is not None and not in_place and memory.settles(step):
        operands, results = map(Operand, step.part.inputs), map(Operand, step.part.outputs)
        return bind_entry(memory, kernel(), numbers(), [*operands], [*results])
    reads = tuple(
        (memory.slot[value], memory.is_own(value), memory.owner.plan.tiles[value].shape == ())
        for value in step.part.inputs
        if value not in in_place
    )
    writes = tuple((memory.slot[value], memory.target(value)) for value in step.part.outputs)
    plain = not in_place and all(memory.is_own(value) for value in step.part.outputs)
    """Whether results lie as the kernel writes them."""
    numbers_of_rows = _rows_to_check(memory, step)
    names = memory.now.names
    extents = evaluator(_extents_within(step.part.graph), names) if step.sizes else lambda sizes: ()

    def run(slots: Slots) -> None:
        operands = _operands(slots, reads)
        for slot, extent, from_end in numbers_of_rows:
            _require_rows(slots[slot], extent()[0], from_end)
        results = []
        for slot, target in writes:
            slots[slot] = result = target()
            results.append(result)
        if plain and entry is not None and not memory.some_empty:
            kernel()(*numbers(), *operands, *results)
            return
        if (entry is None or memory.some_empty) and not any(result.numel() for result in results):
            return
        into = [*map(ready, results)]
        if memory.some_empty and 0 in extents(memory.sizes):
            given = [slots[memory.slot[value]] for value in step.part.inputs]
            now = memory.now.settled(memory.sizes)  # others ask for their extents before a call
            by_torch(graph_run(step.part.graph, now, memory.owner.where), given, into)
        else:
            kernel()(*numbers(), *operands, *map(_at_least_1d, into))
        for result, copy in zip(results, into, strict=True):
            if copy is not result:  # an argument that lies otherwise
                result.copy_(copy)

    return run


SERIAL = 1 << 14
"""Elements of a chain's largest value below which one thread does all."""


def _elements(graph: Graph) -> tuple[Extent, ...]:
    """Return the numbers of elements of all values of a chain."""
    return tuple(dict.fromkeys(product(tile.shape) for node in graph.nodes for tile in node.tiles))


def _operands(slots: Slots, reads: Sequence[tuple[int, bool, bool]]) -> list[torch.Tensor]:
    """Return what a kernel reads: (slot, whether it lies in a buffer of the plan, whether it is a number)."""
    operands = []
    for slot, own, is_number in reads:
        x = slots[slot]
        if not own:
            x = ready(x)
        operands.append(x.reshape(1) if is_number else x)
    return operands


def _extents_within(graph: Graph) -> tuple[Extent, ...]:
    """Return the extents in a chain that may be 0 at run time."""
    extents = (e for node in graph.nodes for tile in node.tiles for e in tile.shape)
    return tuple(dict.fromkeys(extent for extent in extents if extent != 0))


def by_torch(
    run: Callable[..., Any], operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    """Compute a chain node by node, in the types that it states: kernels read no tensors without elements."""
    found = run(*operands)
    for value, result in zip(found if isinstance(found, tuple) else (found,), results, strict=True):
        result.copy_(value)


def _rows_to_check(
    memory: Workspace, step: PlanStep
) -> list[tuple[int, Callable[[], tuple[int, ...]], bool]]:
    """Return (slot, extent, from_end) of what places rows; GPUs leave out rows beyond the end."""
    if memory.owner.where.type != "cpu":
        return []
    found = dict.fromkeys(numbered(step.part))
    return [(memory.slot[value], memory.now.numbers((extent,)), ends) for value, extent, ends in found]


def _require_rows(numbers: torch.Tensor, extent: int, from_end: bool) -> None:
    least = -extent if from_end else 0
    if numbers.numel() and not least <= int(numbers.min()) <= int(numbers.max()) < extent:
        raise IndexError(f"rows {numbers.tolist()} are to be put into {extent}")


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that kernels take: numbers have one axis there."""
    return tensor if tensor.ndim else tensor.reshape(1)


def _bind_gemm(memory: Workspace, step: PlanStep) -> Bound:
    gemm = step.part.gemm
    assert gemm is not None  # that is what a gemm part has
    if "contract" in step.part.operators:
        return _bind_convolution(memory, step)
    kernel = memory.owner.operator(step.entry or Request(gemm).text)
    values = step.part.by_role
    slots_of = {role: memory.slot[v] for role, v in values.items() if role not in ("B", "row_scale")}
    arrays = memory.packed[values["B"]]
    value = step.part.outputs[0]
    place, target = memory.slot[value], memory.target(value)
    matrix = (-1, gemm.columns)
    rows, bias, scale = slots_of["A"], slots_of.get("bias"), slots_of.get("token_scale")

    def run(slots: Slots) -> None:
        slots[place] = out = target()
        weight = memory.weight(arrays)
        extras = [None if slot is None else slots[slot] for slot in (bias, scale)]
        kernel.into(slots[rows], weight, out if out.ndim == 2 else out.view(matrix), *extras)

    return run


def _bind_convolution(memory: Workspace, step: PlanStep) -> Bound:
    kernel = memory.owner.operator(step.entry)
    values = step.part.by_role
    arrays = memory.packed[values.pop("B")]
    image = memory.slot[values["A"]]
    roles = ("bias", "residual", "factor")
    extras = [memory.slot[values[role]] if role in values else None for role in roles]
    value = step.part.outputs[0]
    place, target = memory.slot[value], memory.target(value)
    windows = kernel.gemm.windows
    grouped = windows is not None and windows.groups > 1
    axes = len(memory.owner.plan.tiles[values["A"]].shape) - grouped

    def image_of(tensor: Any) -> Any:
        """Return a tensor with one axis of channels; one of one spatial axis as an image of one row."""
        if tensor is None:
            return None
        tensor = tensor.flatten(-2) if tensor.ndim > axes else tensor
        return tensor.unsqueeze(1) if axes == 3 else tensor

    def run(slots: Slots) -> None:
        x, out = slots[image], target()
        slots[place] = out
        further = [None if slot is None else slots[slot] for slot in extras]
        rows = [image_of(tensor) for tensor in (x, further[1], out)]
        weight = memory.weight(arrays)
        launch(kernel, rows[0], weight, further[0], rows[1], rows[2], further[2])

    return run


def _bind_rows(memory: Workspace, step: PlanStep) -> Bound:
    """Multiply by the matrix in panels, as long as it is the one that was put in order; else by torch."""
    graph, entry = step.part.graph, memory.owner.kernels.get(step.entry)
    rows = Rows(graph, memory.now, memory.owner.where)
    outside = step.part.outside
    weights = _panels_of(memory, rows, outside[rows.form.matrix], memory.lasting_inputs(step))
    x, matrix = (memory.slot[outside[name]] for name in (rows.form.x, rows.form.matrix))
    others = [memory.slot[outside[name]] for name in rows.form.others]
    value = step.part.outputs[0]
    stays = memory.known(outside[rows.form.matrix]) if outside[rows.form.matrix] in memory.constants else None
    if entry is not None and stays is not None and memory.settles(step):
        return _rows_of_constants(memory, entry, rows, stays, outside, value)
    place, target = memory.slot[value], memory.target(value)
    still = {name for name, outer in {**outside, "": value}.items() if outer in memory.kept}
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


def _panels_of(memory: Workspace, rows: Rows, value: str, lasting: Mapping[str, Keep]) -> Ordered | None:
    """Return the holder of a matrix in panels, one for the steps of all sizes; None where it may change."""
    keep, key = lasting.get(rows.form.matrix), rows.ordered_as(value)
    if keep is not None and key not in memory.panels:
        memory.panels[key] = keep(rows.order)
    return memory.panels.get(key)


def _rows_of_constants(
    memory: Workspace, entry: Any, rows: Rows, matrix: torch.Tensor, outside: Mapping[str, str], value: str
) -> Bound:
    """Return the call for a matrix that stays; all frames of a plan share its panels."""
    form, kept = rows.form, memory.owner.in_order
    name = rows.ordered_as(outside[form.matrix])
    if name not in kept:
        kept[name] = rows.order(matrix, matrix)
    beside = [
        Operand(outside[other], shape) for other, shape in zip(form.others, rows.flat_others, strict=True)
    ]
    x, out = Operand(outside[form.x], rows.flat_x), Operand(value, rows.flat)
    return bind_entry(memory, rows.kernel(entry)(), rows.numbers(), (x, kept[name], *beside), (out,))


def _bind_attention(memory: Workspace, step: PlanStep) -> Bound:
    device = get_device(target_of(memory.owner.where))
    if device.kind == "llvm":
        return bind_attention(memory, step)
    entries = [memory.owner.kernels[name] for name in step.entry.split()]
    call = attention_call(entries, step.part.graph, device)
    reads, value = memory.reads(step), step.part.outputs[0]
    place, target = memory.slot[value], memory.target(value)

    def run(slots: Slots) -> None:
        slots[place] = call(*(slots[slot] for slot in reads), target())

    return run


def _bind_product(memory: Workspace, step: PlanStep) -> Bound:
    lasting = memory.lasting_inputs(step)
    run_product = product_run(step.part, memory.now, lasting)
    in_place = product_takes_out(step.part.graph, lasting)
    reads, place = memory.reads(step), memory.slot[step.part.outputs[0]]
    target = memory.target(step.part.outputs[0])

    def run(slots: Slots) -> None:
        operands = [slots[slot] for slot in reads]
        slots[place] = run_product(*operands, out=target()) if in_place else run_product(*operands)

    return run


def _bind_library(memory: Workspace, step: PlanStep) -> Bound:
    for value in step.part.inputs:
        if (tensor := memory.known(value)) is not None:
            stays(tensor)
    call = library_run(step.part.graph, memory.now)
    return _bind_row(memory, step, call) if _takes_one_row(memory, step) else _bind_call(memory, step, call)


def _takes_one_row(memory: Workspace, step: PlanStep) -> bool:
    """Tell whether a step takes one row of a table that stays as it is while the row is read by this plan."""
    if step.part.operators != ("take",) or len(step.part.inputs) != 2 or not memory.settles(step):
        return False
    table, ids = step.part.inputs
    (count,) = memory.now.numbers((product(memory.owner.plan.tiles[ids].shape),))()
    while table in memory.shown_by:
        table = memory.shown_by[table]
    bindings = memory.owner.bindings
    stays = table in memory.constants or (table in bindings and bindings[table] not in memory.owner.changed)
    return count == 1 and stays and step.part.outputs[0] not in memory.shown


def _bind_row(memory: Workspace, step: PlanStep, call: Callable[..., Any]) -> Bound:
    """Return the view of one row; ``call`` gathers it if the table lies otherwise, or says what is wrong."""
    table, ids = memory.reads(step)
    value = step.part.outputs[0]
    place, show = memory.slot[value], viewer()
    shape = memory.now.numbers(memory.owner.plan.tiles[value].shape)()
    strides, row = contiguous(shape), prod(shape)

    def run(slots: Slots) -> None:
        rows, at = slots[table], slots[ids].item()
        if 0 <= at < rows.shape[0] and rows.is_contiguous():
            slots[place] = show(rows, shape, strides, at * row)
        else:
            slots[place] = call(rows, slots[ids])

    return run


def _bind_nodes(memory: Workspace, step: PlanStep) -> Bound:
    return _bind_call(memory, step, graph_run(step.part.graph, memory.now, memory.owner.where))


def _bind_call(memory: Workspace, step: PlanStep, call: Callable[..., Any]) -> Bound:
    reads = memory.reads(step)
    places = tuple(memory.slot[value] for value in step.part.outputs)

    def run(slots: Slots) -> None:
        found = call(*(slots[slot] for slot in reads))
        for place, value in zip(places, found if isinstance(found, tuple | list) else (found,), strict=True):
            slots[place] = value

    return run


def _bind_view(memory: Workspace, step: PlanStep) -> Bound | None:
    view, (source,) = view_run(step.part.graph, memory.now), memory.reads(step)
    value = step.part.outputs[0]
    place, shown = memory.slot[value], memory.known(step.part.inputs[0])
    if shown is not None and not step.constant and memory.knows(step):
        found = view(shown)
        if found.untyped_storage().data_ptr() == shown.untyped_storage().data_ptr():
            memory.slots[place] = found
            memory.still.add(value)
            return None
    if memory.lies_still(step.part.inputs[0]):
        return _kept_view(memory, view, source, place)
    if memory.settles(step) and memory.is_hidden(value):
        return _known_view(view, source, place)

    def run(slots: Slots) -> None:
        slots[place] = view(slots[source])

    return run


def _known_view(view: Callable[[Any], Any], source: int, place: int) -> Bound:
    """Return a view of a tensor of known shape for internal use, made without torch's dispatch."""
    show = viewer()
    strides: tuple[int, ...] = ()
    sizes: tuple[int, ...] | None = None
    shown: tuple[int, ...] = ()
    begin = 0

    def run(slots: Slots) -> None:
        nonlocal strides, sizes, shown, begin
        given = slots[source]
        if sizes is not None and given.stride() == strides:
            slots[place] = show(given, sizes, shown, begin)
            return
        slots[place] = found = view(given)
        if found.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            strides, sizes, shown = given.stride(), tuple(found.shape), found.stride()
            begin = found.storage_offset() - given.storage_offset()

    return run


def _kept_view(memory: Workspace, view: Callable[[Any], Any], source: int, place: int) -> Bound:
    """Return a view of memory of its own: it is made again for another buffer or other sizes."""
    of, made, sizes = None, None, memory.sizes

    def run(slots: Slots) -> None:
        nonlocal of, made, sizes
        given = slots[source]
        if given is of and memory.sizes == sizes:
            slots[place] = made
            return
        slots[place] = found = view(given)
        if found.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            of, made, sizes = given, found, memory.sizes

    return run


BINDERS: Mapping[str, Callable[[Workspace, PlanStep], Bound | None]] = {
    "chain": bind_chain,
    "gemm": _bind_gemm,
    "found": bind_found,
    "prologue": bind_prologue,
    "rows": _bind_rows,
    "attention": _bind_attention,
    "cached_attention": bind_cached_attention,
    "recurrent": bind_recurrent,
    "codes": bind_codes,
    "elements": bind_elements,
    "fourier": bind_fourier,
    "product": _bind_product,
    "library": _bind_library,
    "view": _bind_view,
    "torch": _bind_nodes,
}
"""Kind of part -> how it is bound to memory; None where nothing is left to do in a call."""


def bind_by_torch(memory: Workspace, step: PlanStep) -> Bound:
    """Return what a kernel of ours is for, computed by torch into the memory that it would write."""
    bound = BINDERS["library" if step.part.kind in CALLS else "torch"](memory, step)
    assert bound is not None  # such steps compute
    writes = [(memory.slot[value], memory.target(value)) for value in step.part.outputs]

    def run(slots: Slots) -> None:
        bound(slots)
        for place, target in writes:
            found, slots[place] = slots[place], target()
            slots[place].copy_(found)

    return run
