"""Operators of com.microsoft on tokens and texts: hashes, repeated n-grams, alignments; crops of pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from tile_types.errors import ShapeError

# tokens --------------------------------------------------------------------------------------------------


def _repeated(op: Operation, ids: Any, scores: Any) -> Any:
    """Give tokens no score that would repeat an n-gram of those that are there."""
    size = op.get("ngram_size")
    if ids.shape[1] < size:
        return scores
    grams = ids.long().unfold(1, size, 1)  # [batch, places, size]
    last = ids[:, ids.shape[1] - size + 1 :].unsqueeze(1)
    row, place = (grams[..., :-1] == last).all(-1).nonzero(as_tuple=True)
    found = scores.clone()
    found[row, grams[row, place, -1]] = float("-inf")
    return found


def _gram_hashes(
    op: Operation, ids: Any, multipliers: Any, sizes: Any, past: Any = None, offsets: Any = None,
    end: Any = None, segments: Any = None,
) -> Any:  # fmt: skip
    """Return hashes of the 2-, 3-, ... -grams that end at each token, and the ids that the next call needs.

    end: Token behind which, with ``reset_on_eos``, what came before is forgotten; also what precedes all.
    segments: Numbers of sequences that lie one behind another; what came before a change is forgotten.
    """
    most, heads = op.get("max_ngram_size"), op.get("n_head_per_ngram")
    nothing = int(op.get("pad_id") if end is None else end)
    batch, count = ids.shape
    before = ids.new_full((batch, most - 1), nothing) if past is None else past
    whole = torch.cat([before, ids], 1)
    start = _known_from(op, whole, most - 1, end, segments)
    at = torch.arange(count) + most - 1
    mixed, found = ids * multipliers[0], []
    for back in range(1, most):
        token = whole[:, at - back].where(at - back >= start, nothing)
        mixed = mixed ^ (token * multipliers[back])
        part = sizes[(back - 1) * heads : back * heads]
        found.append(torch.remainder(mixed.unsqueeze(-1), part))
    hashes = torch.cat(found, -1)
    return hashes if offsets is None else hashes + offsets, whole[:, whole.shape[1] - most + 1 :]


def _known_from(op: Operation, whole: Any, before: int, end: Any, segments: Any) -> Any:
    """Return the first place that each token sees, ``[batch, tokens]``; of places from ``before`` ones on."""
    places = torch.arange(whole.shape[1])
    first = torch.zeros_like(whole)
    if end is not None and op.get("reset_on_eos", 0):
        first = torch.where(whole == end, places + 1, 0)
        first = F.pad(first.cummax(1).values[:, :-1], [1, 0])
    first = first[:, before:]
    if segments is not None:
        changed = F.pad(segments[:, 1:] != segments[:, :-1], [1, 0])
        first = torch.maximum(first, torch.where(changed, places[before:], 0).cummax(1).values)
    return first


def _warped(op: Operation, costs: Any) -> Any:
    """Return the cheapest way through a matrix of costs, ``[2, steps]``, from corner to corner."""
    matrix = costs.reshape(costs.shape[-2:]).numpy()
    rows, columns = matrix.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=matrix.dtype)
    total[0, 0] = 0
    came = np.zeros((rows + 1, columns + 1), dtype=np.int8)
    for column in range(1, columns + 1):
        for row in range(1, rows + 1):
            before = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
            best = 0 if before[0] < min(before[1:]) else 1 if before[1] < min(before[0], before[2]) else 2
            total[row, column], came[row, column] = matrix[row - 1, column - 1] + before[best], best
    way, at = [], [rows, columns]
    while min(at) > 0:
        way.append([at[0] - 1, at[1] - 1])
        step = came[at[0], at[1]]
        at = [at[0] - (step != 2), at[1] - (step != 1)]
    steps = [*([0, column] for column in range(at[1])), *([row, 0] for row in range(at[0])), *reversed(way)]
    return torch.tensor(steps, dtype=torch.int32).T.contiguous()


# texts ---------------------------------------------------------------------------------------------------

START, END = "\x02", "\x03"
"""What stands around tokens that are marked."""

SIMPLE = re.compile(
    r"(?:\\b)?"
    r"(?:\\[^\w]|\\[dswDSWtnrfv]|\[\^?(?:\\.|[^\\\]\[])+\]|[^\\\[\](){}|?*+^$])+(?:[*+?]|\{\d+(?:,\d*)?\})?"
    r"(?:\\b)?"
)
"""Patterns of which the first match is the longest and takes no long time: the last character repeats."""


@lru_cache
def _choices(text: str) -> tuple[re.Pattern[str], ...]:
    """Return the alternatives of a pattern of a node, which RE2 would match in onnxruntime.

    Raises ShapeError if the two may differ in what they find.
    """
    if re.fullmatch(f"{SIMPLE.pattern}(?:\\|{SIMPLE.pattern})*", text) is None:
        raise ShapeError(f"com.microsoft::Tokenizer with the pattern {text[:80]!r} is not supported")
    return tuple(re.compile(choice.group(), re.ASCII) for choice in SIMPLE.finditer(text))


def _matches(pattern: str, text: str) -> Iterator[re.Match[str]]:
    """Yield the matches that are not empty: of those that begin first, the longest."""
    choices, at = _choices(pattern), 0
    following = [choice.search(text) for choice in choices]
    while at <= len(text) and any(following):
        best = min(filter(None, following), key=lambda match: (match.start(), -match.end()))
        at = best.end()
        if best.group():
            yield best
        else:
            at += 1
        following = [
            choice.search(text, at) if match is not None and match.start() < at else match
            for choice, match in zip(choices, following, strict=True)
        ]


def _between(separator: str, text: str) -> Iterator[str]:
    """Yield what lies between matches of a pattern."""
    at = 0
    for match in _matches(separator, text):
        yield text[at : match.start()]
        at = match.end()
    yield text[at:]


def _split(op: Operation, text: str) -> list[str]:
    """Return the tokens of a text: matches of a pattern, what lies between those of several, characters."""
    separators, wanted = op.get("separators"), op.get("tokenexp")
    if separators == [""] or wanted == ".":
        return list(text)
    if wanted is not None:
        return [match.group() for match in _matches(wanted, text)]
    parts = [text]
    for separator in separators:
        if any(not match.group() for choice in _choices(separator) for match in choice.finditer("a")):
            raise ShapeError(f"{op.name} with separators {separators!r} is not supported")
        parts = [piece for part in parts for piece in _between(separator, part) if piece]
    return parts


def _tokens(op: Operation, texts: Any) -> Any:
    """Split texts into tokens along a new last axis, filled up to the most tokens of a text."""
    words = [text.decode() if isinstance(text, bytes) else str(text) for text in texts.reshape(-1).tolist()]
    least = op.get("mincharnum", 1)
    rows = [[token for token in _split(op, text) if len(token) >= least] for text in words]
    if not any(rows):
        return np.empty((*texts.shape, 0) if texts.size else texts.shape, dtype=object)
    if op.get("mark", 0):
        rows = [[START, *row, END] for row in rows]
    found = np.full((len(rows), max(map(len, rows))), op.get("pad_value", ""), dtype=object)
    for at, row in enumerate(rows):
        found[at, : len(row)] = row
    return found.reshape(*texts.shape, -1)


# hashes --------------------------------------------------------------------------------------------------

WORDS = (np.uint32(0xCC9E2D51), np.uint32(0x1B873593))
MIXES = ((16, np.uint32(0x85EBCA6B)), (13, np.uint32(0xC2B2AE35)), (16, np.uint32(1)))
"""Factors of MurmurHash3 for 32 bits: of its blocks, and shifts and factors of its end."""


def _turned(x: Any, bits: int) -> Any:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _murmur(data: Any, seed: int) -> Any:
    """Return MurmurHash3 (x86, 32 bits) of each row of bytes."""
    count, length = data.shape
    padded = np.pad(data, ((0, 0), (0, -length % 4))).view("<u4")
    found = np.full(count, seed, dtype=np.uint32)
    for block in range(padded.shape[1]):
        word = _turned(padded[:, block] * WORDS[0], 15) * WORDS[1]
        found = found ^ word
        if block < length // 4:
            found = _turned(found, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    found = found ^ np.uint32(length)
    for shift, factor in MIXES:
        found = (found ^ (found >> np.uint32(shift))) * factor
    return found


def _hashed(op: Operation, x: Any) -> Any:
    """Hash the bytes of numbers, or of texts."""
    seed = int(op.get("seed", 0)) & 0xFFFFFFFF
    if isinstance(x, np.ndarray):
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in x.reshape(-1).tolist()]
        rows = [_murmur(np.frombuffer(text, dtype=np.uint8).reshape(1, -1), seed) for text in texts]
        found = np.concatenate([np.zeros(0, np.uint32), *rows])
    else:
        found = _murmur(x.contiguous().reshape(-1, 1).view(torch.uint8).numpy(), seed)
    kind = torch.uint32 if op.get("positive", 1) else torch.int32
    return torch.from_numpy(found.view(np.int32)).view(kind).reshape(x.shape)


def _bifurcated(op: Operation, source: Any, current: Any, at: Any, predicted: Any = None) -> Any:
    """Append predicted tokens up to the first that is not the source's, and find in it what they end with.

    at: Where in the source the prediction begins; ``predicted`` has one token more than there are from there.
    Returns: The tokens, and where the source goes on behind their last n-gram, -1 where that is not told.
    """
    if source.ndim != 1 or current.ndim != 1 or at.numel() != 1:
        raise ShapeError(f"{op.name}: tokens are vectors, and one is where they begin")
    tokens, words = current.tolist(), source.tolist()
    if predicted is not None:
        first, said = int(at), predicted.tolist()
        if not 0 <= first <= len(words) or predicted.ndim != 1 or len(said) != len(words) + 1 - first:
            raise ShapeError(
                f"{op.name}: {list(predicted.shape)} predicted, {len(words)} tokens from {first} on"
            )
        alike = next((k for k, word in enumerate(words[first:]) if said[k] != word), len(words) - first)
        tokens += said[: alike + 1]
    found = _continued(words, tokens, op.get("min_ngram_size", 1), op.get("max_ngram_size", 3))
    return torch.tensor(tokens, dtype=current.dtype), torch.full_like(at, found)


def _continued(words: list[int], tokens: list[int], least: int, most: int) -> int:
    """Return what comes after the shortest n-gram that ends the tokens and is once in the words, or -1."""
    found = -1
    for size in range(least, min(most, len(tokens)) + 1):
        gram = tokens[len(tokens) - size :]
        places = [at for at in range(len(words) - size + 1) if words[at : at + size] == gram]
        if not places:
            break
        found = places[0] + size
        if found >= len(words):
            break
        found = found if len(places) == 1 else -1
    return found


# pictures ------------------------------------------------------------------------------------------------


def _crops(op: Operation, x: Any, boxes: Any, batches: Any, size: Any) -> Any:
    """Resize boxes of pictures, in parts of their extents, to one size; corners are those of the boxes."""
    high, wide = (int(extent) for extent in size.tolist())
    if high < 1 or wide < 1:
        raise ShapeError(f"{op.name}: crops of {high} x {wide}")
    rows, columns = (
        _places(boxes[:, axis], boxes[:, axis + 2], x.shape[axis + 2], extent)
        for axis, extent in ((0, high), (1, wide))
    )
    pictures = x[batches.long()]
    if op.get("mode", "bilinear") == "nearest":
        found = _taken(pictures, (rows + 0.5).floor(), (columns + 0.5).floor())
    else:
        top, left = rows.floor(), columns.floor()
        down, right = (rows - top)[:, None, :, None], (columns - left)[:, None, None, :]
        above, below = (
            _taken(pictures, row, left)
            + (_taken(pictures, row, columns.ceil()) - _taken(pictures, row, left)) * right
            for row in (top, rows.ceil())
        )
        found = above + (below - above) * down
    within = [(at >= 0) & (at <= extent - 1) for at, extent in ((rows, x.shape[2]), (columns, x.shape[3]))]
    inside = within[0][:, None, :, None] & within[1][:, None, None, :]
    return found.where(inside, op.get("extrapolation_value", 0.0)).to(x.dtype)


def _places(first: Any, last: Any, extent: int, count: int) -> Any:
    """Return where so many samples of an axis are, from one border to another."""
    if count == 1:
        return (0.5 * (first + last) * (extent - 1)).unsqueeze(-1)
    step = (last - first) * (extent - 1) / (count - 1)
    return first.unsqueeze(-1) * (extent - 1) + torch.arange(count) * step.unsqueeze(-1)


def _taken(pictures: Any, rows: Any, columns: Any) -> Any:
    """Return elements of each picture at rows and columns of its own; borders are repeated."""
    row = rows.long().clamp(0, pictures.shape[2] - 1)[:, None, :, None]
    column = columns.long().clamp(0, pictures.shape[3] - 1)[:, None, None, :]
    each = torch.arange(len(pictures))[:, None, None, None]
    return pictures[each, torch.arange(pictures.shape[1])[:, None, None], row, column]


_ROWS: Mapping[str, Run] = {
    "NGramRepeatBlock": _repeated,
    "Tokenizer": _tokens,
    "NGramHashMapping": _gram_hashes,
    "BifurcationDetector": _bifurcated,
    "DynamicTimeWarping": _warped,
    "MurmurHash3": _hashed,
    "CropAndResize": _crops,
}
"""By their names in the domain."""

TOKENS: Mapping[str, Run] = {f"com.microsoft::{name}": row for name, row in _ROWS.items()}
"""Operator, with its domain -> what computes it."""
