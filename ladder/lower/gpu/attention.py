"""Shared parts of attention kernels: arguments, and which rows and keys a thread works on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir.attention import Attention
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.proven import Proven, proven_recipes
from ladder.lower.gpu.recipes import Conversion, LaneRecipe, Lanes16

ALIGNMENT = {"q": 16, "k": 16, "v": 16, "out": 16}
"""Bytes at which tensors begin that are accessed in wide pieces."""


LOWEST = -1e30
"""Where maxima begin: below every score that counts, and finite, so that differences are numbers."""

VECTOR = 4
"""Elements of a head that a thread joins at a time."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of a kernel: extents and strides, and tensors of one axis."""

    numbers: Mapping[str, Expr]
    tensors: Mapping[str, Any]


def declare_inputs(form: Attention, without: str = "") -> Inputs:
    """Declare the arguments in calling order.

    without: A tensor that the kernel makes itself.
    """
    numbers = {name: I.arg(name, I.int32()) for name in form.numbers(without)}
    tensors = {
        name: b.tensor(name, (b.symbol(f"{name}_length"),), _tir(ttype), align=ALIGNMENT.get(name, 1))
        for name, ttype in form.tensors(without).items()
    }
    return Inputs(numbers, tensors)


def unseen_rows(form: Attention, keys: Expr) -> Expr:
    """Return what a row that sees none of the keys is: 0, or NaN where the form is strict."""
    return T.Select(keys > 0, T.float32(math.nan), T.float32(0)) if form.strict else T.float32(0)


Function = Callable[[Expr], Expr]


def lane_decoders(conversion: Conversion) -> Iterator[tuple[Proven, LaneRecipe, float]]:
    """Yield proven decoders of two codes in 16-bit lanes whose results lack one factor: it comes last."""
    for proven in proven_recipes(conversion):
        recipe, meaning = proven.recipe, proven.meaning
        if isinstance(recipe, Lanes16) and len(set(meaning.gains)) == 1 and not any(meaning.offsets):
            yield proven, recipe.inner, meaning.gains[0]


class WordOperands(ABC):
    """Operands of 16-bit elements, two to a register, from words of K, V and q as they are loaded."""

    scaled: bool
    """Whether K and V are codes with scales, four to a word."""

    def in_order(self, words: Sequence[Expr]) -> list[Expr]:
        """Return q's operand registers, in the order in which those of K come."""
        if not self.scaled:
            return list(words)
        pairs = zip(words[::2], words[1::2], strict=True)  # codes 0 and 2, then 1 and 3 of a word of K
        return [word for pair in pairs for word in self.halves(*pair)]

    def side_by_side(self, low: Expr, high: Expr) -> list[Expr]:
        """Return the elements of two words side by side: one register for each place in a word."""
        return [pair for word in self.halves(low, high) for pair in self.pairs(word)]

    def pairs(self, word: Expr) -> list[Expr]:
        """Return a word of K or V as registers of two elements."""
        return [self.decoded(word, position) for position in (0, 8)] if self.scaled else [word]

    @abstractmethod
    def halves(self, low: Expr, high: Expr) -> Iterator[Expr]:
        """Yield the low halves of two words side by side, then the high ones."""

    @abstractmethod
    def decoded(self, word: Expr, position: int) -> Expr:
        """Return the codes of 8 bits that begin at a bit of each half of a word, as numbers."""


def weigh(
    scores: list[Expr], mine: Sequence[int], row: Sequence[b.Variable], most: Function, power: Function,
    lift: float = 0.0,
) -> Expr:  # fmt: skip
    """Make weights of the scores of one row (online softmax); returns what sums so far are multiplied by.

    mine, row: Which scores are the row's; its largest score so far and the sum of its weights.
    most, power: Emit the largest number of all lanes that have keys of the row, and a power of two.
    lift: Binary digits by which weights are larger.
    """
    largest: Expr = row[0].value
    for at in mine:
        largest = T.max(largest, scores[at])
    largest = most(largest)
    shrink = b.Variable("float32", power(row[0].value - largest)).value
    row[0].set(largest)
    base = largest - T.float32(lift) if lift else largest
    added: Expr = row[1].value * shrink
    for at in mine:
        scores[at] = b.Variable("float32", power(scores[at] - base)).value
        added = added + scores[at]
    row[1].set(added)
    return shrink


