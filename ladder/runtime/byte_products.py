"""Calls of the kernels for codes of 8 bits: products, convolutions, and rounding by the range of a tensor.

They are exact, and for processors that have AVX2 but no dot products of bytes; open in all sizes, so that one
of each serves all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ladder.runtime import native
from ladder.runtime.native import can_build

if TYPE_CHECKING:
    from ladder.runtime.build import Job
    from targets import TileDevice

ROWS, LANES = 4, 8
"""Rows of a block, and columns of a vector, as `ladder.lower.cpu.byte_products` has them."""

NEEDS = frozenset({"avx2"})
"""Features of a processor that the kernels are for."""


@cache
def has_kernels() -> bool:
    """Tell whether this processor has them, and they can be built; warns where a tool is missing."""
    from targets import host_cpu

    return host_cpu().features >= NEEDS and can_build("byte_products", "byte_product")


def entry(kind: str, *facts: bool) -> Any:
    """Return a kernel of `ladder.lower.cpu.byte_products`."""
    return native.entry("byte_products", kind, *facts)


def codes_job(device: TileDevice, kind: str, *facts: bool) -> Job:
    """Return a kernel of `ladder.lower.cpu.byte_products` as it is wanted for a device."""
    return native.native_job(device, "byte_products", kind, *facts)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return uint8 codes of a float32 tensor by its range, scale and zero point."""
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scale, zero = torch.empty(1), torch.empty(1, dtype=torch.uint8)
    entry("rounding")(x.detach().contiguous().view(-1), codes.view(-1), scale, zero)
    return codes, scale.view(()), zero.view(())


@dataclass(frozen=True)
class Words:
    """A left factor: words ``[groups, blocks, K, 4]`` and sums of its rows ``[groups, blocks, 4]``."""

    words: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Where the vectors of a right factor begin, what they are, where pairs lie: as the kernel takes it."""

    begins: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor


def _places(
    begins: torch.Tensor, places: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor
) -> Places:
    """Return places of an even number of vectors; the last may be without sums."""
    odd = (0, len(begins) % 2)
    padded = [F.pad(value, odd) for value in (begins, places.int(), counts.int())]
    return Places(*(value.contiguous() for value in (*padded, offsets)))


# products ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """A right factor of a product: signed codes in pairs, and where they lie."""

    pairs: torch.Tensor
    at: Places


def columns_of(codes: torch.Tensor) -> Columns:
    """Return a matrix ``[K, N]`` of signed codes, vector by vector."""
    k, n = codes.shape
    vectors, half = -(-n // LANES), -(-k // 2)
    whole = F.pad(codes, (0, vectors * LANES - n, 0, k % 2)).reshape(half, 2, vectors, LANES)
    pairs = whole.permute(2, 0, 3, 1).reshape(1, -1).contiguous()
    first, step = torch.arange(vectors), 2 * LANES
    counts = (n - first * LANES).clamp(max=LANES)
    at = _places(first * half * step, first * LANES, counts, torch.arange(half) * step)
    return Columns(pairs, at)


def empty_words(rows: int, depth: int) -> Words:
    """Return memory for rows ``[rows, depth]`` of codes as a left factor."""
    blocks = -(-rows // ROWS)
    words = torch.empty(1, blocks, -(-depth // 2), ROWS, dtype=torch.int32)
    return Words(words, torch.empty(1, blocks, ROWS, dtype=torch.int32))


def product(
    rows: torch.Tensor, zero: torch.Tensor | None, right: Columns, columns: int, right_zero: Any
) -> torch.Tensor:
    """Return the product of codes less their zero points, int32 ``[M, N]``.

    rows: ``[M, K]``, of one zero point.
    columns: N.
    right_zero: None for 0, one number, or one per column, int32.
    """
    left = empty_words(*rows.shape)
    entry("words", rows.dtype == torch.uint8)(zero_of(rows, zero), rows.contiguous(), left.words, left.sums)
    out = torch.empty(1, rows.shape[0], columns, dtype=torch.int32)
    one = right_zero is not None and right_zero.numel() == 1
    factor = -right_zero.reshape(1) if one else torch.zeros(1, dtype=torch.int32)
    entry("byte_product")(*arguments(left, factor, right.pairs, right.at, out))
    total = out[0]
    if right_zero is not None and not one:
        total -= left.sums.reshape(-1, 1)[: rows.shape[0]] * right_zero
    return total


def zero_of(codes: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Return the zero point of codes as kernels take it."""
    return torch.zeros(1, dtype=codes.dtype) if zero is None else zero.reshape(1)


