"""The record of a segment, as one generated Python function: guard, graph, mock."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ladder.capture.conditionals import Unrecorded, with_modules, without_unused_parts
from ladder.capture.core import Ending
from ladder.capture.errors import RECORD, again
from ladder.capture.kinds import is_a
from ladder.capture.loops import rolled
from ladder.capture.segment import CaptureError, Check, Node, Segment, Step
from ladder.capture.shapes import Differing
from ladder.capture.sites import FAILED, MAX_CHECKS, Assumed, Record, Site
from ladder.capture.tensors import (
    STATE,
    Aliasing,
    aliasing_of,
    autocast_state,
    bulk_check,
    is_plain_tensor,
    restore_memory,
    restore_state,
    saved_memory,
    signature,
    torch_state,
)
from ladder.faults import tolerated

if TYPE_CHECKING:
    from ladder.capture.record import Plan, Recorder


ASKING_FOR_GRADIENTS = frozenset({"requires_grad_", "retain_grad", "detach_", "backward"})
"""Methods of tensors that change what autograd does, and no numbers."""


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
def emit(machine: Recorder, ending: Ending, plan: Plan | None = None) -> Record:
    """Return the record of the machine's segment, which ends with `ending`, as `plan` says if it is split."""
    segment = machine.segment
    _check_distinct(segment)
    assert machine.site is not None
    machine.site.unliftable |= segment.unliftable
    tensor_lines, learning_lines = _tensor_lines(segment)
    steps, needed = live_steps(segment.steps, ending.uses)
    needed |= {node.var for node, _, _ in segment.assumed}
    graph_lines, module = _graph(machine, segment, needed)
    for text in segment.shapes.conditions() if segment.shapes is not None else ():
        segment.check(text, text)  # what the backend decided about symbols is among them
    guard, learning = _guard_lines(segment, tensor_lines, learning_lines)
    lines = [*guard, *graph_lines, *(step.text for step in steps), *ending.lines]
    roots = ", ".join(f"r{at}" for at in range(machine.root_count))
    source = _function("run", roots, lines)
    alone = _function("check", roots, [*learning, "return 0"])
    try:
        exec(compile(source + alone, RECORD, "exec"), segment.space)
    except SyntaxError as error:
        raise CaptureError(f"the generated record is not valid: {error}") from error
    # Not left in their own globals: a record that is dropped lets go of what it holds at once.
    run, check = segment.space.pop("run"), segment.space.pop("check")
    held = frozenset(id(node.obj) for node in segment.nodes.values() if node.pinned)
    made = Record(run, check, segment.checks, source, module, segment.operators, machine.site, held)
    made.split, made.where = (plan.why, plan.where) if plan is not None else ("", ())
    made.follows = () if plan is None else (plan.site, plan.failure)
    made.side, made.depth, made.branches = machine.side, ending.depth, frozenset(ending.branches)
    changed = changed_roots(segment)
    ends = ending.returns or (plan is not None and plan.site.forks)
    made.calls_cached = segment.calls_cached
    made.assumes = frozenset(here for _, _, here in segment.assumed)
    made.changed = changed or frozenset()
    made.unseen = ends and not made.assumes and _is_unseen(segment, changed)
    return made


def changed_roots(segment: Segment) -> frozenset[int] | None:
    """Return the numbers of the roots that a segment changes; None if it changes anything else outside."""
    own: dict[str, int] = {}
    for check in segment.checks:
        root = re.fullmatch(r"r(\d+)", check.text)
        inside = re.fullmatch(r"(v\d+)\.__dict__|\w+\((v\d+), '__dict__'\)", check.text)
        if check.binds is not None and root is not None:
            own[check.binds] = int(root[1])
        elif check.binds is not None and inside is not None and (var := inside[1] or inside[2]) in own:
            own[check.binds] = own[var]
    changed = set[str]().union(*(step.changes & segment.outside for step in segment.steps if step.keep))
    return frozenset(own[var] for var in changed) if changed <= own.keys() else None


def _is_unseen(segment: Segment, changed: frozenset[int] | None) -> bool:
    """Say whether a run that goes through a segment changes only roots, and cannot bring down a GPU."""
    written = segment.changes_tensors or segment.random or segment.state_written or segment.asserts
    return not written and changed is not None


def _function(name: str, parameters: str, lines: list[str]) -> str:
    return f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines)


