"""Forests of decision trees on CPUs: several paths are followed at once, so that loads overlap.

Eight rows go down a tree together, then the next eight, while the tree is in the cache. A row of only a few
goes down eight trees at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v

PATHS = 8
"""Ways that are gone at once."""

FEW_ROWS = 4
"""Rows up to which each goes alone."""

CHUNK = 16
"""Blocks of `PATHS` rows that go down a tree before they go down the next."""

COMPARISONS: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "BRANCH_LEQ": lambda x, split: T.Cast("int32", x <= split),
    "BRANCH_LT": lambda x, split: T.Cast("int32", x < split),
    "BRANCH_GTE": lambda x, split: T.Cast("int32", x >= split),
    "BRANCH_GT": lambda x, split: T.Cast("int32", x > split),
    "BRANCH_EQ": lambda x, split: T.Cast("int32", x == split),
    "BRANCH_NEQ": lambda x, split: 1 - T.Cast("int32", x == split),  # TVM's "!=" is false for NaN
}
"""What a node asks of a feature: 1, the true branch, or 0."""


WORDS: Mapping[str, str] = {"float32": "int32", "float64": "int64"}
"""Type of features, splits and votes -> type whose elements hold their bits."""


def emit_forest(mode: str, ttype: str, name: str) -> Any:
    """Emit ``(x, nodes, roots, targets, weights, out)`` of trees whose nodes all compare alike.

    x: ``[rows, features]`` of the type, one of `WORDS`.
    nodes: Words ``[nodes, 4]``: twice the feature, plus 1 where NaN takes the true branch; the bits of the
        number that it is compared with; false and true branch, of a leaf itself.
    roots: int32 ``[trees]``.
    targets, weights: int32 and numbers ``[nodes, votes]``: what a leaf adds to which result.
    out: Numbers ``[rows, results]``, sums in the order of trees.
    """
    with b.function(name) as result:
        forest = Forest(mode, ttype)
        rows = forest.x.shape[0]
        whole = CHUNK * PATHS
        chunks = b.bind(tirx.Select(rows <= FEW_ROWS, rows, tirx.floordiv(rows + whole - 1, whole)))
        with v.parallel(chunks) as number:
            b.either(rows <= FEW_ROWS, lambda: forest.row(number), lambda: forest.rows(number * whole, rows))
    return result.func


class Forest:
    """Trees being emitted, see `emit_forest`."""

    def __init__(self, mode: str, ttype: str) -> None:
        self.compare = COMPARISONS[mode]
        rows, features, nodes, trees = (b.symbol(s) for s in ("rows", "features", "nodes", "trees"))
        votes, count = b.symbol("votes"), b.symbol("count")
        self.x = b.tensor("x", [rows, features], ttype, align=4)
        self.nodes = b.tensor("nodes", [nodes, 4], WORDS[ttype], align=4)
        self.roots = b.tensor("roots", [trees], "int32", align=4)
        self.targets = b.tensor("targets", [nodes, votes], "int32", align=4)
        self.weights = b.tensor("weights", [nodes, votes], ttype, align=4)
        self.out = b.tensor("out", [rows, count], ttype, align=4)

    def rows(self, first: Expr, end: Expr) -> None:
        """Emit all trees of a chunk of rows, tree by tree."""
        count = b.bind(tirx.min(end - first, CHUNK * PATHS))
        with b.loop(count) as row:
            self.cleared(first + row)
        with b.loop(self.roots.shape[0]) as tree, b.loop(tirx.floordiv(count + PATHS - 1, PATHS)) as block:
            rows = [b.bind(first + block * PATHS + way) for way in range(PATHS)]
            inside = [b.bind(tirx.min(row, end - 1)) for row in rows]
            leaves = self.leaves(inside, [self.roots[tree]] * PATHS)
            for way, row in enumerate(rows):
                with b.when(row < end):
                    self.vote(row, leaves[way])

    def row(self, row: Expr) -> None:
        """Emit all trees of one row, `PATHS` at a time."""
        self.cleared(row)
        trees = self.roots.shape[0]
        whole = b.bind(tirx.floordiv(trees, PATHS))
        with b.loop(whole) as block:
            roots = [self.roots[block * PATHS + way] for way in range(PATHS)]
            leaves = self.leaves([row] * PATHS, roots)
            for way in range(PATHS):
                self.vote(row, leaves[way])
        with b.loop(trees - whole * PATHS) as rest:
            self.vote(row, self.leaves([row], [self.roots[whole * PATHS + rest]])[0])

    def cleared(self, row: Expr) -> None:
        with b.loop(self.out.shape[1]) as at:
            b.store(self.out, tirx.const(0, self.out.dtype), row, at)

    def leaves(self, rows: list[Expr], roots: list[Expr]) -> Any:
        """Emit ways from roots to leaves, all a step at a time until none goes on; returns the leaves."""
        at, goes = v.scratch(len(rows), "int32"), v.scratch(1, "int32")
        for way, root in enumerate(roots):
            b.store(at, root, way)
        b.store(goes, T.int32(1), 0)
        with b.repeat_while(goes[0] != 0):
            changed: Expr = T.int32(0)
            for way, row in enumerate(rows):
                node = b.bind(at[way])
                new = b.bind(T.Cast("int32", self.nodes[node, 2 + self.taken(node, row)]))
                changed = b.bind(T.bitwise_or(changed, T.bitwise_xor(new, node)))
                b.store(at, new, way)
            b.store(goes, changed, 0)
        return at

    def taken(self, node: Expr, row: Expr) -> Expr:
        """Return 1 if a row takes the true branch of a node, else 0."""
        asked = b.bind(T.Cast("int32", self.nodes[node, 0]))
        value = b.bind(self.x[row, T.shift_right(asked, T.int32(1))])
        holds = self.compare(value, T.reinterpret(self.x.dtype, self.nodes[node, 1]))
        lost = T.bitwise_and(asked, T.Cast("int32", T.isnan(value)))
        return T.bitwise_or(holds, T.bitwise_and(lost, T.int32(1)))

    def vote(self, row: Expr, leaf: Expr) -> None:
        """Emit what a leaf adds to the results of a row."""
        leaf = b.bind(leaf)
        with b.loop(self.targets.shape[1]) as at:
            target = b.bind(self.targets[leaf, at])
            b.store(self.out, self.out[row, target] + self.weights[leaf, at], row, target)
