"""Reads of ``parameter.data``, as torch does not count what is written through it.

Adapters are merged so, and older optimizers write so. `torch.nn.Parameter.data` becomes a property with the
same results, which counts the reads of parameters that a plan has made something of. Nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch

PARAMETER: Any = torch.nn.Parameter
DATA: Any = torch.Tensor.data
"""Torch's own attribute."""


class Reads:
    """How often ``data`` of one parameter was read or set.

    parameter: It must live as long as whoever watches it.
    """

    every = 0
    """Reads of all that are watched."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.count = 0
        _WATCHED[id(parameter)] = self


_WATCHED: WeakValueDictionary[int, Reads] = WeakValueDictionary()
"""Id of a parameter, or of what stands for it -> its reads, as long as anybody watches it."""


def _reads_of(parameter: torch.Tensor) -> Reads:
    return _WATCHED.get(id(parameter)) or Reads(parameter)


class Detached:
    """A plain tensor that stands for a parameter: while this lives, their reads are the same."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter, self.tensor = parameter, parameter.detach()
        self.reads = _reads_of(parameter)
        _WATCHED[id(self.tensor)] = self.reads

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Tell whether the parameter is this one, where it lay."""
        return self.parameter is parameter and self.tensor.data_ptr() == parameter.data_ptr()


class DataReads:
    """What was read of ``data`` of those of some tensors that are parameters, or stand for them (`Detached`).

    tensors: They must live as long as this.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        PARAMETER.data = COUNTED
        self._every = Reads.every
        known = [each for each in tensors if isinstance(each, PARAMETER) or id(each) in _WATCHED]
        self.watched = [*map(_reads_of, known)]
        self.counts = [each.count for each in self.watched]

    def hold(self) -> bool:
        """Tell whether none was read since."""
        if self._every != (every := Reads.every):
            if [each.count for each in self.watched] != self.counts:
                return False
            self._every = every
        return True

    @classmethod
    def together(cls, parts: Sequence[DataReads]) -> DataReads:
        """Return the reads of all parts, each since it was made."""
        found = cls(())
        found._every = min((part._every for part in parts), default=Reads.every)
        found.watched = [*chain.from_iterable(part.watched for part in parts)]
        found.counts = [*chain.from_iterable(part.counts for part in parts)]
        return found


def _read(parameter: torch.nn.Parameter) -> torch.Tensor:
    _note(parameter)
    return DATA.__get__(parameter)  # type: ignore[no-any-return]


def _set(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    _note(parameter)
    DATA.__set__(parameter, values)


def _note(parameter: torch.nn.Parameter) -> None:
    known = _WATCHED.get(id(parameter))
    if known is not None:
        known.count += 1
        Reads.every += 1


COUNTED = property(_read, _set, doc=DATA.__doc__)
