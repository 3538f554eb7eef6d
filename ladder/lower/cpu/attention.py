"""Attention of float32 on CPUs for few queries and keys: scores of a block of queries lie in memory at once.

A head's keys are packed in panels of `LANES` keys, its values in whole vectors; what lies beyond the end of
either repeats the last one and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.attention import Attention
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.llvm_functions import exp
from ladder.lower.cpu import vectors as v

LANES = 16
"""Numbers of a vector."""

ROWS = 4
"""Queries of a block: each vector of keys or values that is loaded serves so many."""

HIDDEN = float("-inf")


def emit_attention(form: Attention, width: int, turned: bool, name: str) -> Any:
    """Emit ``(q, k, v, [mask,] out)``: ``softmax(q kT scale + mask) v``.

    width: Elements of a value's head.
    q, k, v: float32 ``[batch, heads, tokens or keys, size]`` of any strides.
    mask: ``[batch, heads, tokens, keys]`` where any of the first three may be 1.
    out: float32 ``[batch, heads, tokens, width]``, or tokens before heads where `turned`.
    """
    with b.function(name) as result:
        _Kernel(form, width, turned).emit()
    return result.func


class _Panels(NamedTuple):
    """A head's keys ``[panels, size, LANES]``, and its values ``[keys, vectors * LANES]``."""

    keys: Any
    values: Any


