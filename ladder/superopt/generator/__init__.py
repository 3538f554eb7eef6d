"""The search for block graphs: what is enumerated, how it is pruned, and how it is run.

`program` describes what to optimise over named dimensions, `structure` what is found, `mapping` the choices
of grid, loop, imap and fmap, `alphabet` and `space` those of operators in canonical order. `instantiate`
and `emitter` turn a structure into a tile graph for any extents, `choose` its extents; `search`
enumerates and verifies, `report` is what it takes and gives, `stored` keeps that.
"""

from __future__ import annotations

from ladder.superopt.generator.instantiate import instantiate
from ladder.superopt.generator.program import PROGRAMS, Program, get_program
from ladder.superopt.generator.report import Limits, Report, VerifiedGraph
from ladder.superopt.generator.search import search
from ladder.superopt.generator.stored import Database
from ladder.superopt.generator.structure import GraphStep, Mapping, Structure

__all__ = [
    "PROGRAMS",
    "Database",
    "GraphStep",
    "Limits",
    "Mapping",
    "Program",
    "Report",
    "Structure",
    "VerifiedGraph",
    "get_program",
    "instantiate",
    "search",
]
