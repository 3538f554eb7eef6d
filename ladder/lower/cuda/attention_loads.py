"""Loads of attention: the limits of rows, q, and the keys, values and masks of an iteration, in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.attention_place import Place, Spec
from schedules.attention import FRAGMENT, STEP_ROWS, WARP

Expr = Any

LOADS = {4: "ld.global.L1::no_allocate.u32", 8: "ld.global.L1::no_allocate.v2.u32",
         16: "ld.global.L1::no_allocate.v4.u32"}  # fmt: skip
"""Bytes -> load of what is read once."""

PREFETCH = "prefetch.global.L2"


def prefetch(spec: Spec, place: Place) -> None:
    """Bring the first keys and values into L2 while the kernel before still runs."""
    form, n = spec.form, place.inputs.numbers
    lines = -(-form.size * form.stored_bytes // 128)
    for part in range(-(-spec.span * lines // WARP)):
        piece = b.bind(place.lane + part * WARP)
        key = b.bind(place.worker * spec.span + piece // lines)
        with b.when(T.And(piece < spec.span * lines, key < n["keys"])):
            for name in ("k", "v"):
                at = place.begins[name] + key * n[f"{name}_s"]
                at = at + piece % lines * (128 // form.stored_bytes)
                b.ptx(PREFETCH, place.inputs.tensors[name].ptr_to([at]))


@dataclass(frozen=True)
class Limits:
    """Keys that count.

    rows: How many keys each of the lane's rows of q sees, by part and row.
    needed: How many the block needs.
    """

    rows: list[list[Expr]]
    needed: Expr


def find_limits(spec: Spec, place: Place) -> Limits:
    """Emit how many keys each of the lane's rows sees, and the block needs."""
    form, keys = spec.form, place.inputs.numbers["keys"]
    if not (form.causal or form.position):
        return Limits([[keys, keys] for _ in range(spec.parts)], keys)
    rows: list[list[Expr]] = []
    most: Expr = 0
    for part in range(spec.parts):
        rows.append([])
        for row in range(2):
            rows[part].append(place.seen_keys(form, part * STEP_ROWS + 2 * place.c + row))
            most = T.max(most, rows[part][row])
    for distance in (1, 2):
        most = b.bind(most)
        other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), most, distance, WARP, WARP)
        most = T.max(most, other)
    return Limits(rows, b.keep(most))


def load(spec: Spec, place: Place, tensor: str, at: Expr, words: Any, first: int, nbytes: int) -> None:
    """Load neighbouring bytes of a tensor into words."""
    step = min(nbytes, 16)
    per_step = step // 4
    for part in range(nbytes // step):
        targets = (words[first + part * per_step + i] for i in range(per_step))
        elements = part * step * spec.form.size // spec.operands.row_bytes(tensor)
        b.ptx(LOADS[step], *targets, place.inputs.tensors[tensor].ptr_to([at + elements]))


def load_queries(spec: Spec, place: Place) -> list[list[Expr]]:
    """Load q as the B operand of scores: rows ``g`` of each part."""
    n, operands = place.inputs.numbers, spec.operands
    queries: list[list[Expr]] = []
    for part in range(spec.parts):
        token, head = place.query(part * STEP_ROWS + place.g)
        at = b.bind(place.batch * n["q_b"] + head * n["q_h"] + token * n["q_s"])
        words = b.local(spec.form.size // 8, "uint32")
        piece = operands.key_elements
        for index in range(operands.key_pieces):
            from_ = at + (index * 4 + place.c) * piece
            load(spec, place, "q", from_, words, index * piece // 2, 2 * piece)
        queries.append(operands.query_words(words))
    return queries


class Keys:
    """Registers of the keys, values, scales and masks of an iteration, and their loads.

    needed: How many keys the block needs.
    """

    def __init__(self, spec: Spec, place: Place, needed: Expr) -> None:
        self.spec, self.place, self.needed = spec, place, needed
        form, operands, fragments = spec.form, spec.operands, spec.schedule.fragments
        self.keys = b.local(fragments * 2 * operands.key_pieces * operands.key_words, "uint32")
        self.values = b.local(fragments * 4 * operands.value_pieces * operands.value_words, "uint32")
        scaled = operands.scaled
        self.key_scales: Any = b.local(fragments * 2, "float32") if scaled else None
        self.value_scales: Any = b.local(fragments * 2, "float32") if scaled else None
        dtype = "uint32" if form.mask == "bool" else "float32"
        self.masks: Any = b.local(len(spec.scores), dtype) if form.mask else None

    def load_keys(self, iteration: Expr) -> None:
        """Load the keys of an iteration: rows ``g`` and ``g + 8`` of each fragment."""
        spec, place, operands = self.spec, self.place, self.spec.operands
        for fragment in range(spec.schedule.fragments):
            for half in range(2):
                key = self._key(iteration, fragment, place.g + 8 * half)
                at = b.bind(place.begins["k"] + key * place.inputs.numbers["k_s"])
                for index in range(operands.key_pieces):
                    from_ = at + (index * 4 + place.c) * operands.key_elements
                    first = ((fragment * 2 + half) * operands.key_pieces + index) * operands.key_words
                    load(spec, place, "k", from_, self.keys, first, 4 * operands.key_words)
                if operands.scaled:
                    self._load_scale("k_scale", key, self.key_scales, fragment * 2 + half)

    def load_values(self, iteration: Expr) -> None:
        """Load an iteration's values: of keys ``2 c, 2 c + 1, 2 c + 8, 2 c + 9`` of each fragment."""
        spec, place, operands = self.spec, self.place, self.spec.operands
        for fragment in range(spec.schedule.fragments):
            for index in range(4):
                key = self._key(iteration, fragment, 2 * place.c + index % 2 + 8 * (index // 2))
                at = b.bind(place.begins["v"] + key * place.inputs.numbers["v_s"])
                for piece in range(operands.value_pieces):
                    from_ = at + (piece * 8 + place.g) * operands.value_elements
                    first = ((fragment * 4 + index) * operands.value_pieces + piece) * operands.value_words
                    load(spec, place, "v", from_, self.values, first, 4 * operands.value_words)
            if operands.scaled:
                for half in range(2):
                    key = self._key(iteration, fragment, place.g + 8 * half)
                    self._load_scale("v_scale", key, self.value_scales, fragment * 2 + half)

    def load_mask(self, iteration: Expr) -> None:
        """Load what the mask says of the lane's scores."""
        place, n = self.place, self.place.inputs.numbers
        for index, (fragment, part, element) in enumerate(self.spec.scores):
            token, head = place.query(part * STEP_ROWS + 2 * place.c + element % 2)
            key = self._key(iteration, fragment, place.g + 8 * (element // 2))
            at = place.batch * n["mask_b"] + head * n["mask_h"] + token * n["mask_s"] + key
            mask = place.inputs.tensors["mask"][at]
            b.store(self.masks, T.Cast(str(self.masks.dtype), mask), index)

    def _key(self, iteration: Expr, fragment: int, within: Expr) -> Expr:
        """Return a key of an iteration; those beyond the last are the last: their weight is 0."""
        return b.bind(T.min(iteration * self.spec.span + fragment * FRAGMENT + within, self.needed - 1))

    def _load_scale(self, name: str, key: Expr, scales: Any, index: int) -> None:
        at = self.place.begin(name) + key * self.place.inputs.numbers[f"{name}_s"]
        b.store(scales, self.place.inputs.tensors[name][at], index)
