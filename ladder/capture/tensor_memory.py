"""Metadata of tensors that stay, by words of their memory: see `ladder.capture.memory`.

Where torch's tensors keep sizes, strides, type, device and whether a gradient is asked for is found out once
per process, by tensors that differ in just that; then every way of changing them in place is tried. Where
anything comes out otherwise, guards ask the tensors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ladder.capture import memory
from ladder.capture.memory import WORD, Memory

LOOKED_AT = 24
"""Words of a tensor's implementation, and of what it keeps for autograd, in which fields are looked for."""

LEAST_ADDRESS = 1 << 16
"""No memory of a process lies below."""

SAMPLES = 6
"""Equal tensors that are compared to learn which words have nothing to do with what they are."""

RANKS = 5
"""Most dimensions whose sizes and strides lie in the implementation itself."""


@dataclass(frozen=True)
class Places:
    """Numbers of words.

    Parameters
    ----------
    pointer
        Of the Python object: the pointer to the implementation.
    rank, sizes, strides
        Of the implementation.
    kinds
        Those that differ with the type of elements and the device.
    autograd
        The pointer to what is kept for autograd; 0 is nothing.
    gradient
        Of the latter: those that differ with whether a gradient is asked for.
    """

    pointer: int
    rank: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kinds: tuple[int, ...]
    autograd: int
    gradient: tuple[int, ...]

    def of(self, rank: int) -> list[int]:
        """Return the words of an implementation of `rank` dimensions."""
        return [self.rank, *self.sizes[:rank], *self.strides[:rank], *self.kinds, self.autograd]


class Watched:
    """Tensors whose metadata are compared by their memory.

    Parameters
    ----------
    tensors
        Those that `can_watch` takes.
    check
        Says of tensors, by asking them, whether their metadata are what they are to be.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], check: Callable[..., bool]) -> None:
        self.tensors, self.check = tuple(tensors), check
        self.look()

    def look(self) -> None:
        """Take what the tensors are now for what they are to be."""
        found = places()
        assert found is not None  # `can_watch` says so
        heads, bodies, ends = [], [], []
        for tensor in self.tensors:
            body = tensor._cdata
            heads += [id(tensor) + memory.CLASS_OFFSET, id(tensor) + WORD * found.pointer]
            bodies += [body + WORD * word for word in found.of(tensor.dim())]
            end = _word(body, found.autograd)
            ends += [end + WORD * word for word in found.gradient] if end else []
        # What is behind a pointer is read only after the pointer was found to be the same.
        self.heads, self.bodies, self.ends = (Memory(words).take for words in (heads, bodies, ends))
        self.seen = self.heads().tobytes(), self.bodies().tobytes(), self.ends().tobytes()

    def same(self) -> bool:
        """Say whether nothing has changed."""
        heads, bodies, ends = self.seen
        return bool(
            self.heads().tobytes() == heads
            and self.bodies().tobytes() == bodies
            and self.ends().tobytes() == ends
        )

    def again(self) -> bool:
        """Ask the tensors; if all are what they are to be, their memory is taken for that from now on."""
        holds = bool(self.check(*self.tensors))
        if holds:
            self.look()
        return holds


def can_watch(tensor: torch.Tensor) -> bool:
    """Say whether the words of a tensor are where they are looked for."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    found = places() if plain and tensor.dim() <= RANKS else None
    if found is None:
        return False
    words, rank = _words(tensor._cdata), tensor.dim()
    shown = [words[found.rank], *(words[at] for at in (*found.sizes[:rank], *found.strides[:rank]))]
    lies_there = _word(id(tensor), found.pointer) == tensor._cdata
    return lies_there and shown == [rank, *tensor.shape, *tensor.stride()]


def _word(address: int, number: int) -> int:
    return int(struct.unpack("n", memory.word_at(address + WORD * number))[0])


def _words(address: int) -> tuple[int, ...]:
    return struct.unpack(f"{LOOKED_AT}n", ctypes.string_at(address, LOOKED_AT * WORD))


@cache
def places() -> Places | None:
    """Return where tensors keep what; None if that cannot be told."""
    if not memory.KNOWN:
        return None
    try:
        with torch.inference_mode(False), torch.no_grad():
            found = _found()
            return found if _follows(found) else None
    except (ValueError, IndexError, RuntimeError, AttributeError):
        return None


def _only(numbers: Sequence[int]) -> int:
    """Return the only item; raises ValueError if there are others."""
    (number,) = numbers
    return number


