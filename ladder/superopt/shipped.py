"""The shipped database of proven graphs: by the canonical form of a program, for any sizes and numbers.

``shipped.json`` holds what `benchmarks.ship_graphs` found. An entry's structures have the numbers that they
were found with; at use they take those of the program at hand, for which equality is proved again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from ladder.superopt.canonical import Canonical
from ladder.superopt.generator import Limits, Program, Report, VerifiedGraph
from ladder.superopt.generator.alphabet import numbers_of
from ladder.superopt.generator.choose import choose_factors
from ladder.superopt.generator.instantiate import instantiate
from ladder.superopt.generator.report import Counts
from ladder.superopt.generator.search import proved
from ladder.superopt.generator.stored import certificate_of, structure_of
from ladder.superopt.generator.structure import Structure
from ladder.superopt.verifier import DELTA, Stability
from tile_types.errors import ShapeError

PATH = Path(__file__).with_name("shipped.json")


@dataclass(frozen=True)
class Entry:
    """Graphs that were found for a program.

    pattern, weights: Of `benchmarks.graph_patterns`.
    numbers: Of the program, in order.
    found: Per graph its structure, its printed form over symbols, its certificate, extents and stability, and
        the types in which it is stable.
    """

    pattern: str
    weights: str
    numbers: tuple[float, ...]
    found: tuple[Mapping[str, Any], ...]

    def structures(self, program: Program) -> list[Structure]:
        """Return the graphs with the numbers of a program in canonical form, best first."""
        numbers = dict(zip(self.numbers, numbers_of(program.symbolic), strict=True))
        return [structure_of(found["structure"]).with_constants(numbers) for found in self.found]


@lru_cache(maxsize=1)
def entries() -> Mapping[str, Entry]:
    """Return key -> entry of the shipped database."""
    stored = json.loads(PATH.read_text("utf-8")) if PATH.exists() else {}
    return {
        key: Entry(e["pattern"], e["weights"], tuple(e["numbers"]), tuple(e["found"]))
        for key, e in stored.items()
    }


def recalled(form: Canonical, limits: Limits, most: int) -> Report | None:
    """Return up to ``most`` shipped graphs for a program; None if there are none.

    Their certificates are those that were shipped, for the numbers that they were found with: `certified`
    proves one for the program's own.

    form: The program: its sizes decide the tiles.
    limits: Those of the device.
    """
    entry = entries().get(form.key)
    if entry is None:
        return None
    found: list[VerifiedGraph] = []
    graph = form.program.symbolic
    ttype = graph.tile(graph.outputs[0]).ttype.name
    for structure, given in zip(entry.structures(form.program), entry.found, strict=True):
        if ttype not in given["types"]:
            continue
        with suppress(ShapeError):  # no tiles divide these sizes
            found.append(_found(structure, given, form.program, limits))
    ranked = sorted(found, key=lambda one: one.cost)[:most]
    return Report(form.program, limits, tuple(ranked), (), Counts(), 0.0, True, recalled=True)


def _found(structure: Structure, given: Mapping[str, Any], program: Program, limits: Limits) -> VerifiedGraph:
    factors, cost = choose_factors(structure, program, limits.units, limits.capacity)
    graph = instantiate(structure, program, factors, packed=True)
    stability = Stability(**given["stability"])
    proof = certificate_of(given["certificate"])
    return VerifiedGraph(structure, graph, proof, given["extents"], stability, cost)


def certified(found: VerifiedGraph, program: Program, limits: Limits) -> VerifiedGraph | str:
    """Return a graph with a proof for just this program, or why it is not equal or not stable."""
    proof = proved(found.structure, program, limits, Fraction(DELTA))
    return proof if isinstance(proof, str) or proof.stability.stable else proof.stability.reason
