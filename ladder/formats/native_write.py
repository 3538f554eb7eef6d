"""Writing our own checkpoints, a tensor at a time; `native` reads them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.formats.checkpoint import Checkpoint, Entry
from ladder.formats.files import DTYPES, MOST_HEADER, Stored, require
from ladder.formats.layer import Loaded
from ladder.formats.native import ARRAYS, CODES, KEY
from tile_types.errors import CheckpointError
from tile_types.files import replacing

if TYPE_CHECKING:
    import torch

NAMES = {torch_name: name for name, (torch_name, bits) in DTYPES.items() if bits >= 8}
SUFFIX = ".safetensors"
ENTRY = 220
"""Bytes at most that an array's entry in the header takes besides the tensor's name."""

ALIGNMENT = 64
"""Bytes to a multiple of which descriptions are filled up, so that most arrays lie aligned."""


def write(checkpoint: Checkpoint, path: Path, names: Iterable[str]) -> int:
    """Write tensors of a checkpoint, holding one at a time, and return the bytes of the file.

    Stacked experts become one tensor each, ``name.0`` and so on.

    Raises CheckpointError if the file cannot be written, or is one of the checkpoint's own; what was begun is
        removed.
    """
    names = list(names)
    require(path.suffix == SUFFIX, f"{path} is to be written: its name must end with {SUFFIX}")
    room = 4096 + sum(_room(checkpoint.entry(name)) for name in names)
    require(room <= MOST_HEADER, f"{checkpoint.path} has too many tensors for one file: {len(names)}")
    require(not _is_source(checkpoint, path), f"{path} is what is to be read: name another file")
    with replacing(path, CheckpointError, lasting=True) as part, part.open("wb") as file:
        file.write(bytes(8 + room))
        header: dict[str, Any] = {"__metadata__": {}}
        at = 0
        for source, name, array in _arrays(checkpoint, names):
            require(name not in header, f"{path} would hold {name!r} twice")
            octets = _octets(array)
            header[name] = _entry(name, array, at, at + len(octets))
            if source in checkpoint.layers and name.endswith(KEY):
                header["__metadata__"][name.removesuffix(KEY)] = " ".join(
                    filter(None, checkpoint.rule(source))
                )
            at += file.write(octets)
        text = json.dumps(header, ensure_ascii=False).encode()
        require(len(text) <= room, f"the header of {path} takes {len(text)} bytes, not {room}")
        file.seek(0)
        file.write(struct.pack("<Q", room) + text.ljust(room))
    return 8 + room + at


def _room(entry: Entry) -> int:
    """Return how many bytes the entries of a tensor, or of stacked experts, take in the header at most."""
    each = len(json.dumps(entry.name, ensure_ascii=False).encode()) + ENTRY
    arrays = math.prod(entry.shape[:-2]) * len((CODES, *ARRAYS, KEY, "metadata")) if entry.format else 1
    return arrays * each


def _is_source(checkpoint: Checkpoint, path: Path) -> bool:
    """Tell whether a file is one of those that a checkpoint is read from."""
    parts = (part for _, layer in checkpoint.layers.values() for part in layer.parts.values())
    arrays = (array for array in (*checkpoint.plain.values(), *parts) if isinstance(array, Stored))
    return path.exists() and any(path.samefile(file) for file in {array.file.path for array in arrays})


def _arrays(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the name of a tensor, that of an array of it, and the array."""
    for source in names:
        for name, array in _stored(source, checkpoint[source]):
            yield source, name, array


def _stored(name: str, loaded: Loaded) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arrays that a tensor is stored in."""
    import torch

    if isinstance(loaded, torch.Tensor):
        yield name, loaded
        return
    if isinstance(loaded, tuple):
        for number, matrix in enumerate(loaded):
            yield from _stored(f"{name}.{number}", matrix)
        return
    stored = loaded.to_dict()
    for key, array in stored["arrays"].items():
        yield f"{name}.{key}", array
    text = json.dumps(stored["metadata"])
    octets = bytearray(text.ljust(len(text) + -len(text) % ALIGNMENT).encode())
    yield name + KEY, torch.frombuffer(octets, dtype=torch.uint8)


def _octets(array: torch.Tensor) -> memoryview:
    import torch

    return array.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _entry(name: str, array: torch.Tensor, begin: int, end: int) -> dict[str, Any]:
    dtype = str(array.dtype).removeprefix("torch.")
    require(dtype in NAMES, f"{name} cannot be written: its type is {dtype}")
    return {"dtype": NAMES[dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