class _Kernel:
    """The kernel being emitted."""

    def __init__(self, form: Attention, width: int, turned: bool) -> None:
        self.form, self.width, self.turned = form, width, turned
        self.vectors = -(-width // LANES)
        self.batch, self.tokens, self.extent = (b.symbol(s) for s in ("batch", "tokens", "keys"))
        shared = [self.batch, form.kv_heads, self.extent]
        self.q = _given("q", [self.batch, form.heads, self.tokens, form.size])
        self.k, self.v = _given("k", [*shared, form.size]), _given("v", [*shared, width])
        self.mask = None
        if form.mask:
            lead = [b.symbol(s) for s in ("masks", "mask_heads", "mask_tokens")]
            self.mask = b.tensor("mask", [*lead, self.extent], form.mask, align=1)
        middle = [self.tokens, form.heads] if turned else [form.heads, self.tokens]
        self.out = b.tensor("out", [self.batch, *middle, width], "float32", align=4)

    def emit(self) -> None:
        """Emit every head."""
        for given in (self.q, self.k, self.v):
            given.open()
        count = self.form.kv_heads
        with v.parallel(self.batch * count) as number:
            batch, shared = tirx.floordiv(number, count), tirx.floormod(number, count)
            panels = b.bind(tirx.floordiv(self.extent + (LANES - 1), LANES))
            packed = self.pack(batch, shared, panels)
            scores = v.heap(panels * (ROWS * LANES), "float32")
            with b.loop(self.form.group) as member:
                self.head(batch, b.bind(shared * self.form.group + member), packed, scores, panels)

    def pack(self, batch: Expr, shared: Expr, panels: Expr) -> _Panels:
        """Emit the copy of a head's keys and values."""
        size, wide = self.form.size, self.vectors * LANES
        keys = v.heap(panels * (size * LANES), "float32")
        with b.loop(panels) as panel, b.loop(LANES) as lane:
            key = b.bind(tirx.min(panel * LANES + lane, self.extent - 1))
            with b.loop(size) as at:
                b.store(keys, self.k[batch, shared, key, at], (panel * size + at) * LANES + lane)
        values = v.heap(self.extent * wide, "float32")
        with b.loop(self.extent) as key, b.loop(wide) as at:
            b.store(values, self.v[batch, shared, key, tirx.min(at, self.width - 1)], key * wide + at)
        return _Panels(keys, values)

    def head(self, batch: Expr, head: Expr, packed: _Panels, scores: Any, panels: Expr) -> None:
        """Emit all queries of a head: in blocks, the last of which may begin in the one before it."""

        def block(first: Expr, rows: int) -> None:
            _Block(self, (batch, head, first), rows, panels, scores).emit(packed)

        def blocks() -> None:
            with b.loop(tirx.floordiv(self.tokens + (ROWS - 1), ROWS)) as number:
                block(b.bind(tirx.min(number * ROWS, self.tokens - ROWS)), ROWS)

        def singles() -> None:
            with b.loop(self.tokens) as token:
                block(token, 1)

        b.either(self.tokens >= ROWS, blocks, singles)


def _given(name: str, shape: list[Expr]) -> Any:
    return b.Strided(name, shape, "float32", align=4)


class _Block:
    """Some queries of a head."""

    def __init__(
        self, kernel: _Kernel, place: tuple[Expr, Expr, Expr], rows: int, panels: Expr, scores: Any
    ) -> None:
        self.kernel, self.place, self.rows, self.panels = kernel, place, rows, panels
        self.scores = scores
        """``[rows, panels, LANES]``."""

    def emit(self, packed: _Panels) -> None:
        """Emit scores, weights and sums of values."""
        self.multiply(packed.keys)
        for row in range(self.rows):
            self.hide(row)
        factors = [self.weigh(row) for row in range(self.rows)]
        self.sum(packed.values, factors)

    def score(self, row: int, panel: Expr) -> Expr:
        """Return where a panel's scores of a query lie."""
        return (panel + row * self.panels) * LANES

    def multiply(self, keys: Any) -> None:
        """Emit the products of queries and keys."""
        (batch, head, first), form = self.place, self.kernel.form
        given = v.scratch(self.rows * form.size, "float32")
        for row in range(self.rows):
            with b.loop(form.size) as at:
                scaled = self.kernel.q[batch, head, first + row, at] * T.float32(form.scale)
                b.store(given, scaled, row * form.size + at)
        with b.loop(self.panels) as panel:

            def factor(at: Expr, row: int) -> Expr:
                return given[row * form.size + at]

            sums = self.products(form.size, factor, keys, lambda at: (panel * form.size + at) * LANES)
            for row in range(self.rows):
                b.store(self.scores, sums[v.lanes(row * LANES)], v.lanes(self.score(row, panel)))

    def products(
        self, count: Expr, factor: Callable[[Expr, int], Expr], panel: Any, begin: Callable[[Expr], Expr]
    ) -> Any:
        """Emit sums over ``at`` of ``factor(at, row)`` times the vector that begins at ``begin(at)``."""
        sums = v.scratch(self.rows * LANES, "float32")
        for row in range(self.rows):
            b.store(sums, v.constant(0, "float32"), v.lanes(row * LANES))
        with b.loop(count) as at:
            beside = b.bind(panel[v.lanes(begin(at))])
            for row in range(self.rows):
                place = v.lanes(row * LANES)
                b.store(sums, v.fma(v.splat(factor(at, row)), beside, sums[place]), place)
        return sums

    def hide(self, row: int) -> None:
        """Emit what a mask does to a query's scores; those beyond the last key are hidden."""
        (batch, head, first), kernel = self.place, self.kernel
        begin, mask = b.bind(self.score(row, 0)), kernel.mask
        token = b.bind(first + row)
        if mask is not None:
            lead = [b.bind(tirx.min(at, mask.shape[n] - 1)) for n, at in enumerate((batch, head, token))]
            with b.loop(kernel.extent) as key:
                score, given = self.scores[begin + key], mask[(*lead, key)]
                is_choice = kernel.form.mask == "bool"
                seen = tirx.Select(given, score, T.float32(HIDDEN)) if is_choice else score + given
                b.store(self.scores, seen, begin + key)
        end = tirx.min(token + 1, kernel.extent) if kernel.form.causal else kernel.extent
        with b.loop(self.panels * LANES - end) as key:
            b.store(self.scores, T.float32(HIDDEN), begin + end + key)

    def weigh(self, row: int) -> Expr:
        """Emit the exponentials of a query's scores; returns what makes weights of them."""
        begin = b.bind(self.score(row, 0))
        greatest = self.folded(begin, tirx.max, HIDDEN)
        if not self.kernel.form.strict:  # -inf - -inf is NaN
            greatest = b.bind(tirx.Select(greatest == T.float32(HIDDEN), T.float32(0), greatest))
        with b.loop(self.panels) as panel, b.vector(LANES) as lane:
            at = begin + panel * LANES + lane
            b.store(self.scores, exp(self.scores[at] - greatest, v.kept_in(lane)), at)
        total = self.folded(begin, lambda one, other: one + other, 0)
        if self.kernel.form.strict:
            return b.bind(T.float32(1) / total)
        return b.bind(tirx.Select(total == T.float32(0), T.float32(0), T.float32(1) / total))

    def folded(self, begin: Expr, fold: Callable[[Expr, Expr], Expr], start: float) -> Expr:
        """Return all of a query's scores folded into one."""
        found = v.scratch(LANES, "float32")
        b.store(found, v.constant(start, "float32"), v.lanes(0))
        with b.loop(self.panels) as panel:
            b.store(found, fold(found[v.lanes(0)], self.scores[v.lanes(begin + panel * LANES)]), v.lanes(0))
        whole = found[0]
        for lane in range(1, LANES):
            whole = fold(whole, found[lane])
        return b.bind(whole)

    def sum(self, values: Any, factors: list[Expr]) -> None:
        """Emit the sums of values."""
        for vector in range(self.kernel.vectors):
            self.sum_from(vector * LANES, values, factors)

    def sum_from(self, begin: int, values: Any, factors: list[Expr]) -> None:
        """Emit the sums of a vector of each value's elements."""
        kernel, (batch, head, first) = self.kernel, self.place

        def factor(key: Expr, row: int) -> Expr:
            return self.scores[self.score(row, 0) + key]

        wide = kernel.vectors * LANES
        sums = self.products(kernel.extent, factor, values, lambda key: key * wide + begin)
        for row, weight in enumerate(factors):
            at = (first + row, head) if kernel.turned else (head, first + row)
            with b.loop(min(LANES, kernel.width - begin)) as lane:
                b.store(kernel.out, sums[row * LANES + lane] * weight, batch, *at, begin + lane)
