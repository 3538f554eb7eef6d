"""From TIR to an AMD code object: TVM's code generator in a process of its own, and lld.

LLVM ends the process it runs in where an architecture lacks an instruction, so a worker compiles
(`ladder.lower.rocm.worker`); it serves one module after the other and is replaced if it dies.
"""

from __future__ import annotations

import atexit
import functools
import json
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ladder.lower.compilation import Compilation
from ladder.lower.linking import host_linker, packaged_linker
from ladder.lower.rocm.code_object import read_resources, require_loadable
from ladder.lower.tvm_lock import tvm_unlocked
from targets import TileDevice
from tile_types.errors import CompilerError, MissingToolError

CODE_OBJECT = 5
"""Version of the code objects: ROCm 6.0 and newer load it."""

OLDEST_LLD = 16
"""First release of lld that this was meant for; TVM's LLVM is 22."""

LINKERS = ("ld.lld", *(f"ld.lld-{release}" for release in range(30, OLDEST_LLD - 1, -1)))


@functools.cache
def linker() -> tuple[str, ...]:
    """Return the command that links AMD code objects: the packaged lld, else one on PATH.

    Raises MissingToolError if there is none, or all are too old.
    """
    if packaged := packaged_linker():
        return packaged
    old = []
    for name in LINKERS:
        path = shutil.which(name)
        release = _release(path) if path else None
        if path and release is not None and release >= OLDEST_LLD:
            return (path,)
        old += [f"{path} is release {release}"] if path else []
    why = "; ".join(old) or "no ld.lld is on PATH"
    raise MissingToolError(
        f"cannot link for ROCm: {why}; install the packaged one with `pip install 'ladder-compiler[rocm]'`,"
        f" or LLVM's lld {OLDEST_LLD} or newer"
    )


def _release(path: str) -> int | None:
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"LLD (\d+)", output)
    return int(match[1]) if match else None


def compiler_file() -> None:
    """Return that no one program tells compilers apart: which linker serves is found by asking them."""


def compiler_identity() -> str:
    """Return what tells two linkers apart in cache keys."""
    return f"code object {CODE_OBJECT}, lld {linker_release()}"


@functools.cache
def linker_release() -> str:
    """Return the version of the linker, as it prints it."""
    done = subprocess.run([*linker(), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"LLD ([\d.]+)", done.stdout)
    return match[1] if match else "of unknown release"


class Worker:
    """A compiling process, and the file that its standard error goes to."""

    def __init__(self) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        script = Path(__file__).with_name("worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def ask(self, request: Mapping[str, Any]) -> str:
        """Have a module compiled and return what was printed meanwhile.

        Raises CompilerError if the module is rejected, or the process dies of it.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        begin = self.log.seek(0, 2)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self.log.seek(begin)
        printed = self.log.read().decode(errors="replace")
        if not line:
            self.process.wait()
            raise CompilerError(f"the compiler died: {_last_words(printed)}")
        answer = json.loads(line)
        if "error" in answer:
            raise CompilerError(_last_words(str(answer["error"])))
        return printed

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


def _last_words(text: str) -> str:
    """Return LLVM's complaint, or the last lines of what was printed."""
    match = re.search(r"LLVM ERROR: .*", text)
    return match[0] if match else "\n".join(text.strip().splitlines()[-6:])


_idle: queue.LifoQueue[Worker] = queue.LifoQueue()
"""Workers that wait for something to do."""


@atexit.register
def close_workers() -> None:
    """End all processes that wait."""
    while not _idle.empty():
        _idle.get().close()


def compile_functions(functions: Mapping[str, Any], device: TileDevice, library: Path) -> Compilation:
    """Compile PrimFuncs and export one shared library with an entry for each.

    If the caller holds `ladder.lower.tvm_lock.tvm_lock`, other threads get it while the worker compiles.

    functions: TIRx PrimFuncs by name.
    device: An AMD device.
    library: Path of the ``.so`` to write.
    Raises MissingToolError if there is no linker.
    Raises CompilerError if TVM, LLVM or the linker rejects the kernel, or ROCm's loader would.
    """
    host_linker()
    with tempfile.TemporaryDirectory(prefix="ladder-rocm-") as folder:
        assembly = Path(folder) / "assembly"
        written = {"assembly": str(assembly), "library": str(library)}
        binary, log = _compiled(functions, device, {**written, "linker": linker()})
        source = assembly.read_text()
    require_loadable(binary, device.arch, CODE_OBJECT)
    source = re.sub(r"(?<=code_object_version )\d+", str(CODE_OBJECT), source)
    return Compilation("asm", source, binary, log, read_resources(binary))


def resources_of(functions: Mapping[str, Any], device: TileDevice) -> dict[str, dict[str, int]]:
    """Compile PrimFuncs as far as object files and return function -> what its metadata says.

    It needs no linker, and what it makes cannot be loaded.

    Raises CompilerError if TVM or LLVM rejects a kernel.
    """
    return read_resources(_compiled(functions, device, {"linker": ()})[0])


def _compiled(
    functions: Mapping[str, Any], device: TileDevice, request: Mapping[str, Any]
) -> tuple[bytes, str]:
    """Return the binary that a worker makes of PrimFuncs, and what was printed meanwhile."""
    import tvm

    with tempfile.TemporaryDirectory(prefix="ladder-rocm-") as folder:
        tir, binary = Path(folder) / "tir", Path(folder) / "code_object"
        tir.write_text(tvm.ir.save_json(tvm.IRModule(dict(functions))))
        paths = {"tir": str(tir), "code_object": str(binary)}
        whole = {**request, **paths, "target": device.tvm_target, "abi": CODE_OBJECT - 2}
        with tvm_unlocked():
            log = _ask_one(whole, device)
        return binary.read_bytes(), log


def _ask_one(request: Mapping[str, Any], device: TileDevice) -> str:
    """Let an idle worker, or a new one, compile."""
    try:
        worker = _idle.get_nowait()
    except queue.Empty:
        worker = Worker()
    try:
        return worker.ask(request)
    except CompilerError as error:
        raise CompilerError(f"cannot compile for {device.name}: {error}") from error
    finally:
        if worker.alive:
            _idle.put(worker)
        else:
            worker.close()
