"""Patching of imported functions in loaded ELF libraries: a function is replaced by one of the C library.

A library in ELF calls functions of others through a table of addresses, the global offset table. Its slots
are listed among the library's relocations (System V ABI, *Dynamic Linking*; ``link_map`` of ``<link.h>``).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

STRTAB, SYMTAB, PLTRELSZ, JMPREL = 5, 6, 2, 23
"""Tags of the dynamic section: names, symbols, bytes of the relocations of calls, those relocations."""

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class _LinkMap(ctypes.Structure):
    """A loaded library."""


_LinkMap._fields_ = [
    ("address", ctypes.c_uint64),
    ("name", ctypes.c_char_p),
    ("dynamic", ctypes.c_void_p),
    ("next", ctypes.POINTER(_LinkMap)),
]


class _Dynamic(ctypes.Structure):
    """An entry of the dynamic section."""

    _fields_ = (("tag", ctypes.c_int64), ("value", ctypes.c_uint64))


class _Relocation(ctypes.Structure):
    """Where the address of a symbol is written."""

    _fields_ = (("offset", ctypes.c_uint64), ("info", ctypes.c_uint64), ("addend", ctypes.c_int64))


class _Symbol(ctypes.Structure):
    """An entry of a symbol table; only the offset of its name is read."""

    _fields_ = (("name", ctypes.c_uint32), ("rest", ctypes.c_uint8 * 20))


def is_supported() -> bool:
    """Tell whether this process has libraries of 64-bit ELF, loaded by glibc."""
    is_wide = sys.platform == "linux" and sys.maxsize > 1 << 32
    return is_wide and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def replace(library: str, function: str, by: str) -> int:
    """Let libraries call a function of the C library instead of another one; returns how many do.

    library: Beginning of the libraries' file names.
    function: The symbol of what they call.
    by: The function that they call from now on, with the same arguments.
    """
    address = ctypes.cast(getattr(ctypes.CDLL(None), by), ctypes.c_void_p).value
    slots = [slot for loaded in _libraries(library) for slot in _slots(loaded, function.encode())]
    for slot in slots:
        _write(slot, address or 0)
    return len(slots)


def _libraries(name: str) -> Iterator[_LinkMap]:
    """Yield the loaded libraries whose file names begin so."""
    found = ctypes.POINTER(_LinkMap)()
    request = 2  # RTLD_DI_LINKMAP
    main = ctypes.c_void_p(ctypes.CDLL(None)._handle)
    if ctypes.CDLL(None).dlinfo(main, request, ctypes.byref(found)):
        return
    while found:
        if found.contents.name.rpartition(b"/")[2].startswith(name.encode()):
            yield found.contents
        found = found.contents.next


def _slots(library: _LinkMap, function: bytes) -> Iterator[int]:
    """Yield the addresses at which a library keeps the address of a function that it calls."""
    tables = _tables(library)
    if not {STRTAB, SYMTAB, JMPREL, PLTRELSZ} <= set(tables):
        return
    count = tables[PLTRELSZ] // ctypes.sizeof(_Relocation)
    for relocation in (_Relocation * count).from_address(tables[JMPREL]):
        number = relocation.info >> 32
        symbol = _Symbol.from_address(tables[SYMTAB] + number * ctypes.sizeof(_Symbol))
        if ctypes.string_at(tables[STRTAB] + symbol.name) == function:
            yield library.address + relocation.offset


def _tables(library: _LinkMap) -> dict[int, int]:
    """Return the dynamic section; glibc has made addresses of its places."""
    found, at = {}, library.dynamic or 0
    while at and (entry := _Dynamic.from_address(at)).tag:
        found[entry.tag] = entry.value
        at += ctypes.sizeof(_Dynamic)
    return found


def _write(slot: int, address: int) -> None:
    """Write an address, into memory that the loader may have protected since."""
    begin = slot - slot % mmap.PAGESIZE
    if not ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(mmap.PAGESIZE), READ_WRITE):
        ctypes.c_uint64.from_address(slot).value = address