def return_ending(segment: Segment, result: Any) -> Ending:
    """Return the end of a segment with which the program returns `result`."""
    uses: set[str] = set()
    return Ending([f"return (None, {segment.reference(result, uses)})"], uses, returns=True)


def raise_ending(segment: Segment, error: BaseException) -> Ending:
    """Return the end of a segment with which the program raises `error`."""
    uses: set[str] = set()
    return Ending([f"{segment.constant(again)}({segment.reference(error, uses)})"], uses)


def split_ending(segment: Segment, plan: Plan) -> Ending:
    """Return the end of a segment with a call that is made natively."""
    roots = "".join(f"{text}, " for text in plan.roots)
    site, failure = segment.constant(plan.site), segment.constant(plan.failure)
    lines = [
        "try:",
        f"    result = {plan.call}",
        "except Exception as error:",
        f"    return ({failure}, ({roots}error,))",
        f"return ({site}, ({roots}result,))",
    ]
    return Ending(lines, plan.uses, branches={plan.site} if plan.site.forks else set())


Open = tuple[Node, frozenset[int]]
"""A tensor, and which of its extents are left open."""


def _tensor_lines(segment: Segment) -> tuple[list[str], list[str]]:
    """Return bulk checks of the metadata of tensors; what they cannot check is checked one by one.

    The second form returns the paths of the extents that differ.
    """
    bulk: list[Open] = []
    entry = segment.entry_state, segment.entry_autocast
    usable = (torch_state(), autocast_state()) == entry
    for node, before, rows, left_open in segment.metadata:
        if usable and signature(node.obj) == before and is_plain_tensor(node.obj):
            bulk.append((node, left_open))
        else:
            _check_each(segment, rows)
    bulk.sort(key=lambda pair: pair[0].pinned)
    check = bulk_check([node.obj for node, _ in bulk], [left for _, left in bulk])
    if bulk and check is None:
        chosen = {id(node) for node, _ in bulk}
        for node, _, rows, _ in segment.metadata:
            _check_each(segment, rows if id(node) in chosen else [])
        return [], []
    for node, left_open in bulk:
        if left_open:
            segment.check(f"{node.var}.is_contiguous()", f"{segment.paths.get(node.var)} is contiguous")
    segment.checks.append(Check("True", None, f"metadata of {len(bulk)} tensors", None))
    pairs = [*_asking(segment, bulk, check)]
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
    if len(segment.checks) + len(facts) > MAX_CHECKS:
        raise CaptureError(f"a guard of more than {MAX_CHECKS} conditions")
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
        changed = any(node.mutated for node in nodes)
        changed |= issubclass(kind, torch.Tensor) and segment.changes_tensors
        changed |= kind in segment.distinct
        if changed and len(nodes) > 1:
            _check_group(segment, kind, nodes)


def _check_group(segment: Segment, kind: type, nodes: list[Node]) -> None:
    """Guard that objects of one type are distinct; those that stay are known to be."""
    stay = frozenset(id(node.obj) for node in nodes if node.var in segment.space)
    names = sorted({f"id({node.var})" for node in nodes if node.var not in segment.space})
    if names:
        found, others = f"{{{', '.join(names)}}}", segment.constant(stay)
        text = f"len({found} - {others}) == {len(names)}" if stay else f"len({found}) == {len(names)}"
        segment.check(text, f"{kind.__name__}s are distinct")


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


def graph_results(segment: Segment, needed: set[str]) -> tuple[list[Node], list[str]]:
    """Return the values that the graph must give, and the lines that make containers of them again.

    Graphs give tensors: what is in the tuples and lists of tensors that are needed becomes needed too.
    """
    wanted, lines = [], []
    for node in segment.graph_values:  # what is inside comes after what it is in
        if node.var not in needed:
            continue
        if not is_a(node.obj, tuple | list):
            wanted.append(node)
            continue
        needed |= {segment.node(item).var for item in node.obj if item is not None}
        items = "".join(f"{segment.reference(item, set())}, " for item in node.obj)
        lines.append(f"{node.var} = {segment.constant(type(node.obj))}(({items}))")
    return wanted, lines[::-1]


