"""The record of a segment, as one generated Python function: guard, graph, mock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.fx

from ladder.capture.heap.guard_lines import check_distinct, guard_lines, tensor_lines
from ladder.capture.heap.heap import Heap
from ladder.capture.heap.mock import changed_roots, handed_roots, live_steps, refuse_unmade, root_numbers
from ladder.capture.heap.nodes import CaptureError, Unrecordable
from ladder.capture.interpreter.endings import Ending, GraphBreak
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.tracebacks import RECORD
from ladder.capture.records import FAILED, Record, failure
from ladder.capture.trace.assumptions import Assumed
from ladder.capture.trace.conditionals import Unrecorded
from ladder.capture.trace.graph_module import graph_module, show_sizes
from ladder.capture.trace.trace import Trace, Value
from ladder.capture.trace.undo import storages
from ladder.capture.values.aliasing import flat, storage_of, version_of
from ladder.capture.values.kinds import is_a
from ladder.capture.values.saved import restore_memory, saved_memory
from ladder.capture.values.settings import READS, is_now, restore_settings, settings_at
from ladder.capture.values.tensors import (
    STATE,
    autocast_at,
    is_row,
    random_states,
    restore_random,
    restore_state,
    run_at,
)
from ladder.faults import tolerated
from ladder.garbage import uncollected
from ladder.interrupts import pass_on


@uncollected()
def emit(vm: Interpreter, ending: Ending, graph_break: GraphBreak | None = None) -> Record:
    """Return the record of the segment, which ends with `ending`: at `graph_break`, if there is one.

    Raises CaptureError where there can be none.
    """
    try:
        with vm.trace.at_entry():
            return _emitted(vm, ending, graph_break)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(tolerated(error, "what was recorded is dropped")) from error


def _emitted(vm: Interpreter, ending: Ending, graph_break: GraphBreak | None) -> Record:
    heap, trace, point = vm.heap, vm.trace, vm.point
    guard = heap.guard
    assert point is not None
    if vm.modes and graph_break is None:
        raise CaptureError("a mode is not left")
    steps, needed = live_steps(heap.steps, ending.uses)
    refuse_unmade(heap, needed)
    needed |= {item.var for item in trace.assumed}
    _copy_inputs(heap, trace, needed)
    heap.closed |= heap.unliftable
    asking, learning, apart = tensor_lines(heap)
    check_distinct(heap, writes=trace.changes_tensors, apart=apart)
    assumed = Assumed(point, trace.assumed) if trace.assumed else None
    computing, module = _graph_lines(vm, needed, assumed)
    for text in heap.shapes.conditions():
        guard.check_extents(text)  # what the backend decided about symbols is among them
    guarding, learning = guard_lines(heap, asking, learning)
    lines = [*guarding, *computing, *(step.text for step in steps), *ending.lines]
    roots = ", ".join(f"r{at}" for at in range(vm.roots))
    source = _function("run", roots, lines)
    run, check = _compiled(source + _function("check", roots, learning), guard.space)
    record = Record(run, check, guard.checks, source, module, trace.operators, point)
    guard.table.unchanged()  # notes where its facts hold already: the next call need not look there
    record.pinned = frozenset(id(node.obj) for node in heap.nodes.values() if node.pinned)
    record.rewritten = tuple({path for node in heap.nodes.values() for path in node.rewritten()})
    record.assumed = assumed
    record.calls_cached, record.side = guard.calls_cached, vm.side
    record.depth, record.branches = ending.depth, frozenset(ending.branches)
    _note_end(record, trace, heap, ending, graph_break)
    return record


COPIED = "contiguous().resolve_conj().resolve_neg()"
"""How the copy is made that a graph takes of an input with gaps; one without them is its own copy, which may
be negated or conjugated where it is read."""

PRINTED = {"math": math, "torch": torch}
"""What the text of conditions on sizes names."""


def _copy_inputs(heap: Heap, trace: Trace, needed: set[str]) -> None:
    """Let the graph take copies of inputs that may lie otherwise; whose memory is seen may not."""
    if not heap.copied:
        return
    seen, copies = {*trace.written}, heap.copies
    found = copies.written or copies.same
    for value in trace.results:
        if value.var in needed:
            made = [item for item in flat(value.obj) if is_a(item, torch.Tensor)]
            seen |= {storage_of(item) for item in made if item.layout is torch.strided}
            found |= any(item in copies for item in made)
    if found or any(storage_of(node.obj) in seen for node in heap.copied.values()):
        heap.fix_shapes("its memory is written or given back")
    for at, (node, var, example) in enumerate(trace.placeholders):
        if var in heap.copied:
            copied = example.contiguous()
            trace.placeholders[at] = node, var, copied
            trace.versions[var] = version_of(copied)


def _buffers(heap: Heap) -> set[int]:
    """Return the ids of the buffers of all modules that the segment has met; no class of theirs is asked."""
    modules = (node.obj for node in heap.nodes.values() if is_a(node.obj, torch.nn.Module))
    attributes = (object.__getattribute__(module, "__dict__") for module in modules)
    return {id(buffer) for own in attributes for buffer in own.get("_buffers", {}).values()}


def _compiled(source: str, space: dict[str, Any]) -> tuple[Any, Any]:
    """Return the functions ``run`` and ``check`` of a record."""
    space |= PRINTED
    try:
        exec(compile(source, RECORD, "exec"), space)
    except SyntaxError as error:
        raise CaptureError(f"the generated record is not valid: {error}") from error
    # Not left in their own globals: a record that is dropped lets go of what it holds at once.
    return space.pop("run"), space.pop("check")


def _note_end(
    record: Record,
    trace: Trace,
    heap: Heap,
    ending: Ending,
    graph_break: GraphBreak | None,
) -> None:
    """Store in a record the resume points that follow it and the roots that it changes."""
    roots = root_numbers(heap)
    ends, changed = ending.returns, changed_roots(heap, roots)
    if graph_break is not None:
        record.split, record.where = graph_break.why, graph_break.where
        record.follows = (graph_break.point, graph_break.failure)
        record.handed = handed_roots(heap, roots, graph_break.roots)
        ends = ends or graph_break.point.forks
    record.changed = changed or frozenset()
    record.unseen = ends and not trace.assumed and _is_unseen(trace, changed)


def _is_unseen(trace: Trace, changed: frozenset[int] | None) -> bool:
    """Say whether a run that goes through a segment changes only roots, and cannot bring down a GPU."""
    written = trace.changes_tensors or trace.random or trace.settings or trace.asserts
    return not written and changed is not None


def _function(name: str, parameters: str, lines: list[str]) -> str:
    return f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines)


def graph_results(heap: Heap, trace: Trace, needed: set[str]) -> tuple[list[Value], list[str]]:
    """Return the values that the graph must give, and the lines that make containers of them again.

    Graphs give tensors: what is in the tuples and lists of tensors that are needed becomes needed too.
    """
    wanted, lines = [], []
    for value in trace.results:  # what is inside comes after what it is in
        if value.var not in needed:
            continue
        if not is_a(value.obj, tuple | list):
            wanted.append(value)
            continue
        needed |= {heap.node(item).var for item in value.obj if item is not None}
        items = "".join(f"{heap.reference(item, set())}, " for item in value.obj)
        lines.append(f"{value.var} = {heap.constant(type(value.obj))}(({items}))")
    return wanted, lines[::-1]


def _spread(heap: Heap, names: list[str]) -> Iterator[str]:
    """Yield arguments; runs of objects that stay come as one tuple, which is quicker to read."""
    for constant, run in groupby(names, heap.guard.space.__contains__):
        if constant:
            yield f"*{heap.constant(tuple(heap.guard.space[name] for name in run))}"
        else:
            yield from run


def _graph_lines(vm: Interpreter, needed: set[str], assumed: Assumed | None) -> tuple[list[str], Any]:
    """Return the lines that run the graph, and the graph module (None if there is no operator)."""
    heap, trace, backend = vm.heap, vm.trace, vm.store.backend
    calls = [node.target for node in trace.graph.nodes if node.op.startswith("call")]
    if all(target in READS for target in calls):
        return _left_settings(heap, trace), None
    wanted, rebuilt = graph_results(heap, trace, needed)
    if any(is_row(value.obj) for value in wanted):
        raise CaptureError("a row that torch.vmap gave stays behind it")
    kept = trace.to_keep()
    show_sizes(trace)
    names, examples = [var for _, var, _ in trace.placeholders], [item for _, _, item in trace.placeholders]
    before, loops = heap.guard.state[STATE.index(torch.is_grad_enabled)], getattr(backend, "loops", False)
    try:
        with settings_at(trace.settings), autocast_at(heap.guard.autocast):
            module = graph_module(trace, wanted, _buffers(heap), before=before, loops=loops)
            numbers = {item.var: item.number for item in trace.assumed}
            places = ((at, value.var) for at, value in enumerate(wanted))
            module.meta["assumed"] = {at: numbers[var] for at, var in places if var in numbers}
            compiled = backend(module, examples)
    except Exception as error:
        if getattr(backend, "is_ours", False):
            raise CaptureError(tolerated(error, "a graph that cannot be built runs as it is")) from error
        pass_on(error)
        raise CaptureError(f"the graph cannot be built: {type(error).__name__}: {error}") from error
    given = [f"{name}.{COPIED}" if name in heap.copied else name for name in names]
    call = f"{heap.constant(compiled)}({', '.join(_spread(heap, given))})"
    if trace.inference:
        call = f"{heap.constant(run_at)}({_is_inference(heap, trace, wanted)}, lambda: {call})"
    results = "".join(f"{value.var}, " for value in wanted) or "_"
    marking = _marking_lines(heap, trace, wanted)
    return [*_running_lines(heap, trace, kept, assumed, f"{results} = {call}"), *marking, *rebuilt], module


def _marking_lines(heap: Heap, trace: Trace, wanted: list[Value]) -> list[str]:
    """Return the lines that make results refuse writes which nobody would read; this run's own do as well."""
    lines = []
    for value in wanted if trace.read_only else ():
        if is_a(value.obj, torch.Tensor) and (row := trace.read_only.get(storages([value.obj])[0])):
            value.obj.__class__ = row[1].kind
            lines.append(f"{value.var} = {value.var}.as_subclass({heap.constant(row[1].kind)})")
    return lines


