"""Calls of the kernels for codes of 8 bits: products, convolutions, and rounding by the range of a tensor.

They are exact, for processors that have AVX2, and open in all sizes, so that one of each serves all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ladder.partition.native_parts import DOT_PRODUCTS
from ladder.runtime import native
from ladder.runtime.build import Job
from ladder.runtime.native import can_build
from targets import TileDevice, host_cpu

ROWS, COLUMNS = 4, 4
"""Rows of a block, and columns of a vector per code, as `ladder.lower.cpu.byte_products` has them."""

WORDS = {2: torch.int16, 4: torch.int8}
"""Codes in a word -> the type of each."""

IMAGES = {2: torch.uint16, 4: torch.uint32}
"""Codes in a word -> the type of a group of codes of an image."""

NEEDS = frozenset({"avx2"})
"""Features of a processor that the kernels are for."""


@cache
def has_kernels() -> bool:
    """Tell whether this processor has them, and they can be built; warns where a tool is missing."""
    return host_cpu().features >= NEEDS and can_build("byte_products", "byte_product", host_depth())


def depth_of(device: TileDevice) -> int:
    """Return how many codes a word of a processor has."""
    return 4 if DOT_PRODUCTS in device.features else 2


@cache
def host_depth() -> int:
    """Return `depth_of` this processor."""
    return depth_of(host_cpu())


def entry(kind: str, *facts: int) -> Any:
    """Return a kernel of `ladder.lower.cpu.byte_products`."""
    return native.entry("byte_products", kind, *facts)


def codes_job(device: TileDevice, kind: str, *facts: int) -> Job:
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
    """A left factor: words ``[groups, blocks, K, 4]``, sums and zero points of its rows, see `emit_words`."""

    words: torch.Tensor
    sums: torch.Tensor
    zeros: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Where the vectors of a right factor begin, what they are, where codes lie: as the kernel takes it."""

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
    """A right factor of a product: unsigned codes, as many of a column side by side as a word has."""

    depth: int
    codes: torch.Tensor
    at: Places


