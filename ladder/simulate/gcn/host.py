"""From an emitted function and its arrays to launches of machine code: what the host part hands over."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.lower.passes import as_generated
from ladder.lower.rocm.code_object import code_bytes
from ladder.simulate.amd import calls_for
from ladder.simulate.amd.mfma import Core
from ladder.simulate.amd.wmma import CORES, HalfCore
from ladder.simulate.expressions import GlobalBuffer
from ladder.simulate.extents import bind_extents
from ladder.simulate.gcn import rdna
from ladder.simulate.gcn.launch import Report, run
from ladder.simulate.gcn.listing import GcnError, Listing, encoded_bytes, parse_listing
from ladder.simulate.memory import Tensor
from ladder.simulate.program import Node, Plain
from ladder.simulate.translate import Translator
from ladder.simulate.values import Array
from targets import TileDevice


@dataclass(frozen=True)
class Launch:
    """One kernel that the host starts.

    kernel: Its symbol.
    arguments: Arrays and numbers, in order.
    grid, threads: Workgroups, and threads of each.
    """

    kernel: str
    arguments: tuple[Array | int, ...]
    grid: int
    threads: int


class Host(Translator):
    """Follows the host's part of a function and notes what it launches."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found: list[Launch] = []

    def launches(self) -> list[Launch]:
        self.node()
        return self.found

    def _launch(self, kernel: Any, arguments: Any) -> Node:
        given = [self._argument(value) for value in arguments]
        extents = {str(what): int(value) for what, value in self._extents(kernel, given)}
        count = len(kernel.params)
        grid, threads = extents.get("blockIdx.x", 1), extents.get("threadIdx.x", 1)
        symbol = str(kernel.attrs["global_symbol"])
        self.found.append(Launch(symbol, tuple(given[:count]), grid, threads))
        return Plain()

    @staticmethod
    def _extents(kernel: Any, given: list[Any]) -> list[tuple[Any, Any]]:
        count = len(kernel.params)
        return list(zip(kernel.attrs["tirx.kernel_launch_params"], given[count:], strict=False))

    def _argument(self, value: Any) -> Any:
        held = self.viewed(value)
        return held.tensor.array if isinstance(held, GlobalBuffer) else self.number(value)


def launches(function: Any, device: TileDevice, arrays: Sequence[Array | int]) -> list[Launch]:
    """Return what a call of an emitted function with some arrays would launch."""
    host, kernels = as_generated(function, device.tvm_target)
    values = bind_extents(host, arrays)
    tensors = {
        parameter: Tensor("argument", array)
        for parameter, array in zip(host.params, arrays, strict=True)
        if not isinstance(array, int)
    }
    return Host(host, values, tensors, calls_for(device.arch), kernels).launches()


def execute(function: Any, device: TileDevice, arrays: Sequence[Array | int]) -> list[Report]:
    """Compile an emitted function, and execute the machine code of what it launches.

    Arrays are C-contiguous; outputs are overwritten.

    Raises GcnError if the code has an instruction that the emulator does not know.
    Raises MissingToolError, CompilerError if it cannot be compiled.
    """
    from ladder.lower.rocm.toolchain import compile_functions
    from ladder.lower.tvm_lock import tvm_lock

    name = str(function.attrs["global_symbol"])
    with tempfile.TemporaryDirectory(prefix="ladder-gcn-") as folder, tvm_lock():
        compiled = compile_functions({name: function}, device, Path(folder) / "kernel.so")
    found = launches(function, device, arrays)
    most = compiled.resources[name]["threads"]
    for launch in found:
        if launch.threads > most:
            raise GcnError(f"{launch.kernel} is compiled for at most {most} threads, got {launch.threads}")
        require_same_code(compiled.source, compiled.binary, launch.kernel, CORES[device.arch])
    return [
        run(compiled.source, launch.kernel, device.arch, launch.arguments, launch.grid, launch.threads)
        for launch in found
    ]


def require_same_code(assembly: str, binary: bytes, kernel: str, core: Core) -> None:
    """Check that the code object holds as many bytes of code as the assembly's instructions take.

    Raises GcnError if it does not: they are not of the same kernel.
    """
    written, held = written_bytes(parse_listing(assembly, kernel), core), code_bytes(binary, kernel)
    if written != held:
        raise GcnError(f"the assembly of {kernel} takes {written} bytes, the code object has {held}")


def written_bytes(listing: Listing, core: Core) -> int:
    """Return the bytes of a kernel's instructions, and of what fills the space before aligned ones."""
    written = 0
    for at, i in enumerate(listing.instructions):
        written += -written % listing.aligned.get(at, 1)
        written += rdna.encoded_bytes(i, core.split) if isinstance(core, HalfCore) else encoded_bytes(i)
    return written
