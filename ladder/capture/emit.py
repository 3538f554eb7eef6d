"""The record of a segment, as one generated Python function: guard, graph, mock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress, groupby
from operator import not_
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ladder.capture.errors import RECORD, again
from ladder.capture.kinds import is_a
from ladder.capture.loops import rolled
from ladder.capture.segment import CaptureError, Check, Node, Segment, Step
from ladder.capture.shapes import Differing
from ladder.capture.sites import FAILED, Record
from ladder.capture.tensor_memory import Watched, can_watch
from ladder.capture.tensors import (
    STATE,
    Aliasing,
    aliasing_of,
    autocast_state,
    bulk_check,
    is_plain_tensor,
    restore_state,
    signature,
    torch_state,
)

if TYPE_CHECKING:
    from ladder.capture.record import Plan, Recorder


FEW = 8
"""Tensors that are asked as quickly as their memory is read."""


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
def emit(machine: Recorder, plan: Plan | None, result: Any, *, failed: bool = False) -> Record:
    """Return the record of the machine's segment, which ends with `plan` or returns `result`."""
    segment = machine.segment
    if plan is None:
        uses: set[str] = set()
        value = segment.reference(result, uses)
        tail = [f"{segment.constant(again)}({value})" if failed else f"return (None, {value})"]
    else:
        uses = plan.uses
        tail = _split_tail(segment, plan)
    _check_distinct(segment)
    assert machine.site is not None
    machine.site.unliftable |= segment.unliftable
    tensor_lines, learning_lines = _tensor_lines(segment)
    steps, needed = live_steps(segment.steps, uses)
    graph_lines, module = _graph(machine, segment, needed)
    for text in segment.shapes.conditions() if segment.shapes is not None else ():
        segment.check(text, text)  # what the backend decided about symbols is among them
    guard, learning = _guard_lines(segment, tensor_lines, learning_lines)
    lines = [*guard, *graph_lines, *(step.text for step in steps), *tail]
    roots = ", ".join(f"r{at}" for at in range(machine.root_count))
    source = _function("run", roots, lines)
    alone = _function("check", roots, [*learning, "return 0"])
    try:
        exec(compile(source + alone, RECORD, "exec"), segment.space)
    except SyntaxError as error:
        raise CaptureError(f"the generated record is not valid: {error}") from error
    # Not left in their own globals: a record that is dropped lets go of what it holds at once.
    run, check = segment.space.pop("run"), segment.space.pop("check")
    why = plan.why if plan is not None else ""
    held = frozenset(id(node.obj) for node in segment.nodes.values() if node.pinned)
    return Record(run, check, segment.checks, source, module, segment.operators, why, machine.site, held)


def _function(name: str, parameters: str, lines: list[str]) -> str:
    return f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines)


def _split_tail(segment: Segment, plan: Plan) -> list[str]:
    roots = "".join(f"{text}, " for text in plan.roots)
    site, failure = segment.constant(plan.site), segment.constant(plan.failure)
    return [
        "try:",
        f"    result = {plan.call}",
        "except Exception as error:",
        f"    return ({failure}, ({roots}error,))",
        f"return ({site}, ({roots}result,))",
    ]


Open = tuple[Node, frozenset[int]]
"""A tensor, and which of its extents are left open."""


