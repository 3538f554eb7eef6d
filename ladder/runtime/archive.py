"""Archives: a manifest and named members in one file whose every byte is checked.

The file is a zip of stored members, written in one way only: given names, sizes and checksums, its headers
have one form. So a reader works out from the manifest how long the file must be and what its headers say,
before it reads a member, and refuses what differs. Order: the manifest, its signature if there is one, the
members. The comment at the end is the digest of the manifest and the signature; the manifest holds size and
digest of each member.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ladder.runtime import signing
from tile_types.errors import ArtifactError
from tile_types.files import replacing

FORMAT = 2
"""Version of manifests and of the layout of files."""

MANIFEST = "manifest.json"
SIGNATURE = "signature"
INDEX = "members"
"""Key of the manifest: name of each member, in order -> its size and its sha256."""

NAMES = re.compile(r"packed\.safetensors|stored\.safetensors|[A-Za-z_][A-Za-z0-9_]{0,199}\.so")
"""Pattern of member names: tensors, and kernels by the names of their functions."""

MOST_MANIFEST = 32 << 20
"""Bytes of a manifest."""

MOST_MEMBERS = 20_000

ADVICE = "export it again or copy it again"

_VERSION, _DAY, _LONG = 45, 0x21, 0xFFFFFFFF
_HEAD = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IQHHIIQQQQIIQIIHHHHIIH")


@dataclass(frozen=True)
class _Entry:
    """A member as headers describe it."""

    name: str
    size: int
    crc: int
    offset: int

    @property
    def local(self) -> bytes:
        """The header before its data."""
        name = self.name.encode()
        head = _HEAD.pack(
            0x04034B50, _VERSION, 0, 0, 0, _DAY, self.crc, _LONG, _LONG, len(name), 20
        )  # fmt: skip
        return head + name + struct.pack("<HHQQ", 1, 16, self.size, self.size)

    @property
    def central(self) -> bytes:
        """Its line in the directory at the end."""
        name = self.name.encode()
        head = _CENTRAL.pack(
            0x02014B50, _VERSION, _VERSION, 0, 0, 0, _DAY, self.crc, _LONG, _LONG, len(name), 28,
            0, 0, 0, 0, _LONG,
        )  # fmt: skip
        return head + name + struct.pack("<HHQQQ", 1, 24, self.size, self.size, self.offset)

    @property
    def end(self) -> int:
        """Where its data ends in the file."""
        return self.offset + len(self.local) + self.size


def _laid_out(described: Sequence[tuple[str, int, int]]) -> list[_Entry]:
    """Return the entries of (name, size, checksum)."""
    entries: list[_Entry] = []
    for name, size, crc in described:
        entries.append(_Entry(name, size, crc, entries[-1].end if entries else 0))
    return entries


def _directory(entries: Sequence[_Entry], digest: str) -> bytes:
    """Return what follows the last member."""
    central = b"".join(entry.central for entry in entries)
    start, count = entries[-1].end, len(entries)
    comment = digest.encode()
    end = _END.pack(
        0x06064B50, 44, _VERSION, _VERSION, 0, 0, count, count, len(central), start,
        0x07064B50, 0, start + len(central), 1,
        0x06054B50, 0, 0, 0xFFFF, 0xFFFF, _LONG, _LONG, len(comment),
    )  # fmt: skip
    return central + end + comment


def write(
    path: Path,
    content: Mapping[str, Any],
    members: Mapping[str, bytes],
    key: signing.PrivateKey | None = None,
) -> Path:
    """Write an archive beside its final place, then rename it.

    path: The final place.
    content: The manifest, apart from ``format`` and what describes the members.
    members: Name -> bytes; names are those of `NAMES`.
    key: Signs the manifest, and through its digests all of the file.
    Returns: The path.
    Raises ArtifactError if it cannot be written; an older file at ``path`` stays as it was.
    """
    index = {name: {"size": len(data), "sha256": _digest(data)} for name, data in members.items()}
    manifest = json.dumps(
        {"format": FORMAT, **content, "signed": key is not None, INDEX: index}, indent=1
    ).encode()
    signed = {} if key is None else {SIGNATURE: signing.sign(key, manifest)}
    parts = {MANIFEST: manifest, **signed, **members}
    entries = _laid_out([(name, len(data), zlib.crc32(data)) for name, data in parts.items()])
    with replacing(path, lasting=True) as part, part.open("wb") as stream:
        for entry, data in zip(entries, parts.values(), strict=True):
            stream.write(entry.local)
            stream.write(data)
        stream.write(_directory(entries, _digest(manifest + signed.get(SIGNATURE, b""))))
    return path


def read(path: Path, key: signing.PublicKey | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and the members, every byte of the file checked.

    path: The file.
    key: The key that must have signed it; by default signatures are not required.
    Raises ArtifactError if the file is no archive, was truncated or changed, or is not signed by ``key``;
        names the member.
    """
    try:
        with path.open("rb") as stream:
            return _Reader(path, stream, key).read()
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error