def _is_inference(heap: Heap, trace: Trace, wanted: list[Value]) -> bool:
    """Say in which mode a graph runs that enters inference mode or leaves it: that of what it makes.

    Raises Unrecordable where it makes tensors of both, or writes into one of inference mode outside of it.
    """
    inputs = [item for _, _, item in trace.placeholders if is_a(item, torch.Tensor)]
    given = {storage_of(item): item.is_inference() for item in inputs if item.layout is torch.strided}
    found: set[bool] = set()
    for made in (value for value in wanted if is_a(value.obj, torch.Tensor)):
        memory, inference = storages([made.obj])[0], made.obj.is_inference()
        if inference is not given.get(memory):
            found.add(inference)
        if made.obj.requires_grad and made.obj._is_view():  # torch tells what writes it later
            found.add(made.inference)
    if trace.changes_tensors and any(item.is_inference() for item in inputs):
        found.add(True)
    if len(found) > 1:
        raise Unrecordable("tensors of inference mode and others", trace.inference)
    return found.pop() if found else heap.guard.state[STATE.index(torch.is_inference_mode_enabled)]


def _running_lines(
    heap: Heap, trace: Trace, kept: Sequence[str], assumed: Assumed | None, call: str
) -> list[str]:
    """Return the lines that run the graph, and undo its writes where it raises or an assumption fails.

    kept: Tensors whose memory is put back then.
    """
    failed = f"return ({heap.constant(FAILED)}, {heap.constant(failure)}(error))"
    grad, autocast = heap.guard.state[STATE.index(torch.is_grad_enabled)], heap.guard.autocast
    undo = f"    {heap.constant(restore_state)}({grad}, {heap.constant(autocast)})"
    lines, undone = [], [undo]
    if trace.settings:
        undone.append(f"    {heap.constant(restore_settings)}({heap.constant([*trace.settings.items()])})")
    if trace.random:
        lines.append(f"states = {heap.constant(random_states)}()")
        undone.append(f"    {heap.constant(restore_random)}(states)")
    if kept:
        written, counted = (
            "".join(f"{var}, " for var in names) for names in (kept, _counted(heap, trace, kept))
        )
        lines.append(f"written = {heap.constant(saved_memory)}(({written}), ({counted}))")
        undone.append(f"    {heap.constant(restore_memory)}(written)")
    lines += ["try:", f"    {call}"]
    if trace.modules:
        lines += [f"except {heap.constant(Unrecorded)}:", *undone, "    return -1"]
    if assumed is not None:  # it may have raised since a number is another
        failed = f"{heap.constant(assumed.failed)}(); return -1"
    lines += ["except Exception as error:", *undone, f"    {heap.constant(pass_on)}(error)", f"    {failed}"]
    if assumed is not None:
        read = ", ".join(item.var for item in trace.assumed)
        lines += [f"if not {heap.constant(assumed.holds)}({read}):", *undone, "    return -1"]
    return lines + _left_settings(heap, trace)


def _counted(heap: Heap, trace: Trace, kept: Sequence[str]) -> list[str]:
    """Return the tensors from outside in the memory of `kept` that count how often they are written."""
    memory = {key for key, var in trace.written.items() if var in kept}
    counting = [node for node in heap.tensors if version_of(node.obj) is not None]
    return [node.var for node in counting if storage_of(node.obj) in memory]


def _left_settings(heap: Heap, trace: Trace) -> list[str]:
    """Return the line that writes settings which are left otherwise than they were: no plan does."""
    left = [(setting, is_now(setting)) for setting in trace.settings]
    left = [(setting, value) for setting, value in left if value != trace.settings[setting]]
    return [f"{heap.constant(restore_settings)}({heap.constant(left)})"] if left else []
