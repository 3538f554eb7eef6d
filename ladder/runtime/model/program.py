"""The result of an importer: a kernel-level tile graph and how its inputs come from a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from tile_types.errors import LadderError


class ImportRefused(LadderError):
    """The program cannot be imported; the message says what of it, and why."""


@dataclass(frozen=True)
class Source:
    """Where a graph's input comes from.

    kind: ``"argument"``: argument ``at[0]`` of the call; ``"weight"``: the packed arrays of a quantized
        matrix, arguments ``at``; ``"held"``: tensor ``at[0]`` of `Program.held`; ``"part"``: an array that
        belongs to a packed weight, and is never passed on its own.
    at: Positions.
    gemm: For weights: the problem that the arrays were packed for.
    joined: Instead of ``at``: the positions of each of several weights that lie side by side here.
    dense: Whether the arguments of a weight are plain matrices ``[N, K]``, which the plan packs.
    turned: Whether plain matrices are stored as ``[K, N]``.
    graph: Of what is computed of arguments, once: the graph that does; ``joined`` has an argument per input.
    of_model: Whether an argument is a parameter or a buffer of a module, which calls seldom change.
    """

    kind: str
    at: tuple[int, ...] = ()
    gemm: Gemm | None = None
    joined: tuple[tuple[int, ...], ...] = ()
    dense: bool = False
    turned: bool = False
    graph: Graph | None = None
    of_model: bool = False


@dataclass(frozen=True)
class Program:
    """An imported program.

    graph: The tile graph; its outputs are the tensors that the call returns, then the new values of what it
        updates.
    sources: Input node -> where its value comes from.
    results: What the call returns, in order: the position of a graph output, or a literal in a tuple of one.
    updates: Arguments that the program changes in place: (position, graph output that holds the new value).
    held: Tensors that the program itself brings.
    arguments: How many arguments the call takes.
    sizes: Symbolic size -> (argument, axis) whose extent it is, or (argument, -1): the argument itself, or
        (argument, -2): its one element. Sizes that the shapes of inputs show need not be here.
    precise: Whether every operator's result is rounded as the program has it, and none is computed with
        another.
    """

    graph: Graph
    sources: Mapping[str, Source]
    results: tuple[int | tuple[Any], ...]
    updates: tuple[tuple[int, int], ...] = ()
    held: tuple[Any, ...] = field(default=(), compare=False)
    arguments: int = 0
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    precise: bool = False
