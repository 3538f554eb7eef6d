"""Files that hold named arrays: safetensors, mapped into memory and checked before anything is read."""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tile_types.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MOST_HEADER = 100 << 20
"""Bytes of a safetensors header, and of a JSON file: what the format itself allows."""

MOST_TEXT = 1 << 20
"""Bytes of a description that is stored as an array."""

MOST_TENSORS = 1_000_000
MOST_AXES = 8

DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("uint8", 4),
    "C64": ("complex64", 64),
}
"""Name in a safetensors header -> torch's dtype, and bits of an element. Half bytes: pairs in uint8."""


def require(condition: bool, message: str) -> None:
    """Raise `CheckpointError` unless a condition holds."""
    if not condition:
        raise CheckpointError(message)


class MappedFile:
    """A file mapped into memory, privately and writable as torch wants it: pages are read when used.

    Raises CheckpointError if it cannot be read, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            require(stat.S_ISREG(path.stat().st_mode), f"{path} is no file")  # opening a pipe would wait
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                require(self.size > 0, f"{path} is empty")
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"cannot read {path}: {error}") from error

    def bytes(self, begin: int, count: int) -> bytes:
        """Return some bytes.

        Raises CheckpointError if the file ends before.
        """
        if begin < 0 or count < 0 or begin + count > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: {count} bytes at {begin} are wanted, it has {self.size}"
            )
        return self.memory[begin : begin + count]

    @cached_property
    def address(self) -> int:
        """Where its first byte lies in memory."""
        import torch

        return torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in it."""
        return self.address <= tensor.untyped_storage().data_ptr() < self.address + self.size

    def release(self, begin: int, count: int) -> None:
        """Give pages back that nobody has written: they are read again when they are used."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if count and hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED, first, begin + count - first)


@dataclass(frozen=True, eq=False)
class Stored:
    """One array of a file, not yet read.

    name: As in the file.
    dtype: torch's name of the element type.
    shape: Extents in elements of that type.
    file: Where it lies.
    begin: Offset of its first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile = field(repr=False)
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def tensor(self) -> torch.Tensor:
        """Return the array as a tensor that shares the mapped memory; the file must not change meanwhile."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=dtype)
        if self.begin % itemsize(self.dtype):
            data = bytearray(self.file.bytes(self.begin, self.nbytes))
            return torch.frombuffer(data, dtype=dtype).view(self.shape)
        count = math.prod(self.shape)
        flat = torch.frombuffer(self.file.memory, dtype=dtype, count=count, offset=self.begin)
        return flat.view(self.shape)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element.

    Raises CheckpointError if no format here has such elements.
    """
    bits = next((bits for name, bits in DTYPES.values() if name == dtype and bits >= 8), None)
    if bits is None:
        raise CheckpointError(f"elements of type {dtype} are not read")
    return bits // 8


def parse_json(text: bytes, what: str, *, unique: bool = False) -> dict[str, Any]:
    """Return a JSON object.

    unique: Whether a key that is there twice is refused; otherwise the last one counts.
    Raises CheckpointError if it is none.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no JSON: {error}") from error
    require(isinstance(value, dict), f"{what} is a {type(value).__name__}, not an object")
    found: dict[str, Any] = value
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{ascii(key)[:200]} is there twice")
        found[key] = value
    return found


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object of a small file, as `parse_json` does."""
    file = MappedFile(path)
    require(file.size <= MOST_HEADER, f"{path} has {file.size} bytes: too long for what it should be")
    return parse_json(file.bytes(0, file.size), str(path), unique=unique)


@dataclass(frozen=True, eq=False)
class Arrays(Mapping[str, Stored]):
    """Named arrays of one file or of several.

    stored: By name.
    metadata: Texts of the headers.
    """

    stored: Mapping[str, Stored]
    metadata: Mapping[str, str]

    def __getitem__(self, name: str) -> Stored:
        return self.stored[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over names."""
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def read_safetensors(path: Path) -> Arrays:
    """Read the header of a safetensors file.

    Raises CheckpointError if the file is truncated, or its header is damaged or describes arrays that
        overlap, lie outside or leave bytes between them.
    """
    file = MappedFile(path)
    (length,) = struct.unpack("<Q", file.bytes(0, 8))
    require(length <= min(MOST_HEADER, file.size - 8), f"{path}: a header of {length} bytes does not fit")
    header = parse_json(file.bytes(8, length), f"the header of {path}", unique=True)
    metadata = header.pop("__metadata__", {})
    require(
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values()),
        f"{path}: __metadata__ must hold texts",
    )
    require(len(header) <= MOST_TENSORS, f"{path} names {len(header)} tensors")
    stored = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
    _require_adjacent(file, stored.values(), 8 + length)
    return Arrays(stored, metadata)


def _stored(file: MappedFile, name: str, entry: Any, start: int) -> Stored:
    """Check one entry of a header."""
    where = f"tensor {name!r} of {file.path}"
    require_name(name, file.path)
    require(isinstance(entry, dict), f"{where}: its entry is no object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has the unknown type {dtype!r}")
    require_shape(shape, where)
    require(
        isinstance(offsets, list) and len(offsets) == 2 and all(_is_count(value) for value in offsets),
        f"{where}: data_offsets are {offsets!r}",
    )
    assert isinstance(offsets, list)
    assert isinstance(shape, list)
    torch_name, bits = DTYPES[dtype]
    count = math.prod(shape)
    require(count * bits % 8 == 0, f"{where} ends within a byte")
    require(
        offsets[1] - offsets[0] == count * bits // 8,
        f"{where}: {dtype} {shape} does not take {offsets[1] - offsets[0]} bytes",
    )
    require(start + offsets[1] <= file.size, f"{file.path} is truncated: {where} ends beyond it")
    if bits < 8:
        require(bool(shape) and shape[-1] * bits % 8 == 0, f"{where}: rows end within a byte")
        shape = [*shape[:-1], shape[-1] * bits // 8]
    return Stored(name, torch_name, tuple(shape), file, start + offsets[0])


def require_name(name: str, path: Path) -> None:
    """Raise if a tensor's name could not be shown: it has control characters or halves of UTF-16 pairs."""
    require(
        name.isprintable(), f"{path} has a tensor with the name {ascii(name)[:200]}: it cannot be printed"
    )


def require_shape(shape: Any, where: str) -> None:
    """Raise unless a value is a list of extents whose product is moderate."""
    fits = isinstance(shape, list | tuple) and len(shape) <= MOST_AXES and all(map(_is_count, shape))
    require(fits and math.prod(shape) < 1 << 48, f"{where}: its shape is {str(shape)[:200]}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _require_adjacent(file: MappedFile, stored: Iterable[Stored], end: int) -> None:
    """Raise unless arrays follow each other from a place on to the end of the file, as the format demands."""
    for begin, after, name in sorted(
        (entry.begin, entry.begin + entry.nbytes, entry.name) for entry in stored
    ):
        where = f"tensor {name!r} of {file.path}"
        require(begin >= end, f"{where} overlaps another")
        require(begin == end, f"{where} begins {begin - end} bytes after the one before it")
        end = after
    require(end == file.size, f"{file.path} has {file.size - end} bytes that belong to no tensor")