def _kinds() -> tuple[int, ...]:
    """Return the words with bytes that tell tensors of different types and devices apart, and only those."""
    options: list[dict[str, Any]] = [
        *({}, {"dtype": torch.float64}, {"dtype": torch.int32}),
        {"device": "meta"},
    ]
    alike = [[torch.zeros(3, **given) for _ in range(SAMPLES)] for given in options]
    seen = [[ctypes.string_at(tensor._cdata, LOOKED_AT * WORD) for tensor in group] for group in alike]
    found = set()
    for at in range(LOOKED_AT * WORD):  # what lies between fields is anything
        groups = [{body[at] for body in group} for group in seen]
        if all(len(group) == 1 for group in groups) and len(set().union(*groups)) > 1:
            found.add(at // WORD)
    return tuple(sorted(found))


def _found() -> Places:
    """Look for the words; raises ValueError where that is ambiguous."""
    sizes, strides = (23, 29, 31, 37, 41), (1000003, 100003, 10007, 1009, 101)
    words = _words(torch.empty_strided(sizes, strides, device="meta")._cdata)
    owner = torch.zeros(3)
    head = struct.unpack("4n", ctypes.string_at(id(owner), 4 * WORD))
    before = _words(owner._cdata)
    owner.requires_grad_(True)
    after = _words(owner._cdata)
    autograd = _only([at for at in range(LOOKED_AT) if before[at] == 0 != after[at]])
    if after[autograd] < LEAST_ADDRESS or after[autograd] % WORD:
        raise ValueError("what autograd keeps is not behind a pointer")
    return Places(
        pointer=_only([at for at, word in enumerate(head) if word == owner._cdata]),
        rank=_only([at for at, word in enumerate(words) if word == len(sizes)]),
        sizes=tuple(words.index(size) for size in sizes),
        strides=tuple(words.index(stride) for stride in strides),
        kinds=_kinds(),
        autograd=autograd,
        gradient=tuple(sorted(_gradient(owner, after[autograd]))),
    )


def _gradient(owner: torch.Tensor, end: int) -> set[int]:
    """Return the words kept for autograd that differ with the two ways of asking for a gradient."""
    asked = _words(end)
    owner.requires_grad_(False)
    found = {at for at, word in enumerate(_words(end)) if word != asked[at]}
    before = _words(end)
    with torch.enable_grad():
        owner.add_(torch.ones(3, requires_grad=True))
    return found | {at for at, word in enumerate(_words(end)) if word != before[at]}


def _asked_by_history() -> tuple[torch.Tensor, Callable[[], Any]]:
    tensor, other = torch.zeros(2).requires_grad_(True).requires_grad_(False), torch.ones(2)

    def change() -> None:
        with torch.enable_grad():
            tensor.add_(other.requires_grad_(True))

    return tensor, change


def _changes() -> list[tuple[torch.Tensor, Callable[[], Any]]]:
    """Return tensors, each with what changes its metadata in place."""
    new = [torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False) for _ in range(12)]
    plain = [torch.zeros(1, 2, 3) for _ in range(8)]
    double = torch.zeros(2, 3, dtype=torch.float64)
    swap: Callable[..., Any] = torch.utils.swap_tensors
    return [
        (new[0], lambda: setattr(new[0], "data", torch.zeros(4, 3))),
        (new[1], lambda: setattr(new[1], "data", torch.zeros(3, 2).t())),
        (new[2], lambda: setattr(new[2], "data", double)),
        (new[3], lambda: new[3].requires_grad_(True)),
        (new[4], lambda: setattr(new[4], "requires_grad", True)),
        (new[5], lambda: new[5].resize_(6)),
        (new[6], partial(swap, new[6], torch.nn.Parameter(torch.zeros(5)))),
        (new[7], lambda: setattr(new[7], "__class__", torch.Tensor)),
        (plain[0], lambda: plain[0].transpose_(1, 2)),
        (plain[1], lambda: plain[1].squeeze_(0)),
        (plain[2], lambda: plain[2].unsqueeze_(0)),
        (plain[3], lambda: plain[3].as_strided_((2, 2), (1, 2))),
        (plain[4], partial(plain[4].set_, torch.zeros(7).untyped_storage(), 0, (7,), (1,))),
        (plain[5], lambda: plain[5].requires_grad_(True)),
        (plain[6], lambda: plain[6].resize_(2, 1, 3)),
        _asked_by_history(),
    ]


def _follows(found: Places) -> bool:
    """Say whether the words change with the metadata, and with nothing else."""
    for tensor, change in _changes():
        words = _seen(found, tensor)
        tensor.detach().clone().add_(1)
        tensor.view_as(tensor)
        if _seen(found, tensor) != words:
            return False
        change()
        if _seen(found, tensor) == words:
            return False
    return True


def _seen(found: Places, tensor: torch.Tensor) -> list[int]:
    words = _words(tensor._cdata)
    ends = [_word(words[found.autograd], at) for at in found.gradient] if words[found.autograd] else []
    head = [id(type(tensor)), _word(id(tensor), found.pointer)]
    return [*head, *(words[at] for at in found.of(tensor.dim())), *ends]
