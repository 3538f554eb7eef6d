"""GGUF files: metadata and tensors of llama.cpp, mapped into memory.

Source: ``docs/gguf.md`` of ggml, versions 2 and 3. Of big-endian files, integers and halves of all fields are
swapped, as ``gguf_convert_endian`` of gguf writes them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ladder.formats.files import MOST_TENSORS, MappedFile, Stored, itemsize, require, require_name
from ladder.formats.gguf_blocks import BLOCKS, BlockType
from ladder.formats.layer import Format, Layer, Loaded, Shape
from ladder.formats.repack import taken_apart
from tile_types import QuantizedTensor, get_type
from tile_types.arrays import torch_dtype
from tile_types.errors import CheckpointError
from tile_types.factored import Factored

if TYPE_CHECKING:
    import torch


MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a metadata type -> ``struct``'s letter."""

STRING, ARRAY = 8, 9
MOST_DIMENSIONS, MOST_NAME, MOST_NESTING = 4, 1 << 16, 4
DEFAULT_ALIGNMENT = 32

PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64"}
PLAIN |= {30: "bfloat16"}
"""ggml's number of a type that is not quantized -> torch's name."""


SCALE = ".scale"
"""Suffix of the factors of a tensor: NVFP4's, and BitNet's."""

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""Name of one of the files that a model is split into: llama.cpp's, numbered from 1."""


