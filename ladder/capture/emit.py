"""The record of a segment, as one generated Python function: guard, graph, mock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.fx

from ladder.capture.conditionals import Unrecorded
from ladder.capture.endings import Ending, GraphBreak
from ladder.capture.graphs import graph_module
from ladder.capture.guards import check_distinct, guard_lines, tensor_lines
from ladder.capture.heap import Heap
from ladder.capture.interpreter import Interpreter
from ladder.capture.mock import changed_roots, graph_results, live_steps
from ladder.capture.nodes import CaptureError
from ladder.capture.records import FAILED, Assumed, Record, Site
from ladder.capture.tensors import (
    STATE,
    random_states,
    restore_memory,
    restore_random,
    restore_state,
    saved_memory,
)
from ladder.capture.trace import Trace
from ladder.capture.tracebacks import RECORD
from ladder.faults import tolerated


@contextmanager
def _no_collection() -> Iterator[None]:
    """Put garbage collection off: what a record is made of stays, and is much to look through."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def emit(vm: Interpreter, ending: Ending, plan: GraphBreak | None = None) -> Record:
    """Return the record of the machine's segment, which ends with `ending`, as `plan` says if it is split."""
    heap, trace, site = vm.heap, vm.trace, vm.site
    guard = heap.guard
    assert site is not None
    check_distinct(heap, writes=trace.changes_tensors)
    site.unliftable |= heap.unliftable
    asking, learning = tensor_lines(heap)
    steps, needed = live_steps(heap.steps, ending.uses)
    needed |= {item.var for item in trace.assumed}
    computing, module = _graph(vm, needed)
    for text in heap.shapes.conditions():
        guard.check(text, text)  # what the backend decided about symbols is among them
    guarding, learning = guard_lines(heap, asking, learning)
    lines = [*guarding, *computing, *(step.text for step in steps), *ending.lines]
    roots = ", ".join(f"r{at}" for at in range(vm.roots))
    source = _function("run", roots, lines)
    alone = _function("check", roots, [*learning, "return 0"])
    try:
        exec(compile(source + alone, RECORD, "exec"), guard.space)
    except SyntaxError as error:
        raise CaptureError(f"the generated record is not valid: {error}") from error
    # Not left in their own globals: a record that is dropped lets go of what it holds at once.
    run, check = guard.space.pop("run"), guard.space.pop("check")
    changed, assumes = changed_roots(heap), frozenset(item.here for item in trace.assumed)
    ends = ending.returns or (plan is not None and plan.site.forks)
    return Record(
        run,
        check,
        guard.checks,
        source,
        module,
        trace.operators,
        site,
        pinned=frozenset(id(node.obj) for node in heap.nodes.values() if node.pinned),
        split="" if plan is None else plan.why,
        where=() if plan is None else plan.where,
        follows=() if plan is None else (plan.site, plan.failure),
        unseen=ends and not assumes and _is_unseen(trace, changed),
        changed=changed or frozenset(),
        assumes=assumes,
        calls_cached=guard.calls_cached,
        side=vm.side,
        depth=ending.depth,
        branches=frozenset(ending.branches),
    )


def _is_unseen(trace: Trace, changed: frozenset[int] | None) -> bool:
    """Say whether a run that goes through a segment changes only roots, and cannot bring down a GPU."""
    written = trace.changes_tensors or trace.random or trace.state_written or trace.asserts
    return not written and changed is not None


def _function(name: str, parameters: str, lines: list[str]) -> str:
    return f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines)


def _spread(heap: Heap, names: list[str]) -> Iterator[str]:
    """Yield arguments; runs of objects that stay come as one tuple, which is quicker to read."""
    for constant, run in groupby(names, heap.guard.space.__contains__):
        if constant:
            yield f"*{heap.constant(tuple(heap.guard.space[name] for name in run))}"
        else:
            yield from run


def _graph(vm: Interpreter, needed: set[str]) -> tuple[list[str], Any]:
    """Return the lines that run the graph, and the graph module (None if there is no operator)."""
    heap, trace, backend = vm.heap, vm.trace, vm.store.backend
    if not trace.operators:
        return [], None
    wanted, rebuilt = graph_results(heap, trace, needed)
    names, examples = [var for _, var, _ in trace.placeholders], [item for _, _, item in trace.placeholders]
    before, loops = heap.guard.state[STATE.index(torch.is_grad_enabled)], getattr(backend, "loops", False)
    try:
        module = graph_module(trace, wanted, before=before, loops=loops)
        compiled = backend(module, examples)
    except Exception as error:
        if getattr(backend, "is_ours", False):
            raise CaptureError(tolerated(error, "a graph that cannot be built runs as it is")) from error
        raise CaptureError(f"the graph cannot be built: {type(error).__name__}: {error}") from error
    call = f"{heap.constant(compiled)}({', '.join(_spread(heap, names))})"
    results = "".join(f"{value.var}, " for value in wanted) or "_"
    return [*_running_lines(heap, trace, vm.site, f"{results} = {call}"), *rebuilt], module


def _running_lines(heap: Heap, trace: Trace, site: Site | None, call: str) -> list[str]:
    """Return the lines that run the graph, and undo what it did where it raises or assumed what is not so."""
    failed = f"return ({heap.constant(FAILED)}, None)"
    grad, autocast = heap.guard.state[STATE.index(torch.is_grad_enabled)], heap.guard.autocast
    undo = f"    {heap.constant(restore_state)}({grad}, {heap.constant(autocast)})"
    lines, undone = [], [undo]
    if trace.random:
        lines.append(f"states = {heap.constant(random_states)}()")
        undone.append(f"    {heap.constant(restore_random)}(states)")
    if (trace.may_fail or trace.assumed) and trace.written:
        written = "".join(f"{var}, " for var in trace.written.values())
        lines.append(f"written = {heap.constant(saved_memory)}(({written}))")
        undone.append(f"    {heap.constant(restore_memory)}(written)")
    lines += ["try:", f"    {call}"]
    if trace.modules:
        lines += [f"except {heap.constant(Unrecorded)}:", *undone, "    return -1"]
    lines += ["except Exception:", *undone, f"    {failed}"]
    if trace.assumed:
        assert site is not None
        numbers = Assumed(site, [(item.here, item.number) for item in trace.assumed])
        read = ", ".join(item.var for item in trace.assumed)
        lines += [f"if not {heap.constant(numbers.holds)}({read}):", *undone, "    return -1"]
    return lines
