"""Loads of attention on AMD GPUs: limits of rows, q, and the keys, values and masks of an iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_place import Place, Spec, aligned
from ladder.lower.rocm.grouped import WaveLanes
from schedules.wave_attention import FRAGMENT

Expr = Any


@dataclass(frozen=True)
class Limits:
    """How many keys each of the lane's rows of q sees, by part, and how many its wave needs."""

    rows: list[Expr]
    needed: Expr


def find_limits(spec: Spec, place: Place) -> Limits:
    """Emit how many keys the lane's rows see, and its wave needs."""
    form, keys = spec.form, place.inputs.numbers["keys"]
    parts = range(spec.schedule.parts)
    if not (form.causal or form.position):
        return Limits([keys for _ in parts], keys)
    rows = [place.seen_keys(form, row_of(spec, place, part)) for part in parts]
    most = rows[0] if len(rows) == 1 else b.keep(T.max(*rows))
    lanes = WaveLanes(place.lane, spec.device.warp)
    for distance in (1, 2, 4, 8):
        most = b.keep(T.max(most, lanes.shuffle_xor(most, distance)))
    return Limits(rows, lanes.uniform(most))


def row_of(spec: Spec, place: Place, part: int) -> Expr:
    """Return the row of the block that a lane has in a part of its scores."""
    return place.row_wave * spec.schedule.wave_rows + part * FRAGMENT + place.c


def load(tensor: Any, at: Expr, elements: int, width: int) -> tuple[Expr, int]:
    """Return neighbouring elements of a tensor as words (less than one is its low bits), and how many."""
    nbytes = elements * width
    loaded = tensor[d.lanes(at, elements)]
    if nbytes < 4:
        return T.Cast("uint32", d.as_type(loaded, f"uint{8 * nbytes}")), 1
    words = nbytes // 4
    return d.as_type(loaded, "uint32" if words == 1 else f"uint32x{words}"), words


