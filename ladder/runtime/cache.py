"""The disk cache of compiled kernels.

An entry is a folder ``kernels/<key>`` with the kernel library and ``manifest.json``. It is
written in a temporary folder beside it and renamed, so a reader sees a whole entry or
none; two processes that fill one entry at once both succeed, and the first one's stays.
An entry whose content does not match its manifest counts as a miss and is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder import knobs
from ladder.installation import cache_root, installed_version, ladder_version, tvm_version
from tile_types import get_type
from tile_types.errors import CacheError, MissingToolError, path_of
from tile_types.files import replacing
from tile_types.identity import own_values_named
from tile_types.ttype import values_text

if TYPE_CHECKING:
    from ladder.ir.gemm import Gemm
    from targets import TileDevice

log = logging.getLogger("ladder.cache")

FORMAT = 1
"""Version of the entry layout; other versions are misses."""

LIBRARY = "kernel.so"
MANIFEST = "manifest.json"
DIGEST = "sha256"
"""Key of a manifest: the digest of the library."""

SOURCES_FILE = "sources.json"
"""Stage -> text; apart from the manifest, because looking up a kernel need not read it."""


NOTES = ("plans", "models", "sources", "compilers")
"""Folders of notes that can be made again: chosen schedules, imported models, digests of sources, and what
compilers say of themselves."""

CLOCK_STEP = 2.0
"""Seconds within which a file may be written twice and bear one time."""

STALE_SECONDS = 3600.0
"""A temporary folder older than this belongs to a process that was killed."""

ATTEMPTS = 8
"""How often a write is tried against other processes that repair the same entry."""

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the packages."""

SOURCES = ("tile_types", "targets", "schedules", "ladder")
"""Packages whose source text decides what a kernel is."""

APART = frozenset(
    f"ladder/{name}" for name in ("api", "capture", "cli", "frontend", "integrations", "simulate")
)
"""Packages among them that only say which kernels are wanted, or use them: these are not in the key."""


@cache
def source_digest(packages: tuple[str, ...] = SOURCES, root: Path = ROOT) -> str:
    """Return a digest of every source file that takes part in making a kernel, or of other packages.

    LLVM's text (``.ll``) is linked into kernels of AMD GPUs. The digest is kept on disk for as long as no
    file is written or replaced: reading all of them takes a large part of a warm call.

    packages: Folders below ``root``; what `APART` names below them is left out.
    """
    files = list(_source_files(packages, root))
    states = [file.stat() for file in files]
    newest = max((max(state.st_mtime, state.st_ctime) for state in states), default=0.0)
    if not knobs.settings.cache or newest + CLOCK_STEP > time.time():
        return _digest_of(files, root)
    facts = (_facts(state) for state in states)
    text = repr([(str(root), FORMAT), *zip((file.path for file in files), facts, strict=True)])
    key = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    kept = KernelCache().read_note("sources", key)
    if not isinstance(kept, str):
        kept = _digest_of(files, root)
        with contextlib.suppress(CacheError):  # the kernel's own entry then says so
            KernelCache().write_note("sources", key, kept)
    return kept


def _facts(state: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from another, and from what it was before it was written."""
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _source_files(packages: tuple[str, ...], root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files that `source_digest` reads, in the order of their names."""
    apart = {"__pycache__", *(str(root / name) for name in APART - set(packages))}

    def below(folder: str) -> Iterator[os.DirEntry[str]]:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):  # what Python compiled may be another user's
                yield from below(entry.path) if {entry.path, entry.name}.isdisjoint(apart) else ()
            elif entry.name.endswith((".py", ".ll")):
                yield entry

    for package in packages:
        yield from below(str(root / package))


