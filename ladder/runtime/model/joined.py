"""Arrays that a plan makes of its arguments: weights side by side, folded, and packed for kernels.

They are copies: made at the first call, and again when a part is another tensor or was changed in place.
Those of several layers that one plan serves are kept side by side.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.lower.cpu.pack import NUMBERS, WIDEST_NUMBER, as_plain, computed_as, factors_side_by_side
from ladder.runtime.compile import target_of
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.probes import Noted
from ladder.runtime.model.program import Source
from ladder.runtime.model.sizes import CallSizes
from ladder.runtime.packed import pack
from targets import get_device
from tile_types import quantize


# Subgraphs of parameters alone, computed once by torch in the types of the graph ---------------------
def computed(graph: Graph, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the only result of a graph of `ladder.runtime.model.nodes.EVALUATED` operators, contiguous.

    graph: Its shapes are known.
    values: One per input, in order.
    """
    where = values[0].device
    result: Any = graph_run(graph, CallSizes(()), where)(*values)
    return result.to(where).contiguous()  # type: ignore[no-any-return]


DENSE = ("words", "row_scale")
"""Arrays of a packed matrix of floats."""


def numbers_side_by_side(
    parts: Sequence[torch.Tensor], computed: str, scales: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Return scales or zero points of CPU kernels side by side, of the widest type that a part has.

    computed: The type that kernels compute with them in (`ladder.lower.cpu.pack.NUMBERS`).
    scales: Those of zero points.
    """
    if all(part.shape[-1] > WIDEST_NUMBER for part in parts):
        return factors_side_by_side(parts)
    parts = [
        as_plain(part, *scales[at : at + 1]) if part.shape[-1] > WIDEST_NUMBER else part
        for at, part in enumerate(parts)
    ]
    kinds = {size: getattr(torch, name) for size, name in NUMBERS[computed].items()}
    widest = kinds[max(part.shape[-1] for part in parts)]
    numbers = [part.view(kinds[part.shape[-1]]).to(widest) for part in parts]
    return torch.cat(numbers, 1).view(torch.uint8)


@dataclass(frozen=True)
class Join:
    """One array: arguments ``parts`` one after the other along ``axis``.

    numbers: If they are scales or zero points: the type that CPU kernels compute with them in.
    scales: Arguments that are the scales of zero points.
    """

    parts: tuple[int, ...]
    axis: int
    numbers: str = ""
    count: int = 1
    scales: tuple[int, ...] = ()

    def made(self, values: Sequence[Any]) -> list[torch.Tensor]:
        parts = [values[at].detach() for at in self.parts]
        if self.numbers and parts[0].dtype == torch.uint8:
            scales = [values[at].detach() for at in self.scales]
            return [numbers_side_by_side(parts, self.numbers, scales)]
        return [torch.cat(parts, self.axis)]


def filled_up(gemm: Gemm, matrix: torch.Tensor) -> torch.Tensor:
    """Return a weight ``[N, K]``, zeros behind the rows of each group where kernels take more than it has."""
    if gemm.windows is None or not gemm.windows.features:
        return matrix
    groups = matrix.view(gemm.windows.groups, gemm.windows.features, gemm.k)
    rows = gemm.n // gemm.windows.groups
    return F.pad(groups, (0, 0, 0, rows - gemm.windows.features)).reshape(gemm.n, gemm.k)


@dataclass(frozen=True)
class Pack:
    """The packed arrays of matrices ``[N, K]`` (``[K, N]`` where `turned`) side by side, for a problem.

    With a graph, of the one matrix that it computes.
    """

    parts: tuple[int, ...]
    gemm: Gemm
    turned: bool = False
    graph: Graph | None = None
    count: int = len(DENSE)

    def made(self, values: Sequence[Any]) -> list[torch.Tensor]:
        stored = [values[at].detach() for at in self.parts]
        if self.graph is None:
            matrix = torch.cat([part.t() if self.turned else part for part in stored]).contiguous()
        else:
            matrix = filled_up(self.gemm, computed(self.graph, stored).reshape(-1, self.gemm.k))
        packed = pack(self.gemm, get_device(target_of(matrix.device)), quantize(matrix, self.gemm.weight))
        return [packed.arrays[name] for name in DENSE]


@dataclass(frozen=True)
class Made:
    """One array that a graph computes of arguments."""

    parts: tuple[int, ...]
    graph: Graph
    count: int = 1

    def made(self, values: Sequence[Any]) -> list[torch.Tensor]:
        return [computed(self.graph, [values[at].detach() for at in self.parts])]


def joins_of(source: Source) -> list[Join | Pack | Made]:
    """Return what makes the arrays of a source, in the order in which kernels take them.

    Packed words have rows of the weight along their first axis, what goes with them (scales, zero points)
    along the last; a matrix or a vector has one axis for both; matrices ``[K, N]`` lie along the last.
    """
    joined = source.joined or (source.at,)
    if source.dense:
        assert source.gemm is not None  # that is what a weight has
        return [Pack(tuple(at for (at,) in joined), source.gemm, source.turned, source.graph)]
    if source.graph is not None:
        return [Made(tuple(at for (at,) in joined), source.graph)]
    numbers = {} if source.gemm is None else numbers_in(source.gemm)
    arrays = list(enumerate(zip(*joined, strict=True)))
    scales = {at + 1: parts for at, parts in arrays if at in numbers}
    return [
        Join(
            parts,
            -1 if at or source.turned else 0,
            numbers.get(at, ""),
            scales=scales.get(at, ()) if at in numbers else (),
        )
        for at, parts in arrays
    ]


def numbers_in(gemm: Gemm) -> dict[int, str]:
    """Return where scales and zero points are among packed arrays, and what they are computed with in."""
    wanted = {"scale": gemm.scale, "zero": gemm.zero != "none"}
    names = [name for name, present in wanted.items() if present]
    return {place: computed_as(gemm, name) for place, name in enumerate(names, 1)}


MOST_PARKED = 128
"""Sets of arrays that a plan keeps beside those of the last call: of layers that share it."""

ROOM = 4
"""Times the bytes of a set of arrays that must be free on a GPU where one more is kept."""


class Parked:
    """Arrays, and what their parts were; the parts may go, and `drop` is called then."""

    def __init__(self, noted: Noted, arrays: tuple[torch.Tensor, ...], drop: Callable[[], Any]) -> None:
        self.arrays = arrays
        self.parts = [weakref.ref(part, lambda _: drop()) for part in noted.parts]
        self.facts = noted.addresses, noted.versions
        self.reads = noted.reads
        self.known = noted.probes.known

    def are_of(self, noted: Noted) -> bool:
        """Tell whether these parts are the ones, and hold what they held."""
        same = all(ref() is part for ref, part in zip(self.parts, noted.parts, strict=True))
        if not same or self.facts != (noted.addresses, noted.versions) or not self.reads.hold():
            return False
        known = noted.probes.known
        return known is None or (self.known is not None and torch.equal(known, self.known))


class Joined:
    """The arrays of a plan.

    joins: What to make of the arguments of a call.
    """

    def __init__(self, joins: Sequence[Join | Pack | Made]) -> None:
        self.joins = tuple(joins)
        self.read = tuple(dict.fromkeys(at for join in self.joins for at in join.parts))
        self.places = frozenset(self.read)
        self.noted = Noted(())
        """The parts that the arrays were made of."""
        self.arrays: tuple[torch.Tensor, ...] = ()
        self.generation = 0
        """How often the arrays were made."""
        self._seen = 0
        """The generation of arguments in which the parts were looked at."""
        self.settled = False
        """Whether the parts are constants, at which no call looks again."""
        self._parked: dict[tuple[int, ...], Parked] = {}
        """Ids of other parts, of other layers that one plan serves -> what was made of them."""

    def settle(self, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Join the parts for good, which nothing else references or writes; return the arrays."""
        arrays = self.of(values)
        self.settled = True
        return arrays

    def of(self, values: Sequence[Any], generation: int = 0) -> tuple[torch.Tensor, ...]:
        """Return the arrays for the arguments of a call; the same tensors while no part changes.

        `generation`: the same one tells that the parts are the same tensors at the same addresses, as of
        `Look`; 0 tells nothing.
        """
        if self.settled:
            return self.arrays
        if self.joins and not self._hold(values, generation):
            self._take(values)
            self.generation += 1
            if self.generation == 1:
                _finish(self.arrays[0].device)
        self._seen = generation
        return self.arrays

    def _take(self, values: Sequence[Any]) -> None:
        """Take the arrays of these parts: those that were made of them before, or make them."""
        noted = Noted([values[at] for at in self.read])
        before, now = tuple(map(id, self.noted.parts)), tuple(map(id, noted.parts))
        parked = self._parked.pop(now, None)
        again = parked is not None and parked.are_of(noted)
        if before and before != now and (again or self._has_room()):
            self._parked[before] = Parked(self.noted, self.arrays, lambda: self._parked.pop(before, None))
        if parked is not None and again:
            self.arrays = parked.arrays
        else:
            with torch.no_grad(), torch._C._DisableAutocast():
                self.arrays = tuple(array for join in self.joins for array in join.made(values))
        self.noted = noted

    def _has_room(self) -> bool:
        """Tell whether one set of arrays more may be kept."""
        where, needed = self.arrays[0].device, sum(array.nbytes for array in self.arrays)
        room = where.type != "cuda" or torch.cuda.mem_get_info(where)[0] > ROOM * needed
        return room and len(self._parked) < MOST_PARKED

    def _hold(self, values: Sequence[Any], generation: int) -> bool:
        if generation and generation == self._seen:
            return self.noted.unwritten()
        return self.noted.hold([values[at] for at in self.read])


def _finish(where: torch.device) -> None:
    """Wait for a GPU: calls in other streams, which wait for nothing of this one, read what was made."""
    if where.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(where).synchronize()