def _aliasing(segment: Segment, wanted: list[Node]) -> Aliasing:
    """Return what shares memory in the run that was recorded."""
    inputs = [example for _, _, example in segment.placeholders]
    before = [segment.versions[var] for _, var, _ in segment.placeholders]
    results = [node.obj for node in wanted]
    return aliasing_of(inputs, results, writes=segment.written_memory, before=before, late=segment.late)


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


def _switches_gradients(segment: Segment, graph: torch.fx.Graph, wanted: list[Node]) -> str:
    """Say what a graph does to the recording of gradients that a plan would not; empty if nothing."""
    if any(node.op == "call_method" and node.target in ASKING_FOR_GRADIENTS for node in graph.nodes):
        return "it says of tensors whether they have gradients"
    if any(is_a(node.obj, torch.Tensor) and node.obj.requires_grad for node in wanted):
        return "its results have gradients"
    before = segment.entry_state[STATE.index(torch.is_grad_enabled)]
    written = [node.args[0] for node in graph.nodes if node.target is torch._C._set_grad_enabled]
    if written and written[-1] is not before:
        return "it leaves the recording of gradients otherwise than it was"
    tensors = [item for _, _, item in segment.placeholders if is_a(item, torch.Tensor)]
    if True in written and any(item.requires_grad for item in tensors):
        return "gradients are recorded in a part of it"
    return ""


def _graph(machine: Recorder, segment: Segment, needed: set[str]) -> tuple[list[str], Any]:
    """Return the lines that run the graph, and the graph module (None if there is no operator)."""
    if not segment.operators:
        return [], None
    graph = segment.graph
    wanted, rebuilt = graph_results(segment, needed)
    graph.output(tuple(node.fx for node in wanted))
    without_unused_parts(graph)
    inputs = [(var, example) for _, var, example in segment.placeholders]
    try:
        root = with_modules(graph, segment.modules)
        if getattr(machine.captured.backend, "loops", False):
            root, graph = rolled(graph, root)
        module = torch.fx.GraphModule(root, graph)
        if why := _switches_gradients(segment, graph, wanted):
            module.meta["switches"] = why
        if not segment.modules:  # which side is taken decides it otherwise
            module.meta["aliasing"] = _aliasing(segment, wanted)
        if segment.shapes is not None:
            module.meta["open"] = _open_examples(segment)
        compiled = machine.captured.backend(module, [example for _, example in inputs])
    except Exception as error:
        if getattr(machine.captured.backend, "is_ours", False):
            raise CaptureError(tolerated(error, "a graph that cannot be built runs as it is")) from error
        raise CaptureError(f"the graph cannot be built: {type(error).__name__}: {error}") from error
    call = f"{segment.constant(compiled)}({', '.join(_spread(segment, [var for var, _ in inputs]))})"
    names = "".join(f"{node.var}, " for node in wanted) or "_"
    return [*_running_lines(segment, machine.site, f"{names} = {call}"), *rebuilt], module


def _running_lines(segment: Segment, site: Site | None, call: str) -> list[str]:
    """Return the lines that run the graph, and undo what it did where it raises or assumed what is not so."""
    failed = f"return ({segment.constant(FAILED)}, None)"
    grad, autocast = segment.entry_state[STATE.index(torch.is_grad_enabled)], segment.entry_autocast
    undo = f"    {segment.constant(restore_state)}({grad}, {segment.constant(autocast)})"
    random = segment.constant(torch.get_rng_state)
    lines, undone = [], [undo]
    if segment.random:
        lines.append(f"state = {random}()")
        undone.append(f"    {segment.constant(torch.set_rng_state)}(state)")
    if (segment.may_fail or segment.assumed) and segment.written:
        written = "".join(f"{node.var}, " for node in segment.written.values())
        lines.append(f"written = {segment.constant(saved_memory)}(({written}))")
        undone.append(f"    {segment.constant(restore_memory)}(written)")
    lines += ["try:", f"    {call}"]
    if segment.modules:
        lines += [f"except {segment.constant(Unrecorded)}:", *undone, "    return -1"]
    lines += ["except Exception:", *undone, f"    {failed}"]
    if segment.assumed:
        assert site is not None
        numbers = Assumed(site, [(here, number) for _, number, here in segment.assumed])
        read = ", ".join(node.var for node, _, _ in segment.assumed)
        lines += [f"if not {segment.constant(numbers.holds)}({read}):", *undone, "    return -1"]
    return lines