class _Reader:
    """Reads one file from its start to its end."""

    def __init__(self, path: Path, stream: BinaryIO, key: signing.PublicKey | None) -> None:
        self.path, self.stream, self.key = path, stream, key
        self.size = os.fstat(stream.fileno()).st_size

    def broken(self, name: str, what: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {name} {what}; {ADVICE}")

    def read(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        data = self._first()
        manifest = self._manifest(data)
        described = list(self._described(manifest, len(data)))
        entries = _laid_out([(name, size, 0) for name, size in described])
        self._check_size(entries)
        found = {MANIFEST: data}
        for entry in entries[1:]:
            found[entry.name] = self._member(entry)
        parts = [(name, len(held), zlib.crc32(held)) for name, held in found.items()]
        self._check_directory(_laid_out(parts), data + found.get(SIGNATURE, b""))
        self._check_signature(data, found.pop(SIGNATURE, None))
        del found[MANIFEST]
        for name, held in found.items():
            if _digest(held) != manifest[INDEX][name]["sha256"]:
                raise self.broken(name, "does not match its digest, the file was changed")
        return manifest, found

    def _first(self) -> bytes:
        length = len(_Entry(MANIFEST, 0, 0, 0).local)
        head = self.stream.read(length)
        if len(head) < length or not head.startswith(b"PK\x03\x04") or head[30:43] != MANIFEST.encode():
            raise ArtifactError(
                f"{self.path} is truncated or no Ladder artefact: it has no manifest; {ADVICE}"
            )
        (size,) = struct.unpack("<Q", head[-8:])
        data = self.stream.read(size) if size <= min(MOST_MANIFEST, self.size) else b""
        if head != _Entry(MANIFEST, size, zlib.crc32(data), 0).local:
            raise ArtifactError(
                f"{self.path} is truncated or no Ladder artefact: {MANIFEST} was changed,"
                f" or is another Ladder's; {ADVICE}"
            )
        return data

    def _manifest(self, data: bytes) -> dict[str, Any]:
        """Return the manifest, of this format."""
        try:
            manifest = json.loads(data, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise self.broken(MANIFEST, f"is no JSON ({error})") from error
        found = manifest.get("format") if isinstance(manifest, dict) else None
        if found != FORMAT or type(found) is not int:
            raise ArtifactError(
                f"{self.path} has format {found!r:.40}, this Ladder reads format {FORMAT}; export it again"
            )
        return dict(manifest)

    def _described(self, manifest: Mapping[str, Any], size: int) -> Iterator[tuple[str, int]]:
        """Yield names and sizes of all members, as the manifest states them."""
        yield MANIFEST, size
        index, signed = manifest.get(INDEX), manifest.get("signed")
        if not isinstance(index, dict) or type(signed) is not bool or len(index) > MOST_MEMBERS:
            raise self.broken(MANIFEST, f"lacks `signed` or a list of at most {MOST_MEMBERS} members")
        if signed:
            yield SIGNATURE, signing.BYTES
        for name, stated in index.items():
            if not NAMES.fullmatch(name):
                raise self.broken(MANIFEST, f"names a member {name!r:.80}, which artefacts do not have")
            if not isinstance(stated, dict) or set(stated) != {"size", "sha256"}:
                raise self.broken(name, "is not described by size and sha256")
            if type(stated["size"]) is not int or not 0 <= stated["size"] < 1 << 48:
                raise self.broken(name, f"states {stated['size']!r:.40} bytes")
            yield name, stated["size"]

    def _check_size(self, entries: Sequence[_Entry]) -> None:
        """Compare the file's size with what the manifest states, before any member is read."""
        expected = entries[-1].end + len(_directory(entries, _digest(b"")))
        if self.size < expected:
            cut = next((entry.name for entry in entries if entry.end > self.size), "the directory at the end")
            raise ArtifactError(
                f"{self.path} is truncated or no Ladder artefact: {cut} lacks bytes of {expected}; {ADVICE}"
            )
        if self.size > expected:
            raise ArtifactError(f"{self.path} has {self.size - expected} bytes behind its end; {ADVICE}")

    def _member(self, entry: _Entry) -> bytes:
        head, data = self.stream.read(len(entry.local)), self.stream.read(entry.size)
        if head != _Entry(entry.name, entry.size, zlib.crc32(data), entry.offset).local:
            raise self.broken(entry.name, "does not match its checksum and header, the file was changed")
        return data

    def _check_directory(self, entries: Sequence[_Entry], digested: bytes) -> None:
        if self.stream.read() != _directory(entries, _digest(digested)):
            raise self.broken("the directory at the end", "does not match the members, the file was changed")

    def _check_signature(self, data: bytes, signature: bytes | None) -> None:
        if self.key is None:
            return
        if signature is None:
            raise ArtifactError(
                f"{self.path} is not signed; load it without verify= only if you trust its source"
            )
        if not signing.is_signed(self.key, data, signature):
            raise ArtifactError(
                f"{self.path}: {SIGNATURE} was not made by the given key for this manifest; do not load it"
            )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, which names nothing twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
