"""Files that torch wrote (``.pt``, ``.bin``), as data: tensors and plain values, no code.

Tensors of torchao are read where that is imported, which tells torch of its classes.
"""

from __future__ import annotations

import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.formats.files import (
    DTYPES,
    MOST_TENSORS,
    MOST_TEXT,
    Arrays,
    MappedFile,
    Stored,
    require,
    require_name,
)
from tile_types.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MOST_NESTING = 6

ARCHIVE = b"PK\x03\x04"
"""First bytes of the archives that torch has written since 1.6; older files are read into memory."""

MOST_RATIO = 32
"""Times its size that what an archive holds may take: those that torch writes are not compressed."""

REFUSED = ("WeightsUnpickler error", "unsupported GLOBAL")
"""How torch begins to say what in a file is no plain data."""


@dataclass(frozen=True, eq=False)
class ArrayInMemory(Stored):
    """An array that is in memory, or mapped, already."""

    held: torch.Tensor

    def tensor(self) -> torch.Tensor:
        return self.held


def read_pickled(path: Path) -> Arrays:
    """Read a dictionary of tensors; nested ones (HQQ's) are joined with dots, numbers become arrays.

    Raises CheckpointError if it holds anything else.
    """
    import torch

    file = MappedFile(path)
    archived = file.memory[: len(ARCHIVE)] == ARCHIVE
    inflated = _inflated(path) if archived else 0
    most = max(file.size, inflated, MOST_TEXT)
    require(inflated <= MOST_RATIO * file.size, f"{path} is compressed: it would take {inflated} bytes")
    try:
        with warnings.catch_warnings():  # of other protocols, which the error says if they are not read
            warnings.simplefilter("ignore", UserWarning)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=archived and not inflated)
    except Exception as error:  # the unpickler may raise anything at damaged data
        raise CheckpointError(f"{path} is no file of plain tensors: {_reason(error)}") from error
    require(isinstance(content, dict), f"{path} holds a {type(content).__name__}, not tensors by name")
    content, described = _taken_apart(content)
    stored: dict[str, Stored] = {}
    _flatten(file, most, content, "", stored, 0)
    return Arrays(stored, described)


def _taken_apart(content: dict[Any, Any]) -> tuple[dict[Any, Any], dict[str, str]]:
    """Return tensors of torchao, which the unpickler knows once that is imported, as torchao flattens them.

    Returns: Arrays by name, and what the header of a safetensors file would say of them.
    """
    if not any(type(value).__module__.startswith("torchao.") for value in content.values()):
        return content, {}
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors = {name: value for name, value in content.items() if hasattr(value, "shape")}
    try:
        arrays, described = flatten_tensor_state_dict(tensors)
        return arrays, {name: str(text) for name, text in described.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"torchao cannot flatten its tensors: {error}") from error


def _inflated(path: Path) -> int:
    """Return the bytes that an archive holds if some are compressed, which cannot be mapped; else 0."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return 0  # torch says what is wrong
    plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return 0 if plain else sum(entry.file_size for entry in entries)


def _flatten(
    file: MappedFile, most: int, value: Any, name: str, stored: dict[str, Stored], depth: int
) -> None:
    if isinstance(value, dict):
        require(depth < MOST_NESTING, f"{file.path}: {name!r} is nested too deeply")
        for key, inner in value.items():
            require(isinstance(key, str), f"{file.path}: {name!r} has a key that is no text")
            _flatten(file, most, inner, f"{name}.{key}" if name else key, stored, depth + 1)
        return
    array = _array(value, f"{file.path}: {name!r}")
    if array is not None:
        require_name(name, file.path)
        require(name not in stored and len(stored) < MOST_TENSORS, f"{file.path}: {name!r} is there twice")
        stored[name] = _held(file, most, name, array)


def _reason(error: Exception) -> str:
    """Return one printable line of what the unpickler says: the class that it refuses, if it says that."""
    lines = ["".join(filter(str.isprintable, line)).strip() for line in str(error).splitlines()]
    refused = (line[line.index(word) :] for line in lines for word in REFUSED if word in line)
    text = next(refused, lines[0] if lines else type(error).__name__)
    if isinstance(error, KeyError) or text.endswith(":"):  # no more than a number, or nothing
        return "it is damaged, or torch did not write it"
    hint = " (import torchao first)" if " torchao." in text else ""
    return text.partition(". Please")[0][:200] + hint


def _held(file: MappedFile, most: int, name: str, array: torch.Tensor) -> ArrayInMemory:
    """Check a tensor: dense, of a type that is read, and with no more elements than a file can hold."""
    import torch

    where = f"{file.path}: {name!r}"
    kind = type(array)
    require(kind in (torch.Tensor, torch.nn.Parameter), f"{where} is a {kind.__name__}, which is not read")
    dense = array.layout == torch.strided and array.device.type == "cpu" and not array.is_nested
    require(dense, f"{where} is no dense tensor with values")
    require(array.nbytes <= most, f"{where} has {array.nbytes} bytes, more than the file")
    dtype = str(array.dtype).removeprefix("torch.")
    require(any(dtype == known for known, _ in DTYPES.values()), f"{where} has elements of type {dtype}")
    held = array.detach().resolve_conj().resolve_neg()
    return ArrayInMemory(name, dtype, tuple(array.shape), file, 0, held)


def _array(value: Any, where: str) -> torch.Tensor | None:
    """Return a value as an array; None for one that says nothing."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, str):
        return torch.tensor(list(value.encode()), dtype=torch.uint8)
    if isinstance(value, bool):
        return torch.tensor(int(value), dtype=torch.uint8)
    if isinstance(value, int):
        return torch.tensor(value) if -(1 << 63) <= value < 1 << 63 else None
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    series = isinstance(value, list | tuple)
    tensors = series and any(isinstance(item, torch.Tensor) for item in value)
    require(not tensors, f"{where} is a list of tensors, which have no names")
    numbers = series and len(value) <= 1 << 16
    if numbers and all(isinstance(item, int) and abs(item) < 1 << 62 for item in value):
        return torch.tensor(list(value), dtype=torch.int64)
    return None
