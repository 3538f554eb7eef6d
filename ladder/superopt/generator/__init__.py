"""The search for block graphs: what is enumerated, how it is pruned, and how it is run.

`program` describes what to optimise over named dimensions, `space` the choices (grid, loop, imap, fmap and
operators in canonical order), `instantiate` turns a found structure into a tile graph for any extents,
`search` enumerates, verifies and reports.
"""

from __future__ import annotations

from ladder.superopt.generator.instantiate import instantiate
from ladder.superopt.generator.program import PROGRAMS, Program, get_program
from ladder.superopt.generator.search import Found, Limits, Report, search
from ladder.superopt.generator.space import Mapping, Step, Structure

__all__ = [
    "PROGRAMS",
    "Found",
    "Limits",
    "Mapping",
    "Program",
    "Report",
    "Step",
    "Structure",
    "get_program",
    "instantiate",
    "search",
]
