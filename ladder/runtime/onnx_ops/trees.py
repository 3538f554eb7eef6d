"""Classifiers of ``ai.onnx.ml`` that the standard's reference computes slowly or not right.

Tree ensembles run by a kernel of ours where all nodes compare alike, else by torch, where all rows go down
all trees at once, one level at a time.

Where the standard is vague (two classes of which one has votes), scores are those of onnxruntime.

Of support vector classifiers the reference couples the probabilities of three and more classes by a wrong
matrix, and fails for two classes that are texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from onnx.reference.ops.aionnxml.op_svm_classifier import SVMClassifier as Reference
from onnx.reference.ops.aionnxml.op_svm_classifier import sigmoid_probability

from ladder.runtime import native
from ladder.runtime.native import can_build
from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import array_of
from tile_types.arrays import own_name
from tile_types.errors import ShapeError

MODES: Mapping[str, Callable[[Any, Any], Any]] = {
    "BRANCH_LEQ": torch.le,
    "BRANCH_LT": torch.lt,
    "BRANCH_GTE": torch.ge,
    "BRANCH_GT": torch.gt,
    "BRANCH_EQ": torch.eq,
    "BRANCH_NEQ": torch.ne,
}
"""Comparisons of a feature with a node's number, in order; the true branch is taken if it holds."""

MODE_NAMES = tuple(MODES)

WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""Types of numbers that kernels compare -> type whose elements hold their bits."""

MEMBER, LEAF = 6, 7
"""Modes of a node that asks for one of several numbers, and of one that asks nothing."""

AT_ONCE = 1 << 20
"""Places in trees that are followed at once: rows times trees."""

BRANCHES = ("nodes_falsenodeids", "nodes_truenodeids")

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""In the order of their numbers."""

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
"""In the order of their numbers."""


