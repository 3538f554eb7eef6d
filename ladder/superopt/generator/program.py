"""Programs to optimise: graphs over named dimensions, so that one definition serves all extents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ladder.ir.build import GraphBuilder
from ladder.ir.graph import Graph
from tile_types.errors import UnknownNameError, unknown_name
from tile_types.tile import Extent

Extents = Mapping[str, Extent]


@dataclass(frozen=True)
class Program:
    """A tensor program.

    Parameters
    ----------
    name
        For reports.
    define
        ``(extents, sizes) -> kernel graph`` with these extents (numbers or symbols) for the dimensions.
        Constants such as 1/K follow ``sizes``, whatever the extents are.
    sizes
        Extent of every dimension; the axes of the inputs are its dimensions.
    doc
        One line.
    """

    name: str
    define: Callable[[Extents, Mapping[str, int]], Graph]
    sizes: Mapping[str, int]
    doc: str = ""

    def graph(self, extents: Extents | None = None) -> Graph:
        """Return the program with other extents, or its own."""
        return self.define(extents or self.sizes, self.sizes)

    @cached_property
    def symbolic(self) -> Graph:
        """The program with each dimension's name as extent."""
        return self.graph({name: name for name in self.sizes})

    def resized(self, **sizes: int) -> Program:
        """Return the program with other sizes; raises UnknownNameError for a dimension it lacks."""
        for name in sizes:
            if name not in self.sizes:
                raise unknown_name(f"dimension of {self.name}", name, self.sizes)
        return Program(self.name, self.define, {**self.sizes, **sizes}, self.doc)


TYPE = "float16"


def _rmsnorm_matmul(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("rmsnorm_matmul")
    x, w = g.input("X", TYPE, (n["B"], n["K"])), g.input("W", TYPE, (n["K"], n["N"]))
    mean = g.add("constant", value=1.0 / sizes["K"], type=TYPE)
    square = g.add("mul", g.add("reduce_sum", g.add("square", x), axis=1), mean)
    return g.finish(g.add("matmul", g.add("div", x, g.add("sqrt", square)), w))


def _gated_mlp(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("gated_mlp")
    x = g.input("X", TYPE, (n["B"], n["K"]))
    gate, up = (g.input(name, TYPE, (n["K"], n["N"])) for name in ("G", "U"))
    return g.finish(g.add("mul", g.add("silu", g.add("matmul", x, gate)), g.add("matmul", x, up)))


def _lora(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("lora")
    x, w = g.input("X", TYPE, (n["B"], n["K"])), g.input("W", TYPE, (n["K"], n["N"]))
    a, b = g.input("A", TYPE, (n["K"], n["R"])), g.input("B", TYPE, (n["R"], n["N"]))
    low = g.add("matmul", g.add("matmul", x, a), b)
    return g.finish(g.add("add", g.add("matmul", x, w), low))


PROGRAMS: Mapping[str, Program] = {
    program.name: program
    for program in (
        Program(
            "rmsnorm_matmul", _rmsnorm_matmul, {"B": 16, "K": 4096, "N": 6144},
            "X / sqrt(mean(X * X)) · W",
        ),
        Program("gated_mlp", _gated_mlp, {"B": 8, "K": 4096, "N": 4096}, "silu(X · G) * (X · U)"),
        Program("lora", _lora, {"B": 16, "K": 256, "N": 4096, "R": 16}, "X · W + (X · A) · B"),
    )
}  # fmt: skip
"""Programs by name, with the sizes of the H200 baselines."""

LATER = ("gqa", "qknorm_attention", "ntrans")
"""Programs that the search cannot express yet: softmax over a split axis and several results per block."""


def get_program(name: str) -> Program:
    """Return a program by name; raises UnknownNameError with the nearest names."""
    if name in LATER:
        raise UnknownNameError(f"program {name!r} is not there yet; there are {', '.join(PROGRAMS)}")
    if name not in PROGRAMS:
        raise unknown_name("program", name, PROGRAMS)
    return PROGRAMS[name]
