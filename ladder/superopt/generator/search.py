"""Running the search: processes, budget, progress, checkpoints, verification of what is found."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from ladder.forks import follow_parent
from ladder.superopt.expressions import Pruner
from ladder.superopt.generator.alphabet import Alphabet, require_searchable
from ladder.superopt.generator.centred import centred
from ladder.superopt.generator.choose import choose_factors
from ladder.superopt.generator.instantiate import (
    at_factors,
    axes_of,
    instantiate,
    operand_axes,
    small_factors,
    small_program,
    symbolic_program,
)
from ladder.superopt.generator.mapping import mappings
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.reach import FAR
from ladder.superopt.generator.report import Counts, Limits, Report, VerifiedGraph, least_tile, operators_of
from ladder.superopt.generator.space import COMBINING, Partial, Space, Value, replayed, targets_of
from ladder.superopt.generator.stored import identity, structure_of
from ladder.superopt.generator.structure import WHOLE, Mapping, Prefix, Structure
from ladder.superopt.verifier import (
    DELTA,
    SUBTRACTS,
    Stability,
    agree_at_once,
    check_stability,
    subtracted_degree,
    verify_for_all_extents,
)
from tile_types.errors import ParseError, ScheduleError, ShapeError, VerificationError
from tile_types.files import replacing

LATE = "out of time before the proof"

UNLIMITED = 1 << 62
"""Bytes that tensors of a kernel may take: they lie in device memory."""

TILE = 8
"""Extents of tiles in the stability test: enough elements that errors are no accidents."""

TEST_EXTENT = 2
"""Extent that every factor of a size has when a candidate is tested with numbers."""


DEEPER = 4
"""How many times as many graphs as usual are proved while none of them is stable."""


SEARCHING = 0.7
"""Share of the time that is for the search, the rest for proofs of what it found."""


T = TypeVar("T")
Progress = Callable[[str, float | None], None]


def search(
    program: Program,
    limits: Limits | None = None,
    *,
    checkpoint: Path | None = None,
    step: Progress | None = None,
    seed: int | None = None,
) -> Report:
    """Search block graphs that equal a program.

    limits: Defaults of `Limits`.
    checkpoint: File of finished parts: an interrupted search of the same program and limits goes on there.
    step: Told what is being done.
    seed: Of the data of the stability tests. Proofs draw their own seeds.
    Returns Report: The same for the same arguments, but for seconds and certificates' draws, if complete.
    Raises ScheduleError if the program has something that the search cannot express yet.
    Raises ParseError if the checkpoint is a file of another kind.
    """
    require_searchable(program.symbolic)
    limits, began = limits or Limits(), time.monotonic()
    whole, inner, within = centred(program), program, limits
    if whole is not None:
        inner = whole.program
        spare = limits.operators - operators_of(program)
        within = replace(limits, operators=max(1, operators_of(inner) + spare))
    tasks = list(tasks_of(inner, within))
    done = _read_checkpoint(checkpoint, program, limits)
    searched, deadline = (
        limits.seconds and time.time() + share * limits.seconds for share in (SEARCHING, 1.0)
    )
    left = {number: task for number, task in enumerate(tasks) if number not in done}
    parts = _run(inner, within, left, searched)
    for number, outcome in _told(parts, len(tasks), f"{program.name}: {{}} of {{}} parts", step, len(done)):
        done[number] = outcome
        _write_checkpoint(checkpoint, program, limits, done)
    outcomes = [done[number] for number in sorted(done)]
    counts = Counts()
    for outcome in outcomes:
        counts.add(outcome.counts)
    structures = [structure for outcome in outcomes for structure in outcome.structures]
    structures = structures if whole is None else list(map(whole.completed, structures))
    structures = _ordered(structures, program, limits, counts)
    each = Fraction(DELTA) / max(1, min(len(structures), DEEPER * limits.proofs))
    finished: list[VerifiedGraph | str] = []
    for some in _proved_together(structures, limits.proofs, finished):
        results = _finished(some, program, limits, each, seed or 0, deadline)
        finished += _told(results, len(some), f"{program.name}: {{}} of {{}} proofs", step)
    dearer = len(structures) - len(finished)
    counts.verified -= dearer
    for result in finished:
        if isinstance(result, str):
            counts.reject(result)
    complete = len(done) == len(tasks) and all(outcome.complete for outcome in outcomes)
    complete = complete and LATE not in finished
    stable, unstable = _ranked(result for result in finished if isinstance(result, VerifiedGraph))
    seconds, delta = time.monotonic() - began, each * len(finished)
    return Report(program, limits, stable, unstable, counts, seconds, complete, dearer, delta=delta)


def _ranked(graphs: Iterable[VerifiedGraph]) -> tuple[tuple[VerifiedGraph, ...], tuple[VerifiedGraph, ...]]:
    """Return the graphs that are stable and those that are not, the cheapest first."""
    ranked = sorted(graphs, key=lambda found: (found.cost, len(found.structure.steps), str(found.structure)))
    stable = tuple(found for found in ranked if found.stability.stable)
    return stable, tuple(found for found in ranked if not found.stability.stable)


def _told(results: Iterable[T], count: int, text: str, step: Progress | None, done: int = 0) -> Iterator[T]:
    """Yield results, after each saying how many of ``count`` there are."""
    for number, result in enumerate(results, done + 1):
        yield result
        if step is not None:
            step(text.format(number, count), number / count)


@dataclass(frozen=True)
class Task:
    """One part of the search: what runs before the block graph, and how that is mapped."""

    prefix: Prefix
    mapping: Mapping


def tasks_of(program: Program, limits: Limits) -> Iterator[Task]:
    """Yield the tasks, in order."""
    _, output = axes_of(program)
    for prefix in prefixes_of(program, limits):
        axes = operand_axes(prefix, program)
        found = mappings(axes, output, program.sizes, limits.choices(program))
        yield from (Task(prefix, mapping) for mapping in found)


def prefixes_of(program: Program, limits: Limits) -> Iterator[Prefix]:
    """Yield every sequence of kernels before the block graph that pruning keeps, and what they pass on.

    What is unused is passed on, of the rest any part.
    """
    inputs, output = axes_of(program)
    count = len(inputs)
    mapping = replace(WHOLE, imap=((),) * count, fmap=((),) * count)
    target = program.graph({name: mapping.full(name) for name in program.sizes})
    named = [(axes, node.name) for axes, node in zip(inputs, target.inputs, strict=True)]
    alphabet = Alphabet.of(program.symbolic)
    pruner = Pruner(targets_of(target, alphabet), limits.pruning)
    packed = [number for number, node in enumerate(target.inputs) if node.name in program.packed]
    space = Space(mapping, named, output, alphabet, program.sizes, UNLIMITED, pruner, packed=packed)
    stack = [space.start()]
    while stack:
        partial = stack.pop()
        if partial is None:
            continue
        used = [i for i in range(len(partial.values)) if i not in partial.unused]
        for choice in itertools.product((False, True), repeat=len(used)):
            kept = {i for i, chosen in zip(used, choice, strict=True) if chosen}
            yield Prefix(partial.steps, tuple(sorted(partial.unused | kept)))
        if len(partial.steps) + 1 < limits.kernels:
            longer, _ = space.moves(partial, lambda value: pruner.keeps(value.expression))
            stack += [partial.with_step(step, value) for step, value in reversed(longer)]


@dataclass
class Outcome:
    """Result of one task."""

    counts: Counts
    structures: list[Structure]
    complete: bool


def _run(
    program: Program, limits: Limits, tasks: dict[int, Task], deadline: float | None
) -> Iterator[tuple[int, Outcome]]:
    """Search tasks, in processes if there are several; yield outcomes as they come.

    With a budget of states, each process may visit so many before the others are stopped.
    """
    left = limits.states
    if limits.workers <= 1:
        for number, task in tasks.items():
            outcome = search_task(program, limits, task, deadline, left)
            if left is not None:
                left = max(0, left - outcome.counts.states)
            yield number, outcome
        return
    with ProcessPoolExecutor(limits.workers, initializer=follow_parent) as pool:
        futures = {
            pool.submit(search_task, program, limits, task, deadline, left): number
            for number, task in tasks.items()
        }
        for future in as_completed(futures):
            outcome = future.result()
            yield futures[future], outcome
            if left is not None:
                left -= outcome.counts.states
                if left <= 0:
                    pool.shutdown(cancel_futures=True)
                    return


def search_task(
    program: Program, limits: Limits, task: Task, deadline: float | None, states: int | None
) -> Outcome:
    """Search the block graphs of one task; none if it begins too late."""
    if is_late(deadline):
        return Outcome(Counts(), [], False)
    return Explorer(program, limits, task, deadline, states).run()


def is_late(deadline: float | None) -> bool:
    """Tell whether a time has passed; None never does."""
    return deadline is not None and time.time() > deadline


class Explorer:
    """Depth-first search of one task."""

    def __init__(
        self, program: Program, limits: Limits, task: Task, deadline: float | None, states: int | None
    ) -> None:
        self.program, self.limits, self.task = program, limits, task
        mapping = task.mapping
        self.deadline, self.budget = deadline, states
        inputs, output = axes_of(program)
        target = program.graph({name: mapping.full(name) for name in program.sizes})
        alphabet = Alphabet.of(program.symbolic)
        self.pruner = Pruner(targets_of(target, alphabet), limits.pruning)
        named = [(axes, node.name) for axes, node in zip(inputs, target.inputs, strict=True)]
        values = replayed(task.prefix.steps, named, mapping, self.pruner)
        operands = zip(operand_axes(task.prefix, program), task.prefix.operands, strict=True)
        named = [(axes, values[number][1]) for axes, number in operands]
        packed = packed_operands(program, task.prefix)
        self.space = Space(
            mapping, named, output, alphabet, program.sizes, limits.capacity, self.pruner,
            least_tile(program), packed,
        )  # fmt: skip
        self.steps = limits.operators + (COMBINING if mapping.split else 0)
        self.shifted = any(node.operator == "reduce_max" for node in program.symbolic.nodes)
        self.reach: dict[Value, int] | None = None
        self.small = small_factors(mapping, program, TEST_EXTENT)
        self.reference = small_program(mapping, program, self.small)
        self.subtracted = subtracted_degree(self.reference)
        self.outcome = Outcome(Counts(), [], True)

    def run(self) -> Outcome:
        """Search all of it, or until the budget ends."""
        start = self.space.start()
        if start is not None and all(self.pruner.keeps(value.expression) for value in start.values):
            self.reach = self.space.reach(start, lambda: is_late(self.deadline))
            if all(self._within(value, self.steps) for value in start.values):
                self._visit(start)
        return self.outcome

    def _allows(self, value: Value) -> bool:
        """Whether a value can be part of a result at all."""
        return self.pruner.keeps(value.expression) and (self.reach is None or value in self.reach)

    def _within(self, value: Value, left: int) -> bool:
        """Whether a value may be part of a result with so many steps more."""
        return self.reach is None or self.reach.get(value, FAR) <= left

    def _visit(self, partial: Partial) -> None:
        counts, space = self.outcome.counts, self.space
        counts.states += 1
        if partial.steps and space.complete(partial):
            self._candidate(partial)
        left = self.steps - len(partial.steps)
        if left == 0 or self._spent():
            return
        moves, pruned = space.moves(partial, self._allows)
        counts.pruned += pruned
        for step, value in moves:
            longer = partial.with_step(step, value)
            if not all(self._within(longer.values[i], left - 1) for i in longer.unused):
                continue
            if not space.hopeless(longer, left - 1) and space.fits(longer, self.limits.operators):
                self._visit(longer)
            if not self.outcome.complete:
                return

    def _spent(self) -> bool:
        counts = self.outcome.counts
        if is_late(self.deadline) or (self.budget is not None and counts.states >= self.budget):
            self.outcome.complete = False
        return not self.outcome.complete

    def _candidate(self, partial: Partial) -> None:
        counts = self.outcome.counts
        counts.candidates += 1
        if not self.limits.compare:
            return
        structure = Structure(self.task.prefix, self.task.mapping, partial.steps, self.shifted)
        counts.verified += 1
        try:
            candidate = instantiate(structure, self.program, self.small)
            if subtracted_degree(candidate) > self.subtracted:
                counts.reject(SUBTRACTS)
                return
            if agree_at_once(self.reference, candidate, seed=0):
                self.outcome.structures.append(structure)
                return
            reason = "outputs differ in a finite field"
        except (ScheduleError, VerificationError) as error:
            reason = str(error)
        counts.reject(reason)


def packed_operands(program: Program, prefix: Prefix) -> list[int]:
    """Return which operands of a block graph are quantized."""
    inputs = [node.name for node in program.symbolic.inputs]
    names = [inputs[i] if i < len(inputs) else "" for i in prefix.operands]
    return [number for number, name in enumerate(names) if name in program.packed]


def _proved_together(
    structures: list[Structure], most: int, finished: Sequence[VerifiedGraph | str]
) -> Iterator[list[Structure]]:
    """Yield the structures to be proved next, while none of those finished is stable."""
    for first in range(0, min(len(structures), DEEPER * most), most):
        if any(isinstance(result, VerifiedGraph) and result.stability.stable for result in finished):
            break
        yield structures[first : first + most]


def _ordered(
    structures: list[Structure], program: Program, limits: Limits, counts: Counts
) -> list[Structure]:
    """Return the structures that have tiles for the program's sizes, those to be proved first in front."""
    costs: list[tuple[float, int, int]] = []
    for number, structure in enumerate(structures):
        try:
            cost = choose_factors(structure, program, limits.units, limits.capacity)[1]
            costs.append((cost, len(structure.steps), number))
        except ShapeError as error:
            counts.reject(str(error))
    return [structures[number] for number in _one_of_each(sorted(costs), structures)]


