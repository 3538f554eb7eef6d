"""`Grid`: the values of a type in order, and the codes of those nearest to given numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tile_types.arrays import Array, arrays_of

BUCKET_BITS = 16
"""Upper bits of a float64, by which encoding looks up the values near it."""


@dataclass(frozen=True)
class Grid:
    """The distinct values of a type in ascending order, with their codes and decision points.

    ``thresholds[i]`` is the least float64 that rounds to entry i+1 rather than to entry i.
    ``mask`` selects the bits of a code where codes are the lowest bits of their values in two's complement,
    else it is 0.
    """

    codes: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    thresholds: npt.NDArray[np.float64]
    integers: bool
    mask: int

    @staticmethod
    def of(codes: npt.NDArray[np.uint32], values: npt.NDArray[np.float64]) -> Grid:
        """Sort the finite values; of equal values (+0 and -0) the smallest code stays."""
        distinct, first = np.unique(values, return_index=True)
        ordered = codes[first].astype(np.int64)
        low, high = distinct[:-1], distinct[1:]
        step = high - low
        multiple = np.rint(high / step)
        on_lattice = (multiple * step == high) & ((multiple - 1) * step == low)
        high_wins = np.where(on_lattice, multiple % 2 == 0, ordered[1:] % 2 == 0)
        middle = low + step / 2
        thresholds = np.where(high_wins, middle, np.nextafter(middle, np.inf))
        integers = bool(np.all(step == 1) and np.all(distinct == np.rint(distinct)))
        mask = (1 << int(ordered.max()).bit_length()) - 1
        plain = integers and bool(np.all(ordered == (distinct.astype(np.int64) & mask)))
        return Grid(ordered, distinct, thresholds, integers, mask if plain else 0)

    def encode(self, values: Array) -> Array:
        """Return the codes of the entries nearest to finite float64 values."""
        xp = arrays_of(values)
        if self.integers:
            least, most = float(self.values[0]), float(self.values[-1])
            nearest = xp.cast(xp.clip(xp.rint(values), least, most), "int32")
            if self.mask:
                return nearest & self.mask
            index = nearest - int(least)
        else:
            index = self._index(values)
        return xp.take(xp.array(self.codes, "int32", values), index)

    def _index(self, values: Array) -> Array:
        """Count the thresholds that each value reaches."""
        xp = arrays_of(values)
        if self._buckets is None:
            return xp.searchsorted(xp.array(self.thresholds, "float64", values), values)
        passed, threshold = (xp.array(table, str(table.dtype), values) for table in self._buckets)
        bits = xp.view(values, "int64").reshape(values.shape)
        bucket = xp.cast(bits >> (64 - BUCKET_BITS), "int32") & ((1 << BUCKET_BITS) - 1)
        return xp.take(passed, bucket) + xp.cast(values >= xp.take(threshold, bucket), "int32")

    @cached_property
    def _buckets(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]] | None:
        """For each pattern of upper bits: how many thresholds lie below, and the one among its numbers.

        That is infinity if there is none among them; None if there are several among them somewhere.
        """
        first = np.arange(1 << BUCKET_BITS, dtype=np.uint64) << np.uint64(64 - BUCKET_BITS)
        last = first | np.uint64((1 << (64 - BUCKET_BITS)) - 1)
        ends = np.sort(np.stack([first, last]).view(np.float64), axis=0)
        ends[:, np.isnan(ends).any(axis=0)] = 0.0  # of no finite value
        passed, reached = (np.searchsorted(self.thresholds, end, side="right") for end in ends)
        if (reached - passed > 1).any():
            return None
        following = np.append(self.thresholds, np.inf)[passed]
        return passed.astype(np.int32), np.where(reached > passed, following, np.inf)
