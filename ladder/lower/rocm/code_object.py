"""Metadata of an AMD code object's kernels: the ELF header and the metadata note.

Source: LLVM, "User Guide for AMDGPU Backend", sections "ELF Code Object" and "Code Object V3
Metadata" (a MessagePack map in a note of type 32 of vendor ``AMDGPU``).

HIP and the HSA loader decide by the ELF header alone whether a GPU can run a code object: machine, OS ABI,
ABI version, and in the flags the processor with its XNACK and SRAMECC settings, of which "any" loads under
each (ROCm's ``hip_code_object.cpp`` and comgr). The metadata's ``amdhsa.target`` is not consulted: there
the triple ``amdgcn-amd-amdhsa-hcc`` shows, on which TVM insists.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tile_types.errors import CompilerError

ABI_VERSION_AT = 8
"""Byte of the ELF header that holds the ABI version: the code object's version less two."""

ELF_HEADER = {
    "class": (4, "<B", 2),
    "byte order": (5, "<B", 1),
    "OS ABI": (7, "<B", 64),
    "type": (16, "<H", 3),
    "machine": (18, "<H", 224),
}
"""Field -> where it lies, how, and what ROCm's loader wants: a 64-bit shared object of AMDGPU_HSA."""

FLAGS_AT = 0x30
PROCESSORS = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F, "gfx1100": 0x41, "gfx1201": 0x4E}
"""Architecture -> EF_AMDGPU_MACH in the low byte of the flags."""

FEATURES = {"XNACK": (0x300, (0, 0x100)), "SRAMECC": (0xC00, (0, 0x400))}
"""Feature -> its bits in the flags from version 4 on, and those that load on any GPU: unsupported, any."""

METADATA_NOTE = 32
NOTE_SECTION = 7
KERNEL_SUFFIX = "_kernel"
"""Suffix that TVM appends to the name of a function's device part."""

RESOURCES = {
    "vgpr": ".vgpr_count",
    "agpr": ".agpr_count",
    "sgpr": ".sgpr_count",
    "vgpr_spills": ".vgpr_spill_count",
    "sgpr_spills": ".sgpr_spill_count",
    "scratch_bytes": ".private_segment_fixed_size",
    "lds_bytes": ".group_segment_fixed_size",
    "threads": ".max_flat_workgroup_size",
    "wave": ".wavefront_size",
}
"""Resource -> key of a kernel's metadata. From gfx90a on ``vgpr`` counts accumulation registers too."""


def code_object_version(binary: bytes) -> int:
    """Return the code object version that an ELF file states."""
    return binary[ABI_VERSION_AT] + 2


def require_loadable(binary: bytes, arch: str, version: int) -> None:
    """Check what ROCm's loader checks of a code object.

    Raises CompilerError: Names the first thing that a GPU of this architecture would be refused for.
    """
    fields = {
        name: (*struct.unpack_from(form, binary, at), want) for name, (at, form, want) in ELF_HEADER.items()
    }
    fields["ABI version"] = (binary[ABI_VERSION_AT], version - 2)
    (flags,) = struct.unpack_from("<I", binary, FLAGS_AT)
    fields["processor"] = (flags & 0xFF, PROCESSORS[arch])
    for name, (found, want) in fields.items():
        if found != want:
            raise CompilerError(
                f"ROCm would not load the code object: its {name} is {found:#x}, not {want:#x}"
            )
    for name, (mask, loads) in FEATURES.items():
        if flags & mask not in loads:
            raise CompilerError(
                f"ROCm would load the code object only where {name} is set as it was compiled"
            )


def read_resources(binary: bytes) -> dict[str, dict[str, int]]:
    """Return function -> resource -> number for every kernel of a code object.

    Raises CompilerError if the file has no AMDGPU metadata.
    """
    for kernels in (note.get("amdhsa.kernels") for note in _metadata(binary)):
        if kernels:
            version = code_object_version(binary)
            return {
                str(kernel[".name"]).removesuffix(KERNEL_SUFFIX): {
                    **{name: int(kernel.get(key, 0)) for name, key in RESOURCES.items()},
                    "code_object": version,
                }
                for kernel in kernels
            }
    raise CompilerError("the code object has no AMDGPU metadata")


SYMBOL_TABLES = (2, 11)
"""Types of sections of symbols: SHT_SYMTAB, SHT_DYNSYM."""

SYMBOL_BYTES = 24


def code_bytes(binary: bytes, kernel: str) -> int:
    """Return the size of a kernel's machine code in a linked code object.

    Raises CompilerError if the file has no such symbol.
    """
    (sections,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQI", binary, sections + index * size) for index in range(count)]
    for _, kind, _, _, offset, length, link in headers:
        if kind not in SYMBOL_TABLES:
            continue
        names = headers[link][4]
        for at in range(offset, offset + length, SYMBOL_BYTES):
            name, _, _, _, _, found = struct.unpack_from("<IBBHQQ", binary, at)
            start = names + name
            if binary[start : binary.index(b"\0", start)].decode() == kernel:
                return int(found)
    raise CompilerError(f"the code object has no kernel {kernel!r}")


def _metadata(binary: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the maps of all metadata notes of a 64-bit little-endian ELF file."""
    (sections,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    for index in range(count):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", binary, sections + index * size + 4)
        if kind != NOTE_SECTION:
            continue
        at = offset
        while at < offset + length:
            name_size, content_size, note = struct.unpack_from("<III", binary, at)
            content = at + 12 + (name_size + 3) // 4 * 4
            if note == METADATA_NOTE:
                yield Reader(binary, content).value()
            at = content + (content_size + 3) // 4 * 4


@dataclass
class Reader:
    """Reads MessagePack as far as metadata uses it.

    data, at: Bytes, and where the next value begins.
    """

    data: bytes
    at: int = 0

    def value(self) -> Any:
        tag = self._number("<B")
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 0x100
        if tag in FIXED:
            return FIXED[tag]
        if tag in NUMBERS:
            return self._number(NUMBERS[tag])
        for first, last, mask, form, read in SIZED:
            if first <= tag <= last:
                return read(self, tag & mask if form is None else self._number(form))
        raise CompilerError(f"metadata holds MessagePack tag {tag:#x}, which is not known")

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return number

    def text(self, size: int) -> str:
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def array(self, size: int) -> list[Any]:
        return [self.value() for _ in range(size)]

    def map(self, size: int) -> dict[str, Any]:
        """Return ``size`` pairs of keys and values."""
        return {self.value(): self.value() for _ in range(size)}


FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = {
    0xCC: "<B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: "<b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
    0xCA: ">f", 0xCB: ">d",
}  # fmt: skip
SIZED = (
    (0x80, 0x8F, 0x0F, None, Reader.map),
    (0x90, 0x9F, 0x0F, None, Reader.array),
    (0xA0, 0xBF, 0x1F, None, Reader.text),
    (0xD9, 0xD9, 0, "<B", Reader.text),
    (0xDA, 0xDA, 0, ">H", Reader.text),
    (0xDC, 0xDC, 0, ">H", Reader.array),
    (0xDE, 0xDE, 0, ">H", Reader.map),
)
"""Tags of values with a size: first, last, mask of a size in the tag, or form of one behind it."""
