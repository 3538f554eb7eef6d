"""One kernel library: from memory, from disk, or from the compiler."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder import faults, knobs
from ladder.runtime import library
from ladder.runtime.cache import DIGEST, Identity, KernelCache, cache_key, file_digest
from ladder.runtime.cores import usable_cores
from ladder.runtime.spills import least_spilling, spilled
from tile_types.errors import CacheError, CompilerError, ScheduleError

if TYPE_CHECKING:
    from ladder.ir.gemm import Gemm
    from ladder.lower.build import BuiltModule
    from targets import TileDevice

log = logging.getLogger("ladder.build")

BUILD_THREADS = max(4, min(16, usable_cores()))
"""Kernels in the works at once: one is emitted, the others are with their compiler."""

FREE = 16 << 20
"""Bytes that must be free where a kernel is built."""


@dataclass(frozen=True)
class Kernel:
    """One compiled schedule on disk and what was recorded when it was built.

    library: The ``.so``.
    manifest: ``device``, ``family``, ``schedule``, ``gemm``, ``entry`` (the function's name), ``log``,
        ``resources`` and ``seconds`` of the build.
    from_cache: Whether it was found on disk.
    sources: Returns stage -> text.
    """

    library: Path
    manifest: Mapping[str, Any]
    from_cache: bool
    sources: Callable[[], Mapping[str, str]]

    @property
    def entry(self) -> str:
        """Name of the function in the library."""
        return str(self.manifest["entry"])

    @property
    def spilled(self) -> int:
        """Spills that the device compiler reports, as of `ladder.runtime.spills.spilled`."""
        return spilled(self.manifest["resources"])


_kernels: dict[str, Kernel] = {}
_in_place_of: dict[str, Kernel] = {}
"""Key of a job whose kernel spills -> the kernel that is used instead."""
_entries: dict[str, Any] = {}
"""Path of a library -> its loaded entry."""


def forget_kernels() -> None:
    """Drop the memory of what was found or built."""
    for memory in (_kernels, _in_place_of, _entries):
        memory.clear()


def load_entry(kernel: Kernel, family: str) -> Any:
    """Return the entry of a kernel library, loading each library once.

    Raises CacheError if the library is no longer what it was when it was found or built.
    """
    path = str(kernel.library)
    if path not in _entries:
        data = kernel.library.read_bytes()
        if hashlib.sha256(data).hexdigest() != kernel.manifest.get(DIGEST):
            raise CacheError(f"{path} was changed since it was found; run `ladder cache clear`")
        module = library.load_library(data, kernel.library.name, family)
        _entries[path] = library.entry_of(module, kernel.entry, family)
    return _entries[path]


@dataclass(frozen=True)
class Job:
    """A kernel that is wanted.

    facts: JSON-able description of the kernel.
    identity: What else decides its code.
    device: Its target.
    make: Compiles it into a folder; may run in any thread.
    others: Returns what computes the same by other schedules, next best first: taken where this one spills.
    """

    facts: Mapping[str, Any]
    identity: Identity
    device: TileDevice
    make: Callable[[Path], BuiltModule]
    others: Callable[[], Iterable[Job]] = tuple

    @cached_property
    def key(self) -> str:
        """The kernel's key in the cache."""
        return cache_key(self.facts, self.identity)


def function_job(
    facts: Mapping[str, Any],
    name: str,
    device: TileDevice,
    emit: Callable[[str], Any],
    gemm: Gemm | None = None,
    others: Callable[[], Iterable[Job]] = tuple,
) -> Job:
    """Return the job of a kernel that is one function of TIR.

    facts, device, others: As of `Job`.
    emit: Makes the function of its name; imports of the compiler wait in it for TVM's lock.
    gemm: The problem, if weights are decoded.
    """

    def make(folder: Path) -> BuiltModule:
        from ladder.lower.build import build_function

        return build_function(emit, name, device, folder)

    return Job(facts, Identity.of(gemm, device), device, make, others)


def find_or_build(jobs: Sequence[Job]) -> list[Kernel]:
    """Return the kernel of every job; those that are missing are compiled side by side.

    Raises CompilerError, MissingToolError: The first that occurs, once all builds have ended.
    """
    return all_built(attempt(jobs))


def all_built(found: Sequence[Kernel | Exception]) -> list[Kernel]:
    """Return kernels; raises the first that could not be built."""
    kernels = []
    for kernel in found:
        if isinstance(kernel, Exception):
            raise kernel
        kernels.append(kernel)
    return kernels


def attempt(jobs: Sequence[Job]) -> list[Kernel | Exception]:
    """Return for every job its kernel, or what prevents it; missing kernels are compiled side by side.

    Where a kernel spills, one of the job's `others` takes its place.
    """
    found = _attempt(jobs)
    return [
        kernel if isinstance(kernel, Exception) or not kernel.spilled else _least_spilling(job, kernel)
        for job, kernel in zip(jobs, found, strict=True)
    ]


def _least_spilling(job: Job, kernel: Kernel) -> Kernel:
    """Return the kernel of the first schedule that does not spill, else of what spills least."""
    known = _in_place_of.get(job.key)
    if known is None or not known.library.is_file():
        known = _in_place_of[job.key] = least_spilling(_further(job, kernel), lambda one: [one])
    return known


def _further(job: Job, kernel: Kernel) -> Iterator[Kernel]:
    """Yield a job's kernel and those of other schedules, each compiled when it is asked for."""
    yield kernel
    for other in job.others():
        (found,) = _attempt([other])
        if isinstance(found, Kernel):
            trace("%s spills: %s is tried", kernel.entry, found.entry)
            yield found
        elif not isinstance(found, ScheduleError):  # emission may refuse what was predicted to fit
            faults.tolerated(found, "the kernel of another schedule is taken")


def missing(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs, each once, whose kernels are neither in memory nor on disk."""
    wanted = {job.key: job for job in jobs}
    for key in wanted:
        if key in _kernels and not _kernels[key].library.is_file():
            del _kernels[key]  # the cache was cleared
        if key not in _kernels and (found := _from_disk(key)):
            _kernels[key] = found
    return [job for key, job in wanted.items() if key not in _kernels]


def _attempt(jobs: Sequence[Job]) -> list[Kernel | Exception]:
    failed: dict[str, Exception] = {}
    if wanted := missing(jobs):
        with ThreadPoolExecutor(BUILD_THREADS) as pool:  # threads see the caller's knobs
            tasks = {job.key: pool.submit(copy_context().run, _built_once, job) for job in wanted}
            for key, task in tasks.items():
                try:
                    _kernels[key] = task.result()
                except Exception as error:
                    failed[key] = error
    return [failed[job.key] if job.key in failed else _kernels[job.key] for job in jobs]


def _from_disk(key: str) -> Kernel | None:
    if not knobs.settings.cache:
        return None
    entry = KernelCache().lookup(key)
    trace("cache %s %s", "hit" if entry else "miss", key[:12])
    return Kernel(entry.library, entry.manifest, True, entry.sources) if entry else None


def _built_once(job: Job) -> Kernel:
    """Build a kernel, or wait for the process that does: ranks of a group want the same ones at once."""
    if not knobs.settings.cache:
        return _build(job)
    with KernelCache().building(job.key):
        return _from_disk(job.key) or _build(job)


def _build(job: Job) -> Kernel:
    """Compile a kernel and keep it; raises CompilerError also where the system refuses to write."""
    try:
        return _built(job)
    except (OSError, UnicodeEncodeError) as error:  # a name that is no text
        raise CompilerError(
            f"cannot build a kernel: {error}; free some room, or set TMPDIR to a folder that you can write"
        ) from error


def _built(job: Job) -> Kernel:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ladder-build-") as folder:
        _require_room(folder)
        built = job.make(Path(folder))
        seconds = time.perf_counter() - start
        trace("built %s for %s in %.2f s", built.entries[0], job.device.name, seconds)
        manifest = {
            **job.facts,
            "device": job.device.name,
            "family": "cuda" if job.device.is_gpu else "cpu",
            "entry": built.entries[0],
            "log": built.log,
            "resources": {name: dict(report) for name, report in built.resources.items()},
            "seconds": round(seconds, 3),
        }
        _dump(manifest, job.facts, built.sources)
        return _keep(job.key, Path(built.path), manifest, dict(built.sources))


def _require_room(folder: str) -> None:
    """Raise where a disk is full or files may not be large: LLVM ends a process that cannot write objects."""
    free = shutil.disk_usage(folder).free
    if free < FREE:
        raise CompilerError(
            f"{tempfile.gettempdir()} has {free >> 10} KiB left, building a kernel takes up to {FREE >> 10}:"
            " free some, or set TMPDIR to a folder with room"
        )
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= largest < FREE:
        raise CompilerError(
            f"files of this process are limited to {largest >> 10} KiB, building a kernel takes up to"
            f" {FREE >> 10}: raise `ulimit -f`"
        )


def _keep(key: str, path: Path, manifest: Mapping[str, Any], sources: Mapping[str, str]) -> Kernel:
    """Put a kernel into the cache; without a cache, into a folder that goes with the process."""
    if knobs.settings.cache:
        try:
            entry = KernelCache().store(key, path, manifest, sources)
            return Kernel(entry.library, entry.manifest, False, entry.sources)
        except CacheError as error:
            _tell_once(f"{error}; kernels are used without being kept")
    # A new folder each time: a library that is loaded must never be written to.
    kept = Path(tempfile.mkdtemp(dir=_scratch_folder())) / path.name
    shutil.copyfile(path, kept)
    return Kernel(kept, {**manifest, DIGEST: file_digest(kept)}, False, lambda: sources)


@cache
def _tell_once(message: str) -> None:
    log.warning(message)


@cache
def _scratch_folder() -> str:
    folder = tempfile.mkdtemp(prefix="ladder-kernels-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)


def _dump(manifest: Mapping[str, Any], facts: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Write every stage of a fresh kernel under LADDER_DUMP."""
    folder = knobs.settings.dump
    if folder is None:
        return
    target = folder / str(manifest["entry"])
    lines = [f"device: {manifest['device']}", *(f"{name}: {value}" for name, value in facts.items())]
    knobs.write_dump(target / "facts.txt", "\n".join(lines) + "\n")
    for stage, text in sources.items():
        knobs.write_dump(target / f"{stage.replace('/', '_')}.txt", text)


def trace(message: str, *values: object) -> None:
    """Log a step; LADDER_TRACE also shows it on stderr."""
    log.info(message, *values)
    if knobs.settings.trace:
        print(f"ladder: {message % values}", file=sys.stderr)