def load_queries(spec: Spec, place: Place) -> list[list[Expr]]:
    """Load q as operands of scores, by part."""
    n, operands = place.inputs.numbers, spec.operands
    queries: list[list[Expr]] = []
    widest = 8
    for part in range(spec.schedule.parts):
        token, head = place.query(row_of(spec, place, part))
        at = aligned(place.batch * n["q_b"] + head * n["q_h"] + token * n["q_s"], 2)
        piece = operands.key_elements
        step = min(piece, widest)
        places = range(0, operands.key_pieces * piece, step)
        words = d.Pieces([step // 2] * len(places))
        for index, first in enumerate(places):
            column = at + (first // piece * operands.groups + place.g) * piece + first % piece
            words.store(index, *load(place.inputs.tensors["q"], column, step, 2))
        own = operands.query_words([words[i] for i in range(len(words.places))])
        queries.append(operands.whole(own, place.g))
    return queries


class Keys:
    """Registers of the keys, values, scales and masks of an iteration, and their loads.

    needed: How many keys the wave needs.
    """

    def __init__(self, spec: Spec, place: Place, needed: Expr) -> None:
        self.spec, self.place, self.needed = spec, place, needed
        form, operands, fragments = spec.form, spec.operands, spec.schedule.fragments
        self.key_words = _words(operands.key_elements * operands.width)
        self.value_words = _words(operands.value_elements * operands.width)
        self.keys = d.Pieces([self.key_words] * (fragments * operands.key_pieces))
        self.values = d.Pieces([self.value_words] * (fragments * spec.run * operands.value_pieces))
        scales = [1] * (fragments * spec.run) if operands.scaled else []
        self.key_scales, self.value_scales = d.Pieces(scales), d.Pieces(scales)
        self.masks = d.Pieces([1] * len(spec.scores) if form.mask else [])
        self.begins = {name: aligned(place.begin(name), operands.width) for name in "kv"}
        n = place.inputs.numbers
        self.steps = {name: aligned(n[f"{name}_s"], operands.width) for name in "kv"}

    def load_keys(self, iteration: Expr) -> None:
        """Load the lane's part of a key of each of an iteration's fragments, and the scales of its scores."""
        operands, place = self.spec.operands, self.place
        piece = operands.key_elements
        for fragment in range(self.spec.schedule.fragments):
            at = self._row("k", self._key(iteration, fragment, place.left))
            for index in range(operands.key_pieces):
                column = at + (index * operands.groups + place.g) * piece
                found = load(place.inputs.tensors["k"], column, piece, operands.width)
                self.keys.store(fragment * operands.key_pieces + index, *found)
        if operands.scaled:
            self._load_scales("k_scale", iteration, self.key_scales)

    def load_values(self, iteration: Expr) -> None:
        """Load an iteration's values: pieces of those of its run of keys of each fragment."""
        operands, place = self.spec.operands, self.place
        piece = operands.value_elements
        for fragment in range(self.spec.schedule.fragments):
            for key in range(self.spec.run):
                at = self._row("v", self._key(iteration, fragment, place.g * self.spec.run + key))
                for index in range(operands.value_pieces):
                    column = at + (index * FRAGMENT + place.left) * piece
                    found = load(place.inputs.tensors["v"], column, piece, operands.width)
                    self.values.store(
                        (fragment * self.spec.run + key) * operands.value_pieces + index, *found
                    )
        if operands.scaled:
            self._load_scales("v_scale", iteration, self.value_scales)

    def load_mask(self, iteration: Expr) -> None:
        """Load what the mask says of the lane's scores."""
        place, n, mask = self.place, self.place.inputs.numbers, self.place.inputs.tensors["mask"]
        rows = []
        for part in range(self.spec.schedule.parts):
            token, head = place.query(row_of(self.spec, place, part))
            rows.append(b.bind(place.batch * n["mask_b"] + head * n["mask_h"] + token * n["mask_s"]))
        for index, (fragment, part, element) in enumerate(self.spec.scores):
            key = self._key(iteration, fragment, place.g * self.spec.run + element)
            self.masks.store(index, _mask_word(mask[rows[part] + key]), 1)

    def mask(self, index: int) -> Expr:
        """Return what the mask says of a score: a truth value, or what is added."""
        kind, word = self.spec.form.mask, self.masks[index]
        return word != T.uint32(0) if kind == "bool" else d.as_type(word, "float32")

    def key(self, fragment: int) -> list[Expr]:
        """Return the words of the lane's part of a key."""
        count = self.spec.operands.key_pieces * self.key_words
        return [self.keys[fragment * count + i] for i in range(count)]

    def value(self, fragment: int) -> list[list[Expr]]:
        """Return the words of the lane's pieces of a run of values."""
        count = self.spec.operands.value_pieces * self.value_words
        first, run = fragment * self.spec.run, range(self.spec.run)
        return [[self.values[(first + key) * count + i] for i in range(count)] for key in run]

    def _row(self, name: str, key: Expr) -> Expr:
        return self.begins[name] + key * self.steps[name]

    def _key(self, iteration: Expr, fragment: int, within: Expr) -> Expr:
        """Return a key of an iteration; those beyond the last are the last: their weight is 0."""
        return b.bind(
            T.min(iteration * self.spec.schedule.span + (fragment * FRAGMENT + within), self.needed - 1)
        )

    def _load_scales(self, name: str, iteration: Expr, scales: d.Pieces) -> None:
        place, tensor = self.place, self.place.inputs.tensors[name]
        for fragment in range(self.spec.schedule.fragments):
            for element in range(self.spec.run):
                key = self._key(iteration, fragment, place.g * self.spec.run + element)
                at = place.begin(name) + key * place.inputs.numbers[f"{name}_s"]
                scales.store(fragment * self.spec.run + element, d.as_type(tensor[at], "uint32"), 1)


def _words(nbytes: int) -> int:
    return max(1, nbytes // 4)


def _mask_word(value: Expr) -> Expr:
    """Return an element of a mask as a word: a truth value, or the bits of a float32."""
    dtype = str(value.ty.dtype)
    if dtype == "uint8":
        return T.Cast("uint32", value)
    if dtype == "bfloat16":
        return T.Cast("uint32", d.as_type(value, "uint16")) << T.uint32(16)
    return d.as_type(T.Cast("float32", value), "uint32")