def arguments(left: Words, factor: Any, pairs: Any, at: Places, out: Any) -> tuple[Any, ...]:
    """Return the arguments of the kernel of products."""
    return left.words, left.sums, factor, pairs, at.begins, at.places, at.counts, at.offsets, out


# convolutions ------------------------------------------------------------------------------------------


def kernel_words(weight: torch.Tensor, groups: int) -> Words:
    """Return weights ``[O, I, height, width]`` less their zero points, int32, as a left factor."""
    outputs = weight.shape[0] // groups
    codes = F.pad(weight, (0, 0, 0, 0, 0, weight.shape[1] % 2)).to(torch.int16)
    pairs = torch.stack((codes[:, ::2], codes[:, 1::2]), -1)
    whole = pairs.view(torch.int32).reshape(groups, outputs, -1)
    whole = F.pad(whole, (0, 0, 0, -outputs % ROWS))
    words = whole.reshape(groups, -1, ROWS, whole.shape[2]).transpose(2, 3).contiguous()
    sums = F.pad(weight.flatten(1).sum(1).reshape(groups, outputs), (0, -outputs % ROWS))
    return Words(words, sums.to(torch.int32).reshape(groups, -1, ROWS))


@dataclass(frozen=True)
class Window:
    """The form of a convolution of images: per axis, rows first.

    out: Extents of the result.
    low: Rows and columns that are added before the image; what is below 0 is left out.
    """

    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    low: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows that windows read."""
        return (self.out[0] - 1) * self.stride[0] + (self.kernel[0] - 1) * self.dilation[0] + 1

    @property
    def columns(self) -> int:
        """Columns of each phase that whole vectors read."""
        far = (self.kernel[1] - 1) * self.dilation[1] // self.stride[1]
        return -(-self.out[1] // LANES) * LANES + far

    def places(self, half: int) -> Places:
        """Return where vectors and pairs of ``half`` pairs of channels lie, see `emit_pairs`."""
        pitch = self.stride[1] * self.columns
        oy, first = torch.arange(self.out[0])[:, None], torch.arange(0, self.out[1], LANES)
        begins = 2 * (oy * self.stride[0] * pitch + first)
        counts = (self.out[1] - first).clamp(max=LANES).expand_as(begins)
        y, x = (torch.arange(n) * gap for n, gap in zip(self.kernel, self.dilation, strict=True))
        across = x % self.stride[1] * self.columns + x // self.stride[1]
        within = (y[:, None] * pitch + across).reshape(-1)
        offsets = 2 * (torch.arange(half)[:, None] * self.rows * pitch + within)
        places = oy * self.out[1] + first
        return _places(begins.reshape(-1), places.reshape(-1), counts.reshape(-1), offsets.reshape(-1))


@dataclass(frozen=True)
class Convolution:
    """A convolution of codes ``[N, C, H, W]`` of one shape, as kernels compute it.

    codes: The shape in which they take the codes.
    image: The shape of the codes in pairs, see `emit_pairs`.
    flat: The shape in which they give the result.
    """

    window: Window
    codes: tuple[int, ...]
    image: tuple[int, ...]
    flat: tuple[int, ...]
    shape: tuple[int, ...]
    at: Places

    def space(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for codes in pairs, and for their negated zero point."""
        return torch.empty(self.image, dtype=torch.uint16), torch.empty(1, dtype=torch.int32)

    def as_bytes(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return codes in pairs as a right factor."""
        return pairs.view(torch.int8).view(self.image[0], -1)

    def __call__(self, x: torch.Tensor, zero: torch.Tensor, left: Words) -> torch.Tensor:
        """Return the convolution of codes of one zero point with what `kernel_words` gives."""
        pairs, factor = self.space()
        codes, out = x.contiguous().view(self.codes), torch.empty(self.flat, dtype=torch.int32)
        entry("pairs", x.dtype == torch.uint8)(*self.window.low, zero, codes, pairs, factor)
        entry("byte_product")(*arguments(left, factor, self.as_bytes(pairs), self.at, out))
        return out.view(self.shape)


@lru_cache(maxsize=512)
def convolution(shape: tuple[int, ...], outputs: int, groups: int, window: Window) -> Convolution:
    """Return the convolution of codes ``[N, C, H, W]`` to some channels."""
    count, channels, height, width = shape
    inner = channels // groups
    half, images = -(-inner // 2), count * groups
    return Convolution(
        window,
        (images, inner, height, width),
        (images, half, window.rows, window.stride[1], window.columns),
        (images, outputs // groups, prod(window.out)),
        (count, outputs, *window.out),
        window.places(half),
    )