def _digest_of(files: Sequence[os.DirEntry[str]], root: Path) -> str:
    """Return a digest of the names and contents of files."""
    digest = hashlib.sha256()
    for entry in files:
        digest.update(f"{entry.path.removeprefix(str(root))}\0".encode())
        with open(entry.path, "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


TOOLS = ("apache-tvm-ffi", "numpy", "ml_dtypes")
"""Distributions, besides TVM, whose version decides a kernel: how it is called, values of types."""


@cache
def tool_versions() -> tuple[str, ...]:
    """Return ``name==version`` of `TOOLS`."""
    return tuple(f"{name}=={installed_version(name, 'none')}" for name in TOOLS)


@dataclass(frozen=True)
class Identity:
    """What, besides the problem and the schedule, decides what a kernel is.

    device: What of the target reaches the code generator.
    weight: Width and values of the weight's type: a user can define any under a name.
    compiler: The compiler behind TVM (TVM brings its own for CPUs).
    """

    device: str
    weight: str
    compiler: str

    @staticmethod
    def of(gemm: Gemm | None, device: TileDevice, *, compiled: bool = True) -> Identity:
        """Collect the identity for a problem on a device.

        gemm: The problem; None for a kernel without weights.
        device: The target.
        compiled: Whether a compiler takes part.
        """
        parts = (device.name, device.target, device.compile_options, sorted(device.features), device.cores)
        return Identity(
            repr(parts), type_text(gemm.weight) if gemm else "", _compiler(device) if compiled else ""
        )


def type_text(name: str) -> str:
    """Return what tells types of one name apart: widths and all values of the elements."""
    element = get_type(name).element_type
    return f"{element.name}: {values_text(element)}"


TOOLCHAINS = {"cuda": "ladder.lower.cuda.toolchain", "rocm": "ladder.lower.rocm.toolchain"}
"""TVM target kind -> module whose ``compiler_identity()`` tells compilers apart."""


def _compiler(device: TileDevice) -> str:
    if device.kind not in TOOLCHAINS:
        return ""
    try:
        program = importlib.import_module(TOOLCHAINS[device.kind]).compiler_file()
        return _compiler_identity(device.kind, program)
    except MissingToolError:
        return "none"  # a miss then says which tool is missing


MACHINE_CODE = b"\x7fELF"
"""How a program begins that is no script: what a script calls may change while it does not."""


@cache
def _compiler_identity(kind: str, program: Path | None) -> str:
    """Return what a toolchain says of its compiler; kept on disk for as long as the program is the same.

    Asking it takes a fifth of a warm call.
    """
    toolchain = importlib.import_module(TOOLCHAINS[kind])
    state = os.stat(program) if program and knobs.settings.cache else None
    if program is None or state is None or max(state.st_mtime, state.st_ctime) + CLOCK_STEP > time.time():
        return str(toolchain.compiler_identity())
    with open(program, "rb") as file:
        if file.read(len(MACHINE_CODE)) != MACHINE_CODE:
            return str(toolchain.compiler_identity())
    text = repr((str(program.resolve()), _facts(state), source_digest()))
    key = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    kept = KernelCache().read_note("compilers", key)
    if not isinstance(kept, str):
        kept = str(toolchain.compiler_identity())
        with contextlib.suppress(CacheError):  # the kernel's own entry then says so
            KernelCache().write_note("compilers", key, kept)
    return kept


def cache_key(facts: Mapping[str, Any], identity: Identity) -> str:
    """Return the key of a kernel: a digest of everything that can change it.

    facts: JSON-able description of the kernel: ``Gemm.shape_free`` (kernels take N and K from the tensors)
        and the schedule.
    identity: What else decides its code.
    """
    text = json.dumps(facts, sort_keys=True)
    parts = {
        "format": FORMAT,
        "facts": text,
        "types": own_values_named(text),
        "identity": astuple(identity),
        "ladder": ladder_version(),
        "sources": source_digest(),
        "tvm": tvm_version(),
        "tools": tool_versions(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_whole(library: Path) -> bool:
    """Tell whether a library of `ladder.runtime.place_library` is there, no byte missing or changed.

    Loading one that was cut short ends the process.
    """
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def placed(made: Path, draft: Path) -> tuple[str, ...]:
    """Return what runs a compiler, whose command follows, and gives the library its name."""
    program = Path(__file__).with_name("place_library.py")
    return (sys.executable, "-I", "-S", str(program), str(made), str(draft))


def seal(value: Any) -> str:
    """Return JSON text that `unseal` knows to be whole."""
    body = json.dumps(value, sort_keys=True)
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def unseal(text: str) -> Any:
    """Return what `seal` was given; raises ValueError if a byte is missing or changed."""
    digest, _, body = text.partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise ValueError("the digest does not match")
    return json.loads(body)


@dataclass(frozen=True)
class CacheEntry:
    """One kernel in the cache.

    key: The digest that names it.
    folder: Where its files are.
    manifest: What was stored beside the library.
    """

    key: str
    folder: Path
    manifest: Mapping[str, Any]

    @property
    def library(self) -> Path:
        """Path of the kernel library."""
        return self.folder / LIBRARY

    def sources(self) -> dict[str, str]:
        """Return stage -> text.

        Raises CacheError if the file was damaged.
        """
        path = self.folder / SOURCES_FILE
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise CacheError(f"cannot read {path} ({error}); run `ladder cache clear`") from error

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())


class KernelCache:
    """Kernels on disk, shared by processes.

    Parameters
    ----------
    root
        Folder of the cache; `cache_root` by default.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = cache_root() if root is None else path_of(root, "the folder of the cache")
        self.kernels = self.root / "kernels"
        self.temporary = self.root / "tmp"

    def lookup(self, key: str) -> CacheEntry | None:
        """Return the entry of ``key``, or None if it is absent or not intact."""
        folder = self.kernels / key
        if not folder.is_dir():
            return None
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            reason = self._fault(folder, key, manifest)
        except (OSError, ValueError) as error:
            manifest, reason = {}, str(error)
        if reason:
            log.warning("cache entry %s is not intact (%s); it will be built again", folder, reason)
            return None
        return CacheEntry(key, folder, manifest)

    def _fault(self, folder: Path, key: str, manifest: Any) -> str:
        """Say why an entry cannot be used; empty if it can."""
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return "another format version"
        if manifest.get("key") != key:
            return "it was stored under another key"
        if file_digest(folder / LIBRARY) != manifest.get(DIGEST):
            return "the library was truncated or changed"
        return ""

    @contextlib.contextmanager
    def building(self, key: str) -> Iterator[None]:
        """Hold the right to build an entry: processes that want the same one meanwhile wait here.

        The right ends with its process. Where the folder has no locks, all build.
        """
        path = self.root / "locks" / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = path.open("w")
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError as error:
            log.info("no lock in %s (%s): several processes may build one kernel", path.parent, error)
            yield
            return
        with held:
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                fcntl.flock(held, fcntl.LOCK_UN)

    def store(
        self, key: str, built: Path, manifest: Mapping[str, Any], sources: Mapping[str, str] | None = None
    ) -> CacheEntry:
        """Put a kernel library into the cache and return the entry to use.

        key: What `cache_key` returned.
        built: The library; it is copied.
        manifest: JSON-able facts to keep beside it.
        sources: Stage -> text, for people.
        Raises CacheError if the folder cannot be written.
        """
        full = {**manifest, "format": FORMAT, "key": key, DIGEST: file_digest(built)}
        try:
            for _ in range(ATTEMPTS):
                self._write(key, built, full, sources or {})
                # Another process may have taken a broken entry of this key, and ours with it, away.
                entry = self.lookup(key)
                if entry is not None:
                    return entry
        except OSError as error:
            raise CacheError(
                f"cannot write the kernel cache {self.root}: {error.strerror or error}; set LADDER_CACHE_DIR"
                " to a folder that you can write, or LADDER_CACHE=0"
            ) from error
        raise CacheError(f"the kernel cache {self.root} does not keep what is written to it")

    def _write(self, key: str, built: Path, manifest: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        """Write a whole entry in a temporary folder, then publish it."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.kernels.mkdir(exist_ok=True)
        self.temporary.mkdir(exist_ok=True)
        self._sweep()
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self.temporary))
        try:
            shutil.copyfile(built, folder / LIBRARY)
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
            (folder / SOURCES_FILE).write_text(json.dumps(dict(sources)))
            self._publish(folder, self.kernels / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, folder: Path, final: Path) -> None:
        """Rename a complete folder into place unless an intact entry is already there."""
        for _ in range(ATTEMPTS):
            try:
                folder.rename(final)
                return
            except OSError:
                if self.lookup(final.name) is not None:
                    return
            # Something broken is in the way: move it aside, then try again.
            with contextlib.suppress(FileNotFoundError):
                final.rename(Path(tempfile.mkdtemp(prefix="broken-", dir=self.temporary)) / "entry")
        folder.rename(final)

    def _sweep(self) -> None:
        """Remove what killed processes left in the temporary folder."""
        now = time.time()
        for path in self.temporary.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name.startswith("broken-") or now - path.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)

    def read_note(self, folder: str, key: str) -> Any:
        """Return the JSON value that `write_note` stored, None if it is absent or damaged."""
        path = self.root / folder / f"{key}.json"
        try:
            return unseal(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            log.warning("cache entry %s is not intact (%s); it will be made again", path, error)
            return None

    def write_note(self, folder: str, key: str, value: Any) -> None:
        """Store a small JSON value under ``folder``; whole or not at all.

        Raises CacheError if the folder cannot be written.
        """
        path = self.root / folder / f"{key}.json"
        advice = "; set LADDER_CACHE_DIR to a folder that you can write"
        with replacing(path, CacheError, advice, folder=True) as part:
            part.write_text(seal(value))

    def entries(self) -> Iterator[CacheEntry]:
        """Yield every intact entry, by key."""
        if not self.kernels.is_dir():
            return
        for folder in sorted(self.kernels.iterdir()):
            entry = self.lookup(folder.name)
            if entry is not None:
                yield entry

    def size(self) -> int:
        """Return the bytes of all files, broken ones included."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def clear(self) -> int:
        """Remove all kernels and notes; tuning results stay. Returns how many kernels were removed.

        Raises CacheError if a file cannot be removed.
        """
        removed = 0
        try:
            for folder in list(self.kernels.iterdir()) if self.kernels.is_dir() else ():
                self.temporary.mkdir(parents=True, exist_ok=True)
                doomed = Path(tempfile.mkdtemp(prefix="broken-", dir=self.temporary))
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(doomed / "entry")
                    removed += 1
            for notes in NOTES:
                shutil.rmtree(self.root / notes, ignore_errors=True)
            if self.temporary.is_dir():
                self._sweep()
        except OSError as error:
            raise CacheError(f"cannot clear the kernel cache {self.root}: {error}") from error
        return removed
