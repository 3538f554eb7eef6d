"""ATen operators of models as tile graph rows: products, convolution, pooling, norms, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np

from ladder.frontend.image_norms import normalised_groups
from ladder.frontend.importer import Importer, Row, wide_of
from ladder.frontend.transposed_convolution import Axis, transposed_convolution
from ladder.frontend.windows import are_numbers, borders_rounded_up, spread_over, window_indexing
from ladder.ir.extents import floordiv, product


def _product(im: Importer, out: str, a: str, b: str) -> Any:
    """Multiply matrices; the transpose of a stored weight is a flag."""
    node = im.g.node(b)
    rank = len(im.shape(b))
    last_two = (*range(rank - 2), rank - 1, rank - 2)
    if node.operator == "transpose" and dict(node.attributes)["permutation"] == last_two:
        return im.g.add("matmul", a, node.inputs[0], transpose_b=True, type=out)
    return im.g.add("matmul", a, b, type=out)


def _product_and_bias(
    im: Importer, out: str, bias: str, a: str, b: str, beta: float = 1, alpha: float = 1
) -> Any:
    if beta != 1 or alpha != 1:
        return None
    before, im.precise = im.precise, False  # the library rounds once
    found = im.arithmetic("add", [_product(im, out, a, b), bias], out)
    im.precise = before
    return found


SMALLEST_SCALE = 2.0**-126
"""Of a token: rows of zeros have it."""


def _token_codes(im: Importer, out: str, x: str, activation: str, group: int = 0) -> Any:
    """Return (codes, scales) of rows: a chain like any other, so that it joins what computes x.

    As `ladder.lower.gpu.quantize` computes them; what is not int8 by rows has a kernel of its own.
    """
    if activation != "int8" or group or not im.few_launches:
        return None
    return row_codes(im, x)


def row_codes(im: Importer, x: str) -> tuple[str, str]:
    """Return int8 codes and the scale of each row, the last axis; NaN where infinity or NaN is in it."""
    wide, axis = im.cast(x, "float32"), len(im.shape(x)) - 1
    largest = im.reduce("reduce_max", im.g.add("abs", wide), [axis], True)
    scale = im.g.add("div", largest, im.number(127, "float32"))
    scale = im.g.add("maximum", scale, im.number(SMALLEST_SCALE, "float32"))
    scale = im.g.add("add", scale, im.g.add("mul", largest, im.number(0, "float32")))
    inverse = im.g.add("div", im.number(1, "float32"), scale)
    codes = im.g.add("encode", im.g.add("mul", wide, inverse), type="int8")
    return codes, im.reshape(scale, im.shape(x)[:-1])


def _softmax(im: Importer, out: str, x: str, axis: int, *_: Any) -> Any:
    wide = im.cast(x, wide_of(out))
    powers = im.g.add("exp", im.g.add("sub", wide, im.reduce("reduce_max", wide, [axis], True)))
    return im.cast(im.g.add("div", powers, im.reduce("reduce_sum", powers, [axis], True)), out)


def _log_softmax(im: Importer, out: str, x: str, axis: int, *_: Any) -> Any:
    wide = im.cast(x, wide_of(out))
    shifted = im.g.add("sub", wide, im.reduce("reduce_max", wide, [axis], True))
    total_ = im.reduce("reduce_sum", im.g.add("exp", shifted), [axis], True)
    return im.cast(im.g.add("sub", shifted, im.g.add("log", total_)), out)


def _affine(im: Importer, value: str, weight: Any, bias: Any) -> str:
    for operator, vector in (("mul", weight), ("add", bias)):
        if vector is not None:
            value = im.g.add(operator, value, im.cast(vector, im.ttype(value)))
    return value


def _layer_norm(
    im: Importer, out: str, x: str, shape: Sequence[Any], weight: Any, bias: Any, epsilon: float
) -> Any:
    """Return (result, None, None): the statistics are for training."""
    rank = len(im.shape(x))
    value = im.normalised(im.cast(x, wide_of(out)), list(range(rank - len(shape), rank)), epsilon)
    return im.cast(_affine(im, value, weight, bias), out), None, None


def _group_norm(
    im: Importer, out: str, x: str, weight: Any, bias: Any, n: Any, c: Any, size: Any, groups: int, eps: float
) -> Any:
    """Return (result, None, None): the statistics are for training."""
    del n, c, size
    return normalised_groups(im, out, x, weight, bias, groups, eps), None, None


def _batch_norm(
    im: Importer, out: str, x: str, weight: Any, bias: Any, mean: str, variance: str, _: Any, epsilon: float
) -> Any:
    """Inference: one multiplication and one addition per channel."""
    rank = len(im.shape(x))
    wide = wide_of(out)
    spread = im.apply("rsqrt", [im.apply("add", [variance, epsilon], wide)], wide)
    scale = spread if weight is None else im.apply("mul", [spread, weight], wide)
    moved = im.apply("mul", [mean, scale], wide)
    shift = im.apply("sub", [0.0 if bias is None else bias, moved], wide)
    scaled = im.g.add("mul", im.cast(x, wide), im.along(scale, 1, rank))
    return im.cast(im.g.add("add", scaled, im.along(shift, 1, rank)), out), None, None


def _functional_batch_norm(
    im: Importer, out: str, x: str, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
    momentum: float, epsilon: float,
) -> Any:  # fmt: skip
    """Inference, and images by themselves: in training it also changes the running statistics."""
    shape = im.shape(x)
    if mean is None and shape[0] == 1:
        image = _apart(im, x)
        value = normalised_groups(im, out, image, weight, bias, im.shape(image)[1], epsilon)
        return im.reshape(value, shape), None, None
    if training or mean is None:
        return None
    return _batch_norm(im, out, x, weight, bias, mean, variance, momentum, epsilon)


def _apart(im: Importer, x: str) -> str:
    """Return the images whose channels are those of one: as instance norm asks for the statistics of each."""
    node, shape = im.g.node(x), im.shape(x)
    if node.operator != "reshape":
        return x
    (images, *rest) = given = im.shape(node.inputs[0])
    same = len(given) == len(shape) and product([images, *rest[:1]]) == shape[1]
    return node.inputs[0] if same and tuple(rest[1:]) == tuple(shape[2:]) else x


def _convolution(
    im: Importer, out: str, x: str, weight: str, bias: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """Sum of products under an affine indexing: implicit GEMM, grouped and depthwise alike."""
    (n, c, *spatial), (f, per_group, *kernel) = im.shape(x), im.shape(weight)
    if transposed:
        settings = [spread_over(v, kernel) for v in (stride, padding, dilation, output_padding)]
        return _transposed_convolution(im, out, x, weight, bias, settings, groups)
    places, sizes = window_indexing(
        spatial, kernel, *(spread_over(v, kernel) for v in (stride, padding, dilation))
    )
    taps = " ".join(f"r{at}" for at in range(len(kernel)))
    outer = " ".join(f"h{at}" for at in range(len(kernel)))
    if groups > 1:
        x = im.reshape(x, [n, groups, floordiv(c, groups), *spatial])
        weight = im.reshape(weight, [groups, floordiv(f, groups), per_group, *kernel])
    g = "g " if groups > 1 else ""
    spec = f"n {g}c {places}, {g}f c {taps} -> n {g}f {outer}"
    value = im.g.add("contract", x, weight, spec=spec, sizes=sizes, pad=any(padding), type=out)
    value = im.reshape(value, [n, f, *(dict(sizes)[f"h{at}"] for at in range(len(kernel)))])
    if bias is None:
        return value
    return im.arithmetic("add", [value, im.along(bias, 1, 2 + len(kernel))], out)


def _transposed_convolution(
    im: Importer, out: str, x: str, weight: str, bias: Any, settings: Sequence[Sequence[int]], groups: int
) -> Any:
    """With groups, gaps in its kernel or settings that are open sizes, it stays a call."""
    stride, padding, dilation, extra = settings
    spatial, kernel = im.shape(x)[2:], im.shape(weight)[2:]
    if groups > 1 or not are_numbers(kernel, *settings) or any(gap > 1 for gap in dilation):
        return None
    rows = zip(spatial, stride, kernel, padding, padding, extra, strict=True)
    axes = [Axis(extent, *map(int, rest)) for extent, *rest in rows]
    return transposed_convolution(im, out, x, weight, bias, axes)


def _windows(im: Importer, x: str, kernel: Any, stride: Any, padding: Any, dilation: Any) -> str | None:
    """Return ``[N, C, outputs..., window...]`` as a view; None where windows would leave the image."""
    spatial = im.shape(x)[2:]
    settings = [spread_over(v, kernel) for v in (stride or kernel, padding, dilation)]
    places, sizes = window_indexing(spatial, kernel, *settings)
    outer = " ".join(f"h{at}" for at in range(len(kernel)))
    taps = " ".join(f"r{at}" for at in range(len(kernel)))
    return im.g.add("map", x, spec=f"n c {places} -> n c {outer} {taps}", sizes=sizes, pad=any(settings[1]))


def _columns(
    im: Importer, out: str, x: str, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
    stride: Sequence[int],
) -> Any:  # fmt: skip
    """Return windows as columns ``[N, C · R · S, H' · W']`` (``im2col``)."""
    n, c, *spatial = im.shape(x)
    places, sizes = window_indexing(
        spatial, kernel, *(spread_over(v, kernel) for v in (stride, padding, dilation))
    )
    spec = f"n c {places} -> n c r0 r1 h0 h1"
    windows = im.g.add("map", x, spec=spec, sizes=sizes, pad=any(padding))
    extents = dict(sizes)
    return im.reshape(windows, [n, product([c, *kernel]), product([extents["h0"], extents["h1"]])])


def _of_one_image(im: Importer, x: str, pool: Callable[[str], str]) -> str:
    """Return what a function of a batch of images makes of one image."""
    found = pool(im.reshape(x, [1, *im.shape(x)]))
    return im.reshape(found, im.shape(found)[1:])


def _max_pool(
    im: Importer, out: str, x: str, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    """Return (largest, None); with positions, or open sizes that round up, it stays a call."""
    if 1 in im.used or (ceil_mode and not are_numbers(im.shape(x)[-2:])):
        return None
    if len(im.shape(x)) == 3:  # one image
        rest = (kernel, stride, padding, dilation, ceil_mode)
        return _of_one_image(im, x, lambda batch: _max_pool(im, out, batch, *rest)[0]), None
    kernel = spread_over(kernel, (1, 1)) if len(kernel) == 1 else list(kernel)
    pads = [spread_over(padding, kernel)] * 2
    if ceil_mode:
        steps, gaps = (spread_over(v, kernel) for v in (stride or kernel, dilation))
        pads[1] = borders_rounded_up(im.shape(x)[2:], kernel, steps, pads[0], gaps)
    if any((*pads[0], *pads[1])):
        low, high = ((0, 0, *width) for width in pads)
        least = -inf if "float" in out else int(np.iinfo(out).min)
        x = im.g.add("pad", x, low=low, high=high, value=least)
    view = _windows(im, x, kernel, stride, (0,), dilation)
    assert view is not None
    axes = range(len(im.shape(view)) - len(kernel), len(im.shape(view)))
    return im.reduce("reduce_max", view, list(axes), False), None


def _average_pool(
    im: Importer, out: str, x: str, kernel: Any, stride: Any = (), padding: Any = (0,),
    ceil_mode: bool = False, include_pad: bool = True, divisor: Any = None, rank: int = 2,
) -> Any:  # fmt: skip
    """Average windows of images of `rank` axes; sums over channels (local response) are such, of volumes."""
    if len(im.shape(x)) == rank + 1:
        rest = (kernel, stride, padding, ceil_mode, include_pad, divisor, rank)
        return _of_one_image(im, x, lambda batch: _average_pool(im, out, batch, *rest))
    kernel = spread_over(kernel, (1,) * rank) if len(kernel) == 1 else list(kernel)
    pads = spread_over(padding, kernel)
    differ = divisor is None and (ceil_mode or (any(pads) and not include_pad))
    if (differ or divisor is not None) and not (are_numbers(im.shape(x)[-rank:]) and "float" in out):
        return None
    spatial, value = im.shape(x)[2:], im.cast(x, wide_of(out))
    steps = spread_over(stride or kernel, kernel)
    if ceil_mode:
        high = borders_rounded_up(spatial, kernel, steps, pads, [1] * rank)
        value = im.g.add("pad", value, low=(0, 0, *pads), high=(0, 0, *high), value=0.0)
    view = _windows(im, value, kernel, stride, [0] * rank if ceil_mode else pads, (1,))
    assert view is not None
    axes = [*range(len(im.shape(view)) - rank, len(im.shape(view)))]
    if divisor is None and not differ:
        return im.cast(im.mean(view, axes, False), out)
    found = im.reduce("reduce_sum", view, axes, False)
    counts, kind = [divisor], im.ttype(found)
    if differ:
        borders = pads if include_pad else [0] * rank
        sizes = zip(im.shape(found)[2:], spatial, kernel, steps, pads, borders, strict=True)
        counts = [im.cast(_inside(im, at, rank, *size), kind) for at, size in enumerate(sizes)]
    for count in counts:
        found = im.apply("div", [found, count], kind)
    return im.cast(found, out)


def _inside(
    im: Importer, at: int, rank: int, count: Any, extent: int, taps: int, step: int, pad: int, border: int
) -> str:
    """Return how many elements of each window of an axis lie within the image and this border, int64."""
    first = im.g.add("iota", extent=count, axis=at, rank=rank, type="int64")
    first = im.apply("sub", [im.apply("mul", [first, step], "int64"), pad], "int64")
    last = im.apply("minimum", [im.apply("add", [first, taps], "int64"), extent + border], "int64")
    return im.apply("sub", [last, im.apply("maximum", [first, -border], "int64")], "int64")


def _adaptive_pool(im: Importer, out: str, x: str, size: Sequence[Any]) -> Any:
    spatial = im.shape(x)[2:]
    if all(extent == 1 for extent in size):
        return im.cast(im.mean(im.cast(x, wide_of(out)), [2, 3]), out)
    known = [extent for extent in (*spatial, *size) if isinstance(extent, int)]
    if len(known) < 4 or any(a % b for a, b in zip(spatial, size, strict=True)):
        return None
    kernel = [a // b for a, b in zip(spatial, size, strict=True)]
    return _average_pool(im, out, x, kernel, kernel)


def _attention(
    im: Importer, out: str, q: str, k: str, v: str, mask: Any = None, causal: bool = False, scale: Any = None
) -> Any:
    choose = mask is not None and im.ttype(mask) == "bool"
    masks = [] if mask is None else [mask]
    stated = None if scale is None else float(scale)
    return im.g.add("attention", q, k, v, *masks, causal=causal, choose=choose, scale=stated)


def _restrided(
    im: Importer, out: str, x: str, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> Any:
    """Return x, which lies in order, where strides are those that it has; anything else stays a call."""
    extents = [extent if isinstance(extent, int) else 0 for extent in size]
    dense = [prod(extents[at + 1 :]) for at in range(len(extents))]
    same = all(e == 1 or (e and s == d) for e, s, d in zip(extents, stride, dense, strict=True))
    return x if same and offset is None and tuple(size) == tuple(im.shape(x)) else None


MODEL_ROWS: dict[str, Row] = {
    "mm.default": _product,
    "bmm.default": _product,
    "addmm.default": _product_and_bias,
    "baddbmm.default": _product_and_bias,
    "quantize_tokens.default": _token_codes,
    "_softmax.default": _softmax,
    "_log_softmax.default": _log_softmax,
    "native_layer_norm.default": _layer_norm,
    "native_group_norm.default": _group_norm,
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    "native_batch_norm.default": _functional_batch_norm,
    "convolution.default": _convolution,
    "im2col.default": _columns,
    "max_pool2d_with_indices.default": _max_pool,
    "avg_pool2d.default": _average_pool,
    "avg_pool3d.default": partial(_average_pool, rank=3),
    "_adaptive_avg_pool2d.default": _adaptive_pool,
    "attention.default": _attention,
    "as_strided_.default": _restrided,
    "as_strided.default": _restrided,
}
"""Name and overload -> row."""