@dataclass
class Cursor:
    """A place in a file from which values are read one after the other; `order`: ``struct``'s of bytes."""

    file: MappedFile
    at: int = 0
    order: str = "<"

    def take(self, count: int) -> bytes:
        found = self.file.bytes(self.at, count)
        self.at += count
        return found

    def number(self, letter: str) -> Any:
        return struct.unpack(f"{self.order}{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self, most: int) -> str:
        """Return the next string of at most so many bytes."""
        length = self.number("Q")
        require(length <= most, f"{self.file.path}: a text of {length} bytes at {self.at}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: a name at {self.at} is no UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.take(self._length(1)).decode("utf-8", "replace")
        if kind == ARRAY:
            require(depth < MOST_NESTING, f"{self.file.path}: arrays are nested too deeply")
            return self._array(self.number("I"), depth + 1)
        letter = NUMBERS.get(kind)
        require(letter is not None, f"{self.file.path}: metadata of the unknown type {kind} at {self.at}")
        return self.number(str(letter))

    def _length(self, size: int) -> int:
        """Return the next count, of things of at least so many bytes, which must be in the file."""
        count: int = self.number("Q")
        within = count * size <= self.file.size - self.at
        require(within, f"{self.file.path} is truncated, or counts {count} values at {self.at}")
        return count

    def _array(self, kind: int, depth: int) -> list[Any]:
        letter = NUMBERS.get(kind)
        count = self._length(8 if letter is None else struct.calcsize(f"<{letter}"))
        if letter is None:
            return [self.value(kind, depth) for _ in range(count)]
        return list(
            struct.unpack(f"{self.order}{count}{letter}", self.take(count * struct.calcsize(f"<{letter}")))
        )


@dataclass(frozen=True)
class GgufFile:
    """Contents of a file.

    metadata: Values by key.
    layers: Quantized tensors: format and bytes.
    plain: The others.
    """

    metadata: dict[str, Any]
    layers: dict[str, tuple[Format, Layer]]
    plain: dict[str, Stored]


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a GGUF file, and of the others of a model that is split into several.

    Raises CheckpointError if a file is missing, truncated, of another version or byte order, or contradicts
        itself or the others.
    """
    named = _read_one(path)
    count = named.metadata.get("split.count", 1)
    if count in (0, 1):
        return named
    match = SPLIT.fullmatch(path.name)
    if match is None or count != int(match[3]):
        raise CheckpointError(f"{path} is one of {count!r} files of a model, and not named as these are")
    found = GgufFile({}, {}, {})
    for at in range(count):
        part = path.with_name(f"{match[1]}-{at + 1:05}-of-{match[3]}.gguf")
        file = named if part == path else _read_one(part)
        place = file.metadata.get("split.no"), file.metadata.get("split.count")
        require(
            place == (at, count), f"{part} says that it is number {place[0]!r} of {place[1]!r}, from 0 on"
        )
        again = (file.layers.keys() | file.plain.keys()) & (found.layers.keys() | found.plain.keys())
        require(not again, f"{part} has {sorted(again)[:1]}, as a file before it")
        found.layers.update(file.layers)
        found.plain.update(file.plain)
        found = found if at else file
    total, stated = len(found.layers) + len(found.plain), found.metadata.get("split.tensors.count")
    require(stated in (None, total), f"{path}: its model has {stated!r} tensors, the files have {total}")
    return found


def _read_one(path: Path) -> GgufFile:
    cursor = Cursor(MappedFile(path))
    require(cursor.take(4) == MAGIC, f"{path} is no GGUF file")
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        cursor, version = (
            Cursor(cursor.file, cursor.at, ">"),
            int.from_bytes(version.to_bytes(4, "big"), "little"),
        )
    require(version in VERSIONS, f"{path} has GGUF version {version}; known: {VERSIONS}")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    require(max(tensors, pairs) <= MOST_TENSORS, f"{path} counts {tensors} tensors and {pairs} metadata")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text(MOST_NAME)
        require(key not in metadata, f"{path} has the key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    infos = list(_infos(cursor, tensors))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
    require(valid, f"{path}: general.alignment is {alignment!r}")
    return _placed(cursor, metadata, infos, alignment)


@dataclass(frozen=True)
class _Info:
    name: str
    shape: Shape
    kind: int
    offset: int


def _infos(cursor: Cursor, count: int) -> Iterator[_Info]:
    for _ in range(count):
        name, axes = cursor.text(MOST_NAME), cursor.number("I")
        require_name(name, cursor.file.path)
        require(axes <= MOST_DIMENSIONS, f"{cursor.file.path}: tensor {name!r} has {axes} dimensions")
        extents = tuple(cursor.number("Q") for _ in range(axes))
        require(math.prod(extents) < 1 << 48, f"{cursor.file.path}: tensor {name!r} has the shape {extents}")
        yield _Info(name, extents[::-1], cursor.number("I"), cursor.number("Q"))


@dataclass(frozen=True, eq=False)
class BigEndian(Stored):
    """An array of a big-endian file.

    unit: numpy's description of what repeats in it: an element, or a block.
    """

    unit: npt.DTypeLike

    def tensor(self) -> torch.Tensor:
        import torch

        unit = np.dtype(self.unit)
        stored = np.frombuffer(self.file.bytes(self.begin, self.nbytes), unit.newbyteorder(">"))
        octets = torch.from_numpy(stored.astype(unit.newbyteorder("<")).view(np.uint8))
        return octets.view(getattr(torch, self.dtype)).view(self.shape)


def _is_swappable(row: BlockType) -> bool:
    """Tell blocks whose fields are bytes and floating-point numbers: others' words are cut differently."""
    fields: Any = np.dtype(row.fields).fields
    return all(field.base.itemsize == 1 or field.base.kind == "f" for field, *_ in fields.values())


def _placed(cursor: Cursor, metadata: dict[str, Any], infos: list[_Info], alignment: int) -> GgufFile:
    """Check that tensors lie one after another, and divide them into quantized and plain ones."""
    file, big = cursor.file, cursor.order == ">"
    found = GgufFile(metadata, {}, {})
    start, due = -(-cursor.at // alignment) * alignment, 0
    for info in infos:
        where = f"tensor {info.name!r} of {file.path}"
        row = BLOCKS.get(info.kind)
        require(row is not None or info.kind in PLAIN, f"{where} is of ggml's type {info.kind}, not known")
        require(info.name not in found.layers and info.name not in found.plain, f"{where} is there twice")
        begin = start + info.offset
        if row is None:
            described = info.name, PLAIN[info.kind], info.shape, file, begin
            stored = BigEndian(*described, f"u{itemsize(described[1])}") if big else Stored(*described)
            found.plain[info.name] = stored
        else:
            fits = 0 not in info.shape and (info.shape or (1,))[-1] % row.elements == 0
            require(fits, f"{where}: {info.shape} is not made of {row.name} blocks of {row.elements}")
            octets = (*info.shape[:-1], info.shape[-1] // row.elements * row.nbytes)
            require(
                not big or _is_swappable(row), f"{where}: {row.name} blocks of big-endian files are not read"
            )
            described = info.name, "uint8", octets, file, begin
            stored = BigEndian(*described, row.fields) if big else Stored(*described)
            found.layers[info.name] = (FORMATS[info.kind], Layer(info.name, {"": stored}))
        require(info.offset == due, f"{where} lies at {info.offset}, the tensors before it end at {due}")
        require(begin + stored.nbytes <= file.size, f"{file.path} is truncated: {where} ends beyond it")
        due += -(-stored.nbytes // alignment) * alignment
    for name in [name for name in found.plain if name.endswith(SCALE)]:
        _scale_layer(found, name)
    return found


def _scale_layer(found: GgufFile, name: str) -> None:
    """Add to a quantized tensor the factor, or one per expert, that llama.cpp multiplies its products by."""
    weight = name.removesuffix(SCALE) + ".weight"
    if weight in found.layers:
        form, layer = found.layers[weight]
        factors, outer = found.plain[name], layer.shape("")[:-2]
        if factors.dtype == "float32" and math.prod(factors.shape) in (1, math.prod(outer)):
            found.layers[weight] = form, Layer(weight, {**layer.parts, SCALE: found.plain.pop(name)})


def shape_of(row: BlockType, layer: Layer) -> Shape:
    """Return the extents in elements: [N, K], or of a stack [E, N, K]."""
    *outer, octets = layer.shape("")
    return (*outer, octets // row.nbytes * row.elements)


def read(row: BlockType, layer: Layer) -> Loaded:
    """Read a matrix, or a stack of them as one each; a vector is a matrix of one row."""
    *outer, n, k = (1, *shape_of(row, layer))[-max(len(layer.shape("")), 2) :]
    octets = layer.tensor("").view(-1, n, k // row.elements, row.nbytes)
    factors = layer.tensor(SCALE).flatten().tolist() if SCALE in layer else [None]
    factors = factors if len(factors) == len(octets) else factors * len(octets)
    matrices = tuple(_matrix(row, one, k, factor) for one, factor in zip(octets, factors, strict=True))
    return matrices if outer else matrices[0]


def _matrix(row: BlockType, octets: torch.Tensor, k: int, factor: float | None) -> QuantizedTensor:
    """Take the blocks ``[N, blocks, bytes]`` of a matrix apart."""
    import torch

    storage, numbers = taken_apart(row.name, row.form, octets, row.tables(), row.before)
    factors = {
        name: each
        for name, each in zip(("scale", "offset"), numbers, strict=False)
        if isinstance(each, Factored)
    }
    scale, *offsets = (each.products if isinstance(each, Factored) else each for each in numbers)
    native = torch_dtype(row.scale)
    if scale.dtype == torch.uint8:
        scale = (row.changed(scale) if row.changed is not None else scale).view(native)
        offsets = [offset.view(native) for offset in offsets]
    return QuantizedTensor(
        get_type(row.element),
        (len(octets), k),
        storage,
        (1, k // scale.shape[1]),
        scale=scale,
        scale_type=row.scale,
        offset=None if not offsets else offsets[0] if factor is None else offsets[0] * factor,
        tensor_scale=factor,
        type_name={"mxfp4": "mxfp4", "nvfp4": "nvfp4"}.get(row.name, ""),
        factors=factors,
    )


FORMATS = {
    number: Format(
        f"gguf {row.name}",
        "",
        lambda layer: True,
        partial(shape_of, row),
        partial(read, row),
        result="",
        doc=f"{row.elements} elements in {row.nbytes} bytes: {row.element} with {row.scale} scales",
    )
    for number, row in BLOCKS.items()
}
"""ggml's number of a type -> its format."""
