"""Stores of a chain's results on GPUs, also of rows that are combined with those of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import TYPE_CHECKING

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.indices import Index

if TYPE_CHECKING:
    from ladder.lower.chain.gpu_nest import GpuNest


def storing(nest: GpuNest, value: str, places: Sequence[Index], found: list[Expr]) -> Callable[[], None]:
    """Return what stores neighbouring elements of a result; numbers of rows are read now."""
    dtype, buffer = stored_type(nest.graph.tile(value).ttype.name), nest.results[value]
    scatter, order = nest.scatters.get(value), nest.orders.get(value)
    together = len(places) if order is None else gcd(len(places), order.run)

    def store() -> None:
        with nest.placed(value, places) as target:
            for first in range(0, len(target), together):
                part = slice(first, first + together)
                nest.vectors.store(buffer, dtype, target[part], found[part])

    if scatter is None or not scatter.combine:
        return store
    target, operation = combined_places(nest, value, places), scatter.combine

    def combine() -> None:
        each = 1 if scatter.by_element else len(target)
        for first in range(0, len(target), each):
            place, own = target[first], found[first : first + each]
            if nest.bins is not None:
                nest.bins.combine(place, own)
            else:
                nest.dialect.combine(operation, buffer, place, dtype, own)

    return combine


def combined_places(nest: GpuNest, value: str, places: Sequence[Index]) -> list[Index]:
    """Return where elements of a result go that are combined with what is there: numbers are read now."""
    scatter = nest.scatters[value]
    extent, axis = nest.extent(scatter.base.shape[scatter.axis]), scatter.axis

    def row(place: Index) -> Expr:
        number = nest.buffers[scatter.ids][place if scatter.along else place[axis]]
        found = nest.values.row_number(number, extent, scatter.from_end)
        return b.bind(b.Variable("int32", found).value)

    apart = places if scatter.by_element else places[:1]
    rows = [row(place) for place in apart] * (len(places) // len(apart))
    return [(*place[:axis], at, *place[axis + 1 :]) for place, at in zip(places, rows, strict=True)]