def _tensor_lines(segment: Segment) -> tuple[list[str], list[str]]:
    """Return bulk checks of the metadata of tensors; what they cannot check is checked one by one.

    The second form returns the paths of the extents that differ.
    """
    bulk: list[Open] = []
    entry = segment.entry_state, segment.entry_autocast
    usable = (torch_state(), autocast_state()) == entry and not segment.state_written
    for node, before, rows, left_open in segment.metadata:
        if usable and signature(node.obj) == before and is_plain_tensor(node.obj):
            bulk.append((node, left_open))
        else:
            _check_each(segment, rows)
    bulk.sort(key=lambda pair: pair[0].pinned)
    stays = [node.pinned and not left_open and can_watch(node.obj) for node, left_open in bulk]
    if sum(stays) < FEW:
        stays = [False] * len(bulk)
    asked, watched = [*compress(bulk, map(not_, stays))], [*compress(bulk, stays)]
    checks = [
        bulk_check([node.obj for node, _ in pairs], [o for _, o in pairs]) for pairs in (asked, watched)
    ]
    if any(pairs and check is None for pairs, check in zip((asked, watched), checks, strict=True)):
        chosen = {id(node) for node, _ in bulk}
        for node, _, rows, _ in segment.metadata:
            _check_each(segment, rows if id(node) in chosen else [])
        return [], []
    for node, left_open in bulk:
        if left_open:
            segment.check(f"{node.var}.is_contiguous()", f"{segment.paths.get(node.var)} is contiguous")
    segment.checks.append(Check("True", None, f"metadata of {len(bulk)} tensors", None))
    pairs = [*_asking(segment, asked, checks[0]), *_watching(segment, watched, checks[1])]
    return [line for line, _ in pairs], [learning for _, learning in pairs]


def _check_each(segment: Segment, rows: list[tuple[str, str]]) -> None:
    for text, why in rows:
        segment.check(text, why)


def _asking(segment: Segment, tensors: list[Open], check: Any) -> Iterator[tuple[str, str]]:
    """Yield the line that asks tensors for their metadata, in both forms."""
    if not tensors:
        return
    given = [node for node, _ in tensors if not node.pinned]
    names = "".join(f"{node.var}, " for node in given)
    pinned = segment.constant(tuple(node.obj for node, _ in tensors if node.pinned))
    differs = Differing([segment.paths.get(node.var, "") for node in given], [node.obj for node in given])
    condition = f"if not {segment.constant(check)}({names}*{pinned}): return "
    yield f"{condition}{len(segment.checks)}", f"{condition}{segment.constant(differs)}({names})"


def _watching(segment: Segment, tensors: list[Open], check: Any) -> Iterator[tuple[str, str]]:
    """Yield the line that compares the memory of tensors that stay, in both forms."""
    if not tensors:
        return
    memory = Watched([node.obj for node, _ in tensors], check)
    same, again = segment.constant(memory.same), segment.constant(memory.again)
    line = f"if not ({same}() or {again}()): return {len(segment.checks)}"
    yield line, line


def _guard_lines(
    segment: Segment, tensor_lines: list[str], learning_lines: list[str]
) -> tuple[list[str], list[str]]:
    """Return the guard: each line binds a variable or returns the number of the check that fails.

    The second form, which is run after a miss, returns the paths of extents that differ.
    """
    lines = ["try:"]
    for number, check in enumerate(segment.checks, 1):
        if check.binds is not None:
            lines.append(f"    {check.binds} = {check.text}")
        else:
            lines += [] if check.text == "True" else [f"    if not ({check.text}): return {number}"]
    facts = segment.table.finish(len(segment.checks) + 1)
    table = segment.table.lines(segment.constant)
    segment.checks += [Check("True", None, fact.path, fact.path, id(fact.value)) for fact in facts]
    segment.checks.append(Check("True", None, "objects that stay", None))
    forms = [
        [*lines, *(f"    {line}" for line in (*bulk, *table)), "except Exception:", "    return -1"]
        for bulk in (tensor_lines, learning_lines)
    ]
    return forms[0], forms[1]


def _check_distinct(segment: Segment) -> None:
    """Guard that objects which were different are: where one of their type is changed."""
    groups: dict[type, list[Node]] = {}
    for node in segment.nodes.values():
        if node.external:
            groups.setdefault(type(node.obj), []).append(node)
    for kind, nodes in groups.items():
        changed = any(node.mutated for node in nodes) or (issubclass(kind, torch.Tensor) and segment.impure)
        changed |= kind in segment.distinct
        if changed and len(nodes) > 1:
            names = sorted({f"id({node.var})" for node in nodes})
            segment.check(f"len({{{', '.join(names)}}}) == {len(names)}", f"{kind.__name__}s are distinct")