@dataclass(frozen=True)
class Forest:
    """Trees as arrays over all their nodes.

    features, splits, modes, missing: Of each node: the column that it compares, with which number, how, and
        whether NaN takes the true branch.
    children: ``[nodes * 2]``, false and true branch; of a leaf itself.
    roots: Of each tree.
    depth: Comparisons until all rows are at leaves.
    targets, weights: ``[nodes, votes]``; a node of fewer votes has some for a target past the last.
    members: Node that asks for one of several numbers -> these.
    """

    features: torch.Tensor
    splits: torch.Tensor
    modes: torch.Tensor
    missing: torch.Tensor
    children: torch.Tensor
    roots: torch.Tensor
    depth: int
    targets: torch.Tensor
    weights: torch.Tensor
    members: Mapping[int, torch.Tensor]

    @cached_property
    def is_positive(self) -> bool:
        """Tell whether no vote is below 0."""
        return bool((self.weights >= 0).all())

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        """Return the leaf of each row in each tree."""
        at = self.roots.expand(len(x), -1)
        for _ in range(self.depth):
            values = x.gather(1, self.features[at])
            taken = self._compared(values, at)
            if self.tracks_missing:
                taken = taken | (self.missing[at] & values.isnan())
            at = self.children[at * 2 + taken]
        return at

    def _compared(self, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        splits = self.splits[at]
        if len(self.comparisons) == 1 and not self.members:
            found: torch.Tensor = self.comparisons[0][1](values, splits)  # leaves have two equal branches
            return found
        modes, taken = self.modes[at], torch.zeros_like(at, dtype=torch.bool)
        for mode, compare in self.comparisons:
            taken = taken | ((modes == mode) & compare(values, splits))
        for node, members in self.members.items():
            taken = taken | ((at == node) & torch.isin(values, members))
        return taken

    @cached_property
    def comparisons(self) -> list[tuple[int, Callable[[Any, Any], Any]]]:
        """Modes that some node has, with what they compute."""
        used = set(torch.unique(self.modes).tolist())
        return [(mode, compare) for mode, compare in enumerate(MODES.values()) if mode in used]

    @cached_property
    def tracks_missing(self) -> bool:
        """Tell whether NaN takes the true branch of some node."""
        return bool(self.missing.any())

    @cached_property
    def columns(self) -> int:
        """Columns that a row has at least."""
        return int(self.features.amax()) + 1

    @cached_property
    def mode(self) -> str | None:
        """How all nodes compare numbers of one type; None if a kernel has no form for them."""
        wide = max(self.children.numel(), self.targets.numel(), 2 * self.columns) >= 1 << 31
        if self.members or len(self.comparisons) > 1 or wide or self.splits.dtype not in WORDS:
            return None
        found = MODE_NAMES[self.comparisons[0][0]] if self.comparisons else MODE_NAMES[0]
        plain = self.weights.dtype == self.splits.dtype and self.depth > 0
        return found if plain and can_build("forests", "forest", found, self.ttype) else None

    @property
    def ttype(self) -> str:
        """Name of the type of splits."""
        return own_name(self.splits.dtype)

    @cached_property
    def nodes(self) -> tuple[torch.Tensor, ...]:
        """Nodes, roots, targets and weights as the kernel takes them."""
        asked, word = self.features.clamp(min=0) * 2 + self.missing, WORDS[self.splits.dtype]
        parts = (asked.to(word), self.splits.view(word), *self.children.to(word).reshape(-1, 2).unbind(1))
        return torch.stack(parts, 1), self.roots.int(), self.targets.int(), self.weights

    def _by_kernel(self, x: torch.Tensor, mode: str, count: int) -> torch.Tensor:
        out = torch.empty(x.shape[0], count + 1, dtype=x.dtype)
        native.entry("forests", "forest", mode, self.ttype)(x.contiguous(), *self.nodes, out)
        return out

    def scores(self, x: torch.Tensor, count: int, how: str) -> torch.Tensor:
        """Return ``[rows, targets]`` what the leaves' votes come to."""
        sums = how in ("SUM", "AVERAGE") and x.dtype == self.splits.dtype and x.device.type == "cpu"
        mode = self.mode if sums and x.shape[0] and self.columns <= x.shape[1] else None
        if mode is not None:
            found = self._by_kernel(x, mode, count)[:, :count]
            return found / len(self.roots) if how == "AVERAGE" else found
        parts = [
            self._scores(part, count, how)
            for part in torch.split(x, max(AT_ONCE // max(len(self.roots), 1), 1))
        ]
        return torch.cat(parts) if parts else x.new_zeros(0, count)

    def _scores(self, x: torch.Tensor, count: int, how: str) -> torch.Tensor:
        leaves = self.leaves(x)
        targets, weights = self.targets[leaves].flatten(1), self.weights[leaves].flatten(1)
        if how in ("SUM", "AVERAGE"):
            found = weights.new_zeros(len(x), count + 1).scatter_add(1, targets, weights)
            return found[:, :count] / (len(self.roots) if how == "AVERAGE" else 1)
        start = torch.finfo(weights.dtype).max * (1 if how == "MIN" else -1)
        empty = weights.new_full((len(x), count + 1), start)
        found = empty.scatter_reduce(1, targets, weights, "amin" if how == "MIN" else "amax")
        voted = torch.zeros_like(empty, dtype=torch.bool).scatter_(1, targets, True)
        return torch.where(voted, found, 0)[:, :count]


def _columns(features: Any, asked: np.ndarray) -> np.ndarray:
    """Return the columns that nodes compare; ShapeError if one is none."""
    found = np.asarray(features, np.int64)
    if len(found) != len(asked) or (found[asked] < 0).any():
        raise ShapeError("a node of a tree compares a column below 0, or there are not as many as nodes")
    return found


def _depth(roots: np.ndarray, children: np.ndarray, leaf: np.ndarray) -> int:
    """Return the length of the longest way to a leaf.

    Raises ShapeError if a way has no end.
    """
    level, depth = np.unique(roots), 0
    while not leaf[level].all():
        level, depth = np.unique(children[level[~leaf[level]]]), depth + 1
        if depth > len(children):
            raise ShapeError("the nodes of a tree form a cycle")
    return depth


def _votes(nodes: int, owners: np.ndarray, targets: Any, weights: Any, count: int) -> tuple[Any, Any]:
    """Return targets and weights of votes per node, padded."""
    order = np.argsort(owners, kind="stable")
    sorted_owners = owners[order]
    starts = np.searchsorted(sorted_owners, np.arange(nodes))
    place = np.arange(len(owners)) - starts[sorted_owners]
    most = int(place.max(initial=0)) + 1
    if len(targets) != len(owners) or len(weights) != len(owners):
        raise ShapeError(f"{len(weights)} votes of trees for {len(targets)} results, of {len(owners)} leaves")
    if count < 1 or not 0 <= min(targets, default=0) <= max(targets, default=0) < count:
        raise ShapeError(f"votes of trees for results that are not among {count}")
    padded = np.full((nodes, most), count, np.int64), np.zeros((nodes, most), np.asarray(weights).dtype)
    padded[0][sorted_owners, place] = np.asarray(targets, np.int64)[order]
    padded[1][sorted_owners, place] = np.asarray(weights)[order]
    return torch.from_numpy(padded[0]), torch.from_numpy(padded[1])


def _numbers(op: Operation, name: str, default: Any = ()) -> np.ndarray:
    """Return an attribute of floats, or of doubles as a tensor."""
    tensor = op.get(f"{name}_as_tensor")
    return array_of(tensor) if tensor is not None else np.asarray(op.get(name, default), np.float32)


def _listed(op: Operation, of: str) -> Forest:
    """Return the trees of a classifier or regressor.

    of: Prefix of the attributes that hold the leaves' votes.
    """
    trees, ids = (np.asarray(op.get(f"nodes_{name}"), np.int64) for name in ("treeids", "nodeids"))
    false, true = (np.asarray(op.get(name), np.int64) for name in BRANCHES)
    span = int(max(side.max(initial=0) for side in (ids, false, true))) + 1
    keys = trees * span + ids
    order = np.argsort(keys, kind="stable")

    def place(tree: Any, node: Any) -> np.ndarray:
        wanted = np.asarray(tree, np.int64) * span + np.asarray(node, np.int64)
        at = order[np.searchsorted(keys[order], wanted).clip(max=len(keys) - 1)]
        if not np.array_equal(keys[at], wanted):
            raise ShapeError("a branch or a vote of a tree is of a node that is not there")
        return np.asarray(at)

    numbers = {"LEAF": LEAF, **{mode: at for at, mode in enumerate(MODES)}}
    modes = np.array([numbers[mode] for mode in op.get("nodes_modes")])
    leaf, own = modes == LEAF, np.arange(len(modes))
    sides = (place(trees, np.where(leaf, ids, side)) for side in (false, true))
    children = np.stack([np.where(leaf, own, side) for side in sides], 1)
    roots = np.sort(np.unique(trees, return_index=True)[1])
    owners = place(op.get(f"{of}_treeids"), op.get(f"{of}_nodeids"))
    count = _targets(op)
    targets, weights = _votes(len(modes), owners, op.get(f"{of}_ids"), _numbers(op, f"{of}_weights"), count)
    return Forest(
        torch.from_numpy(np.where(leaf, 0, _columns(op.get("nodes_featureids"), ~leaf))),
        torch.from_numpy(_numbers(op, "nodes_values").copy()),
        torch.from_numpy(modes),
        torch.tensor(op.get("nodes_missing_value_tracks_true") or [0] * len(modes)) != 0,
        torch.from_numpy(children.reshape(-1)),
        torch.from_numpy(roots),
        _depth(roots, children, leaf),
        targets,
        weights,
        {},
    )


def _targets(op: Operation) -> int:
    """Return how many numbers a row gets."""
    labels = op.get("classlabels_int64s") or op.get("classlabels_strings")
    return len(labels) if labels else int(op.get("n_targets", 1))


def _indexed(op: Operation) -> Forest:
    """Return the trees of a TreeEnsemble; leaves are put behind the inner nodes."""
    modes = array_of(op.get("nodes_modes")).astype(np.int64)
    inner, weights = len(modes), array_of(op.get("leaf_weights"))
    leaves, own = len(weights), np.arange(inner + len(weights))
    sides = []
    for side in ("false", "true"):
        ids, is_leaf = (np.asarray(op.get(f"nodes_{side}{name}"), np.int64) for name in ("nodeids", "leafs"))
        sides.append(np.concatenate([ids + inner * (is_leaf != 0), own[inner:]]))
    children, leaf = np.stack(sides, 1), own >= inner
    if children.min(initial=0) < 0 or children.max(initial=0) >= inner + leaves:
        raise ShapeError("a branch of a tree is of a node that is not there")
    roots = np.asarray(op.get("tree_roots"), np.int64)
    only = children[roots, 0] == children[roots, 1]  # a tree of one leaf
    roots = np.where(only & leaf[children[roots, 0]], children[roots, 0], roots)
    splits = array_of(op.get("nodes_splits"))
    targets, votes = _votes(len(own), own[inner:], op.get("leaf_targetids"), weights, _targets(op))
    filled = np.zeros(leaves, np.int64)
    missing = np.asarray(op.get("nodes_missing_value_tracks_true") or [0] * inner, np.int64)
    return Forest(
        torch.from_numpy(np.concatenate([_columns(op.get("nodes_featureids"), modes >= 0), filled])),
        torch.from_numpy(np.concatenate([splits, filled.astype(splits.dtype)])),
        torch.from_numpy(np.concatenate([modes, filled + LEAF])),
        torch.from_numpy(np.concatenate([missing, filled]) != 0),
        torch.from_numpy(children.reshape(-1)),
        torch.from_numpy(roots),
        _depth(roots, children, leaf),
        targets,
        votes,
        _members(op, modes),
    )


def _members(op: Operation, modes: np.ndarray) -> dict[int, torch.Tensor]:
    """Return the numbers that nodes ask for; NaN ends those of a node."""
    found, values = dict[int, torch.Tensor](), op.get("membership_values")
    if values is None:
        return found
    ends = torch.nonzero(values.isnan()).flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    for node, start, end in zip(np.flatnonzero(modes == MEMBER).tolist(), starts, ends, strict=False):
        found[node] = values[start:end]
    return found


# scores ----------------------------------------------------------------------------------------------


def _softmax_zero(x: torch.Tensor) -> torch.Tensor:
    """Return shares of exponentials; a 0 keeps to 0."""
    zero = x.abs() <= 1e-7
    raised = torch.where(zero, 0.0, (x - x.amax(-1, keepdim=True)).exp())
    total = raised.sum(-1, keepdim=True)
    found: torch.Tensor = torch.where(total == 0, 0.5, raised / total)
    return found


def _probit(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.special.ndtri(x.double()).to(x.dtype)
    return found


POST: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NONE": lambda x: x,
    "SOFTMAX": lambda x: torch.softmax(x, -1),
    "LOGISTIC": torch.sigmoid,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}


def _features(x: Any) -> torch.Tensor:
    """Return rows of numbers that are compared."""
    rows: torch.Tensor = x if x.ndim == 2 else x.reshape(1, -1)
    return rows if rows.dtype == torch.float64 else rows.to(torch.float32)


class Settled(NamedTuple):
    """What follows from the attributes of a node: trees, results per row, what all begin with, their votes.

    voted: The results that some leaf votes for.
    labels: Of classes, numbers or an array of text; where one of two is stated, the other is 0 or empty.
    """

    forest: Forest
    results: int
    base: torch.Tensor
    voted: frozenset[int]
    labels: torch.Tensor | np.ndarray


def _settled(op: Operation, of: str) -> Settled:
    """Return what follows from the attributes of a classifier or regressor; it is made in the first call."""

    def made() -> Settled:
        base = torch.from_numpy(_numbers(op, "base_values").copy())
        names = list(op.get("classlabels_strings") or op.get("classlabels_int64s") or ())
        names = [type(names[0])(), *names] if len(names) == 1 else names
        labels = np.array(names, object) if names and isinstance(names[0], str) else torch.tensor(names)
        return Settled(_listed(op, of), _targets(op), base, frozenset(op.get(f"{of}_ids")), labels)

    return op.once(made)  # type: ignore[no-any-return]


def _regressed(op: Operation, x: Any) -> torch.Tensor:
    forest, count, base, *_ = _settled(op, "target")
    scores = forest.scores(_features(x), count, op.get("aggregate_function", "SUM"))
    if len(base):
        scores = scores + base
    return POST[op.get("post_transform", "NONE")](scores).float()


def _ensembled(op: Operation, x: Any) -> torch.Tensor:
    forest = op.once(lambda: _indexed(op))
    scores = forest.scores(x, _targets(op), AGGREGATES[op.get("aggregate_function", 1)])
    return POST[TRANSFORMS[op.get("post_transform", 0)]](scores).to(x.dtype)


def _classified(op: Operation, x: Any) -> tuple[Any, torch.Tensor]:
    forest, count, base, voted, labels = _settled(op, "class")
    scores = forest.scores(_features(x), count, "SUM")
    post = op.get("post_transform", "NONE")
    if len(labels) <= 2 and len(voted) == 1:
        first = scores[:, min(voted)] + (base[-1] if len(base) else 0)
        positive = forest.is_positive and count == 2
        chosen, both = of_two(first, 0.5 if positive else 0.0, post, positive)
        scores = both if count == 2 else POST[post](first.unsqueeze(1))
    else:
        scores = scores + base if len(base) else scores
        chosen, scores = scores.argmax(-1), POST[post](scores)
    return labels[chosen.numpy() if isinstance(labels, np.ndarray) else chosen], scores.float()


def of_two(score: torch.Tensor, least: float, post: str, shares: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of two classes is chosen, and the scores of both, where only one has a score.

    least: Score above which the second class is chosen.
    shares: Whether the scores of both come to 1.
    """
    chosen = (score > least).long()
    if post == "LOGISTIC":
        return chosen, torch.sigmoid(torch.stack([-score, score], 1))
    return chosen, torch.stack([1 - score if shares else -score, score], 1)


TREES: Mapping[str, Run] = {
    "ai.onnx.ml::TreeEnsembleRegressor": _regressed,
    "ai.onnx.ml::TreeEnsembleClassifier": _classified,
    "ai.onnx.ml::TreeEnsemble": _ensembled,
}
"""Operators of trees."""


CLOSE = 1e-7
"""Least probability of one of a pair, as libsvm has it."""


def coupled(pairs: Any) -> Any:
    """Return the probabilities of classes by those of pairs.

    pairs: ``[classes, classes]``: in row i, column j, that it is i if it is one of these two.
    Source: Wu, Lin, Weng, "Probability estimates for multi-class classification", 2004, algorithm 2.
    """
    count = len(pairs)
    others = pairs * (1 - np.eye(count, dtype=pairs.dtype))
    matrix = np.diag((others**2).sum(0)) - others * others.T
    found = np.full(count, 1 / count, pairs.dtype)
    for _ in range(max(100, count)):
        product = matrix @ found
        mean = found @ product
        if np.abs(product - mean).max() < 0.005 / count:
            break
        for at in range(count):
            step = (mean - product[at]) / matrix[at, at]
            found[at] += step
            found /= 1 + step
            product = matrix @ found
            mean = found @ product
    return found


class SVMClassifier(Reference):  # type: ignore[misc]  # the reference has no types
    """The reference's with probabilities that are coupled as they were trained, and texts as labels."""

    op_domain = "ai.onnx.ml"

    def _probabilities(self, scores: Any, class_count_: int) -> Any:
        pairs = np.zeros((class_count_, class_count_), scores.dtype)
        for at, (i, j) in enumerate(zip(*np.triu_indices(class_count_, 1), strict=True)):
            of_pair = sigmoid_probability(scores[at], self._svm.atts.prob_a[at], self._svm.atts.prob_b[at])
            pairs[i, j] = np.clip(of_pair, CLOSE, 1 - CLOSE)
            pairs[j, i] = 1 - pairs[i, j]
        return coupled(pairs)

    def _run(
        self, X: Any, classlabels_ints: Any = None, classlabels_strings: Any = None, **given: Any
    ) -> Any:
        if not classlabels_strings:
            return super()._run(X, classlabels_ints=classlabels_ints, classlabels_strings=None, **given)
        numbers = list(range(len(classlabels_strings)))
        labels, scores = super()._run(X, classlabels_ints=numbers, classlabels_strings=None, **given)
        return np.array([classlabels_strings[label] for label in labels]), scores