def columns_of(codes: torch.Tensor, depth: int) -> Columns:
    """Return a matrix ``[K, N]`` of unsigned codes, vector by vector."""
    k, n = codes.shape
    lanes = COLUMNS * depth
    vectors, words = -(-n // lanes), -(-k // depth)
    whole = F.pad(codes, (0, vectors * lanes - n, 0, -k % depth)).reshape(words, depth, vectors, lanes)
    grouped = whole.permute(2, 0, 3, 1).reshape(1, -1).contiguous()
    first, step = torch.arange(vectors), depth * lanes
    counts = (n - first * lanes).clamp(max=lanes)
    at = _places(first * words * step, first * lanes, counts, torch.arange(words) * step)
    return Columns(depth, grouped, at)


def empty_words(rows: int, depth: int, codes: int) -> Words:
    """Return memory for rows ``[rows, codes]`` as a left factor of words of ``depth`` codes."""
    blocks = -(-rows // ROWS)
    words = torch.empty(1, blocks, -(-codes // depth), ROWS, dtype=torch.int32)
    return Words(words, *(torch.empty(1, blocks, ROWS, dtype=torch.int32) for _ in range(2)))


def product(
    rows: torch.Tensor, zero: torch.Tensor | None, right: Columns, columns: int, right_zero: torch.Tensor
) -> torch.Tensor:
    """Return the product of codes less their zero points, int32 ``[M, N]``.

    rows: ``[M, K]``, of one zero point.
    columns: N.
    right_zero: One number, or one per column, int32, of unsigned codes.
    """
    left = empty_words(rows.shape[0], right.depth, rows.shape[1])
    given = (zero_of(rows, zero), rows.contiguous(), left.words, left.sums, left.zeros)
    entry("words", right.depth, rows.dtype == torch.uint8)(*given)
    out = torch.empty(1, rows.shape[0], columns, dtype=torch.int32)
    one = right_zero.numel() == 1
    factor = -right_zero.reshape(1) if one else torch.zeros(1, dtype=torch.int32)
    entry("byte_product", right.depth)(*arguments(left, factor, right.codes, right.at, out))
    if not one:
        out[0] -= left.sums.reshape(-1, 1)[: rows.shape[0]] * right_zero
    return out[0]


def zero_of(codes: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Return the zero point of codes as kernels take it."""
    return torch.zeros(1, dtype=codes.dtype) if zero is None else zero.reshape(1)


def arguments(left: Words, factor: Any, codes: Any, at: Places, out: Any) -> tuple[Any, ...]:
    """Return the arguments of the kernel of products."""
    known = (left.words, left.sums, left.zeros)
    return *known, factor, codes, at.begins, at.places, at.counts, at.offsets, out


# convolutions ------------------------------------------------------------------------------------------


def kernel_words(weight: torch.Tensor, zero: torch.Tensor, groups: int, depth: int) -> Words:
    """Return weights ``[O, I, height, width]`` as a left factor: signed codes.

    zero: Of signed codes, int32: one number, or one per output.
    """
    outputs = weight.shape[0] // groups
    codes = F.pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % depth)).to(WORDS[depth])
    shape = (codes.shape[0], -1, depth, *codes.shape[2:])
    grouped = codes.reshape(shape).movedim(2, -1).clone(memory_format=torch.contiguous_format)

    def blocks(rows: torch.Tensor) -> torch.Tensor:
        whole = F.pad(rows.reshape(groups, outputs, -1), (0, 0, 0, -outputs % ROWS))
        return whole.reshape(groups, -1, ROWS, whole.shape[2]).transpose(2, 3).contiguous()

    zeros = zero.to(torch.int32).reshape(-1).expand(weight.shape[0]).contiguous()
    sums = weight.flatten(1).sum(1).to(torch.int32) - zeros * weight[0].numel()
    return Words(blocks(grouped.view(torch.int32)), *(blocks(x).squeeze(2) for x in (sums, zeros)))


@dataclass(frozen=True)
class Window:
    """The form of a convolution of images: per axis, rows first.

    out: Extents of the result.
    low: Rows and columns that are added before the image; what is below 0 is left out.
    depth: Codes in a word.
    """

    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    low: tuple[int, ...]
    depth: int

    @property
    def lanes(self) -> int:
        """Columns of a vector."""
        return COLUMNS * self.depth

    @property
    def rows(self) -> int:
        """Rows that windows read."""
        return (self.out[0] - 1) * self.stride[0] + (self.kernel[0] - 1) * self.dilation[0] + 1

    @property
    def columns(self) -> int:
        """Columns of each phase that whole vectors read."""
        far = (self.kernel[1] - 1) * self.dilation[1] // self.stride[1]
        return -(-self.out[1] // self.lanes) * self.lanes + far

    def places(self, many: int) -> Places:
        """Return where vectors and codes of ``many`` groups of channels lie, see `emit_image`."""
        pitch = self.stride[1] * self.columns
        oy, first = torch.arange(self.out[0])[:, None], torch.arange(0, self.out[1], self.lanes)
        begins = self.depth * (oy * self.stride[0] * pitch + first)
        counts = (self.out[1] - first).clamp(max=self.lanes).expand_as(begins)
        y, x = (torch.arange(n) * gap for n, gap in zip(self.kernel, self.dilation, strict=True))
        across = x % self.stride[1] * self.columns + x // self.stride[1]
        within = (y[:, None] * pitch + across).reshape(-1)
        offsets = self.depth * (torch.arange(many)[:, None] * self.rows * pitch + within)
        places = oy * self.out[1] + first
        return _places(begins.reshape(-1), places.reshape(-1), counts.reshape(-1), offsets.reshape(-1))


@dataclass(frozen=True)
class Convolution:
    """A convolution of codes ``[N, C, H, W]`` of one shape, as kernels compute it.

    codes: The shape in which they take the codes.
    image: The shape of the image of the codes, see `emit_image`.
    flat: The shape in which they give the result.
    shape: The shape of the result.
    """

    window: Window
    codes: tuple[int, ...]
    image: tuple[int, ...]
    flat: tuple[int, ...]
    shape: tuple[int, ...]
    at: Places

    def space(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the image, and for the negated zero point."""
        return torch.empty(self.image, dtype=IMAGES[self.window.depth]), torch.empty(1, dtype=torch.int32)

    def as_bytes(self, image: torch.Tensor) -> torch.Tensor:
        """Return the image as a right factor."""
        return image.view(torch.uint8).view(self.image[0], -1)

    def __call__(self, x: torch.Tensor, zero: torch.Tensor, left: Words) -> torch.Tensor:
        """Return the convolution of codes of one zero point with what `kernel_words` gives."""
        depth, (image, factor) = self.window.depth, self.space()
        codes, out = x.contiguous().view(self.codes), torch.empty(self.flat, dtype=torch.int32)
        entry("image", depth, x.dtype == torch.uint8)(*self.window.low, zero, codes, image, factor)
        entry("byte_product", depth)(*arguments(left, factor, self.as_bytes(image), self.at, out))
        return out.view(self.shape)


@lru_cache(maxsize=512)
def convolution(image: tuple[int, ...], result: tuple[int, ...], groups: int, window: Window) -> Convolution:
    """Return the convolution of codes ``[N, C, H, W]`` to some channels."""
    count, channels, height, width = image
    inner = channels // groups
    many, images = -(-inner // window.depth), count * groups
    return Convolution(
        window,
        (images, inner, height, width),
        (images, many, window.rows, window.stride[1], window.columns),
        (images, result[1] // groups, prod(window.out)),
        result,
        window.places(many),
    )