def joined(
    states: Sequence[list[Expr]], parts: Iterable[list[Expr]], power: Function
) -> tuple[list[Expr], Expr, Expr]:
    """Return sums that were scaled to different largest scores as one, the largest, and all weights' sum.

    states: Largest score and sum of weights of each part.
    parts: `VECTOR` sums of each; none where only the states are wanted.
    """
    largest = states[0][0]
    for state in states[1:]:
        largest = T.max(largest, state[0])
    largest = b.Variable("float32", largest).value
    factors = [b.Variable("float32", power(state[0] - largest)).value for state in states]
    total: Expr = T.float32(0)
    for factor, state in zip(factors, states, strict=True):
        total = total + factor * state[1]
    sums: list[Expr] = [T.float32(0)] * VECTOR
    for factor, part in zip(factors, parts, strict=False):
        sums = [found + factor * value for found, value in zip(sums, part, strict=True)]
    return sums, largest, total


def _tir(ttype: str) -> str:
    """Return the TIR type of a tensor; truth values are bytes."""
    return "uint8" if ttype == "bool" else b.tir_name(ttype)


@dataclass(frozen=True)
class HeadPlace:
    """Where a thread works.

    inputs, group: The arguments, and the heads of q that share keys.
    head, batch: Head of keys, and batch, of the block.
    first_row, row_count: First row of q (tokens times heads of the group) of the block, and how many it has.
    thread, lane: The thread in its block, and the lane in its warp.
    g, c: Row and column group of the lane in a fragment; on AMD GPUs which 16 lanes of the wave the lane is
        of, and which of them it is.
    """

    inputs: Inputs
    group: int
    head: Expr
    batch: Expr
    first_row: Expr
    row_count: Expr
    thread: Expr
    lane: Expr
    g: Expr
    c: Expr

    def begin(self, name: str) -> Expr:
        """Return the first element of this block's head of keys or what belongs to them."""
        return first_of_head(self.inputs, self.batch, self.head, name)

    def query(self, row: Expr) -> tuple[Expr, Expr]:
        """Return token and head of q of a row of the block; rows beyond the last are the last."""
        row = b.bind(T.min(row, self.row_count - 1) + self.first_row)
        return b.bind(row // self.group), b.bind(self.head * self.group + row % self.group)

    def position(self, row: Expr) -> Expr:
        """Return the position of a row of q, in a register."""
        n = self.inputs.numbers
        token, _ = self.query(row)
        at = self.batch * n["position_b"] + token * n["position_s"]
        return b.keep(T.Cast("int32", self.inputs.tensors["position"][at]))

    def seen_keys(self, form: Attention, row: Expr, position: Expr = None) -> Expr:
        """Return how many keys a row of q sees.

        position: As of `position`, where it is loaded already.
        """
        limit = self.inputs.numbers["keys"]
        if form.causal:
            limit = T.min(limit, self.query(row)[0] + 1)
        if form.position:
            seen = (self.position(row) if position is None else position) + form.reach
            limit = T.max(T.min(limit, seen), 0)
        return b.keep(limit)


@dataclass(frozen=True)
class Limits:
    """How many keys each of a lane's rows of q sees, by part of its scores, and how many its block needs.

    rows: On NVIDIA GPUs a lane has two rows in each part; on AMD GPUs one, and ``needed`` is its wave's.
    """

    rows: list[Any]
    needed: Expr


def first_of_head(inputs: Inputs, batch: Expr, head: Expr, name: str) -> Expr:
    """Return the first element of a head of keys or what belongs to them."""
    return batch * inputs.numbers[f"{name}_b"] + head * inputs.numbers[f"{name}_h"]