def _one_of_each(costs: Sequence[tuple[float, int, int]], structures: Sequence[Structure]) -> list[int]:
    """Return the numbers of structures: the cheapest of each mapping first, then the second ..."""
    before: dict[Mapping, int] = {}
    order: list[tuple[int, float, int, int]] = []
    for cost, steps, number in costs:
        rank = before.setdefault(structures[number].mapping, 0)
        before[structures[number].mapping] += 1
        order.append((rank, cost, steps, number))
    return [number for *_, number in sorted(order)]


def _finished(
    structures: Sequence[Structure],
    program: Program,
    limits: Limits,
    delta: Fraction,
    seed: int,
    deadline: float | None,
) -> Iterator[VerifiedGraph | str]:
    """Finish structures, in processes if there are several, in order."""
    every = [(structure, program, limits, delta, seed, deadline) for structure in structures]
    if limits.workers <= 1 or len(every) < 2:
        yield from itertools.starmap(proved, every)
        return
    with ProcessPoolExecutor(limits.workers, initializer=follow_parent) as pool:
        yield from pool.map(proved, *zip(*every, strict=True))


def proved(
    structure: Structure,
    program: Program,
    limits: Limits,
    delta: Fraction,
    seed: int = 0,
    deadline: float | None = None,
) -> VerifiedGraph | str:
    """Prove a graph for all extents, test it in floating point, and choose tiles; or return why not.

    delta: Bound on the probability of a wrong proof.
    seed: Of the data of the floating-point test.
    deadline: Time after which nothing is proved.
    """
    if is_late(deadline):
        return LATE
    factors, cost = choose_factors(structure, program, limits.units, limits.capacity)
    certificate, extents = verify_for_all_extents(
        symbolic_program(structure.mapping, program),
        instantiate(structure, program),
        delta=delta,
    )
    if not certificate.equal:
        return certificate.reason
    graph = instantiate(structure, program, factors, packed=True)
    stability = _stability(structure, program, seed)
    return VerifiedGraph(structure, graph, certificate, extents, stability, cost)