def live_steps(steps: list[Step], wanted: set[str]) -> tuple[list[Step], set[str]]:
    """Return the steps whose effect is seen outside or in `wanted`, and all variables they need."""
    needed = set(wanted)
    kept: set[int] = set()
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(steps))):
            step = steps[number]
            if number in kept or not (step.keep or step.var in needed or step.changes & needed):
                continue
            kept.add(number)
            needed |= step.uses
            changed = True
    return [step for number, step in enumerate(steps) if number in kept], needed


def _containers(segment: Segment, needed: set[str]) -> list[Node]:
    """Return the tuples and lists of tensors that are needed; what is in them becomes needed too."""
    found = []
    for node in segment.graph_values:  # what is inside comes after what it is in
        if node.var in needed and is_a(node.obj, tuple | list):
            found.append(node)
            needed |= {segment.node(item).var for item in node.obj if item is not None}
    return found


def _rebuilt(segment: Segment, container: Node) -> str:
    """Return the line that makes a container of what a graph gave: graphs give tensors."""
    items = "".join(f"{segment.reference(item, set())}, " for item in container.obj)
    return f"{container.var} = {segment.constant(type(container.obj))}(({items}))"


def _aliasing(segment: Segment, wanted: list[Node]) -> Aliasing:
    """Return what shares memory in the run that was recorded."""
    inputs = [example for _, _, example in segment.placeholders]
    return aliasing_of(inputs, [node.obj for node in wanted], writes=segment.written_memory)


def _open_examples(segment: Segment) -> list[Any]:
    """Return the graph's examples with symbols in place of what is left open: fake tensors, and numbers."""
    symbols = segment.shapes
    assert symbols is not None  # that is what open means

    def opened(var: str, example: Any) -> Any:
        if is_a(example, torch.Tensor):
            return symbols.fake_of(segment.node(example))
        symbol = symbols.given.get(var)
        return example if symbol is None else symbol

    return [opened(var, example) for _, var, example in segment.placeholders]


def _spread(segment: Segment, names: list[str]) -> Iterator[str]:
    """Yield arguments; runs of objects that stay come as one tuple, which is quicker to read."""
    for constant, run in groupby(names, segment.space.__contains__):
        if constant:
            yield f"*{segment.constant(tuple(segment.space[name] for name in run))}"
        else:
            yield from run


def _graph(machine: Recorder, segment: Segment, needed: set[str]) -> tuple[list[str], Any]:
    """Return the lines that run the graph, and the graph module (None if there is no operator)."""
    if not segment.operators:
        return [], None
    graph = segment.graph
    containers = _containers(segment, needed)
    wanted = [node for node in segment.graph_values if node.var in needed and node not in containers]
    graph.output(tuple(node.fx for node in wanted))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.meta.get("part") and not node.users:
            graph.erase_node(node)
    inputs = [(var, example) for _, var, example in segment.placeholders]
    try:
        root = torch.nn.Module()
        if getattr(machine.captured.backend, "loops", False):
            root, graph = rolled(graph)
        module = torch.fx.GraphModule(root, graph)
        module.meta["aliasing"] = _aliasing(segment, wanted)
        if segment.shapes is not None:
            module.meta["open"] = _open_examples(segment)
        compiled = machine.captured.backend(module, [example for _, example in inputs])
    except Exception as error:
        raise CaptureError(f"the graph cannot be built: {type(error).__name__}: {error}") from error
    call = f"{segment.constant(compiled)}({', '.join(_spread(segment, [var for var, _ in inputs]))})"
    names = "".join(f"{node.var}, " for node in wanted)
    failed = f"return ({segment.constant(FAILED)}, None)"
    grad, autocast = segment.entry_state[STATE.index(torch.is_grad_enabled)], segment.entry_autocast
    undo = f"    {segment.constant(restore_state)}({grad}, {segment.constant(autocast)})"
    random = segment.constant(torch.get_rng_state)
    lines = [f"state = {random}()"] if segment.random else []
    lines += ["try:", f"    {names or '_'} = {call}", "except Exception:", undo]
    if segment.random:
        lines.append(f"    {segment.constant(torch.set_rng_state)}(state)")
    rebuilt = [_rebuilt(segment, container) for container in reversed(containers)]
    return [*lines, f"    {failed}", *rebuilt], module
