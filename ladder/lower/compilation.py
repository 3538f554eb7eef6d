"""What a device compiler returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Compilation:
    """Result of one run of a compiler.

    language: Name of the stage that ``source`` is.
    source: Text that the compiler took, or made.
    binary: Machine code for one architecture: a cubin, or a linked code object; empty for CPUs.
    log: What the compiler printed.
    resources: Kernel -> what the compiler, or the code object's metadata, says of it.
    """

    language: str
    source: str = ""
    binary: bytes = b""
    log: str = ""
    resources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