def _stability(structure: Structure, program: Program, seed: int) -> Stability:
    """Test at tiles of 8 elements a side and 16 steps, with the constants that belong to these sizes.

    Two loop dimensions have 8 steps each.
    """
    mapping = structure.mapping
    names = [name for dimension in program.sizes for name in mapping.factors(dimension)]
    factors = {name: TILE if name.endswith("t") else 2 for name in names}
    factors.update({f"{dimension}l": 16 // len(mapping.loops) for dimension in mapping.loops})
    changed, small = at_factors(structure, program, factors)
    return check_stability(instantiate(changed, small, factors), small.graph(), seed=seed)


def _write_checkpoint(path: Path | None, program: Program, limits: Limits, done: dict[int, Outcome]) -> None:
    if path is None:
        return
    finished = {
        str(number): {"counts": asdict(outcome.counts), "structures": [asdict(s) for s in outcome.structures]}
        for number, outcome in sorted(done.items())
        if outcome.complete
    }
    with replacing(path) as part:
        part.write_text(json.dumps({**identity(program, limits), "done": finished}), encoding="utf-8")


def _read_checkpoint(path: Path | None, program: Program, limits: Limits) -> dict[int, Outcome]:
    """Return finished mappings, none from a checkpoint of another search.

    Raises ParseError if the file is no checkpoint: it would be overwritten.
    """
    if path is None or not path.exists():
        return {}
    wanted = json.loads(json.dumps(identity(program, limits)))
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParseError(f"{path} is no checkpoint of a search ({error}); name another file") from error
    if not isinstance(stored, dict) or not {*wanted, "done"} <= stored.keys():
        raise ParseError(f"{path} is no checkpoint of a search; name another file")
    if {name: stored.get(name) for name in wanted} != wanted:
        return {}
    return {
        int(number): Outcome(
            Counts(**entry["counts"]), [structure_of(value) for value in entry["structures"]], True
        )
        for number, entry in stored["done"].items()
    }
