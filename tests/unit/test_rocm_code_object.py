"""Reading code objects: MessagePack, notes, and the version in the ELF header."""

from __future__ import annotations

import struct

import pytest

from ladder.lower.rocm.code_object import (
    ABI_VERSION_AT,
    Reader,
    code_object_version,
    read_resources,
    require_loadable,
)
from tile_types.errors import CompilerError


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xcd\x01\x00", 256),
        (b"\xd2\xff\xff\xff\xfe", -2),
        (b"\xa3abc", "abc"),
        (b"\xd9\x02hi", "hi"),
        (b"\x92\x01\xc3", [1, True]),
        (b"\x82\xa1a\x01\xa1b\x91\xc0", {"a": 1, "b": [None]}),
        (b"\xde\x00\x01\xa1k\xcb" + struct.pack(">d", 0.5), {"k": 0.5}),
    ],
)
def test_messagepack(data: bytes, value: object) -> None:
    assert Reader(data).value() == value


def test_unknown_tags_are_refused() -> None:
    with pytest.raises(CompilerError, match="0xc1"):
        Reader(b"\xc1").value()


def _elf(content: bytes) -> bytes:
    """Return an ELF file with one note."""
    note = struct.pack("<III", 7, len(content), 32) + b"AMDGPU\0\0" + content + b"\0" * (-len(content) % 4)
    header = bytearray(64)
    header[:9] = b"\x7fELF\x02\x01\x01\x40\x04"
    header[0x28:0x30] = struct.pack("<Q", 64 + len(note))
    header[0x3A:0x3E] = struct.pack("<HH", 64, 1)
    return bytes(header) + note + struct.pack("<IIQQQQ", 0, 7, 0, 0, 64, len(note)).ljust(64, b"\0")


def test_resources_of_a_kernel() -> None:
    kernel = b"\x83\xa5.name\xa8k_kernel\xab.vgpr_count\x2a\xb1.vgpr_spill_count\x03"
    binary = _elf(b"\x81\xaeamdhsa.kernels\x91" + kernel)
    (name, report), *rest = read_resources(binary).items()
    assert (name, rest) == ("k", [])
    assert report["vgpr"] == 42
    assert report["vgpr_spills"] == 3
    assert report["code_object"] == code_object_version(binary) == 6
    version_5 = binary[:ABI_VERSION_AT] + bytes([3]) + binary[ABI_VERSION_AT + 1 :]
    assert code_object_version(version_5) == 5


def test_files_without_metadata_are_refused() -> None:
    with pytest.raises(CompilerError, match="no AMDGPU metadata"):
        read_resources(_elf(b"\x80"))


def _shared(flags: int, machine: int = 224) -> bytes:
    """Return the header of a version 5 code object."""
    header = bytearray(_elf(b"\x80"))
    header[8] = 3
    header[0x10:0x14] = struct.pack("<HH", 3, machine)
    header[0x30:0x34] = struct.pack("<I", flags)
    return bytes(header)


def test_what_rocm_would_not_load_is_named() -> None:
    require_loadable(_shared(0x54C), "gfx942", 5)
    require_loadable(_shared(0x041), "gfx1100", 5)
    for binary, version, named in (
        (_shared(0x53F), 5, "processor is 0x3f, not 0x4c"),
        (_shared(0x54C), 6, "ABI version is 0x3, not 0x4"),
        (_shared(0x54C, 62), 5, "machine is 0x3e"),
        (_shared(0x74C), 5, "only where XNACK"),
        (_shared(0xD4C), 5, "only where SRAMECC"),
    ):
        with pytest.raises(CompilerError, match=named):
            require_loadable(binary, "gfx942", version)
