"""The kernel cache: hits, misses, damage, concurrency, kills."""

from __future__ import annotations

import ast
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Never

import pytest
import torch

import ladder
from ladder import knobs
from ladder.installation import installed_version
from ladder.ir.gemm import Gemm
from ladder.runtime import build, cache
from ladder.runtime.build import Job, Kernel, find_or_build, load_entry
from ladder.runtime.cache import Identity, KernelCache, cache_key
from schedules.schedule import GpuSchedule
from targets import get_device
from targets.cpu import cpu_device
from tile_types import TType
from tile_types import library as type_library
from tile_types.errors import ArtifactError, CacheError, CompilerError

GEMM = Gemm(n=64, k=128, weight="int4", group_size=32)
SCHEDULE = str(GpuSchedule("gemv", 16))
IDENTITY = Identity("cuda/sm_80", "int4", "nvcc 13")


def key_of(gemm: Gemm = GEMM, schedule: str = SCHEDULE, **identity: str) -> str:
    return cache_key({"gemm": gemm.shape_free(), "schedule": schedule}, replace(IDENTITY, **identity))


@pytest.fixture
def kernels(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "built.so"
    path.write_bytes(os.urandom(5000))
    return path


def test_key_ignores_shape_and_feels_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of()
    assert key_of(replace(GEMM, n=1000, k=4096)) == key
    others = [
        key_of(replace(GEMM, group_size=64)),
        key_of(replace(GEMM, group_size=128)),
        key_of(replace(GEMM, weight="int3")),
        key_of(replace(GEMM, bias=True)),
        key_of(replace(GEMM, epilogue=("relu",))),
        key_of(schedule=str(GpuSchedule("gemv", 8))),
        key_of(device="cuda/sm_86"),
        key_of(weight="v"),
        key_of(compiler="d"),
    ]
    for name in ("source_digest", "ladder_version", "tvm_version", "tool_versions"):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, lambda: "another")
            others.append(key_of())
    assert len({key, *others}) == 1 + len(others)


def test_versions_are_those_of_the_standard_library() -> None:
    for name in (*cache.TOOLS, "apache-tvm", "torch", "pytest"):
        assert installed_version(name, "absent") == importlib.metadata.version(name)
    assert installed_version("no-such-distribution", "absent") == "absent"


def copied_sources(folder: Path) -> Path:
    """Return a folder with a copy of every package."""
    for package in cache.SOURCES:
        shutil.copytree(cache.ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def packages(root: Path) -> list[str]:
    """Return every package that has a folder of its own at the top or directly in ``ladder``."""
    inner = sorted((root / "ladder").glob("*/__init__.py"))
    return [*cache.SOURCES, *(f"ladder/{path.parent.name}" for path in inner)]


def test_every_package_that_decides_a_kernel_is_in_the_key(tmp_path: Path) -> None:
    root = copied_sources(tmp_path)
    digest = cache.source_digest.__wrapped__
    plain, felt = digest(root=root), {}
    assert plain == digest()
    for package in packages(root):
        path = root / package / "__init__.py"
        before = path.read_bytes()
        path.write_bytes(before + b"#")
        felt[package] = digest(root=root) != plain
        path.write_bytes(before)
    assert {package for package in felt if not felt[package]} == cache.APART
    linked = root / "ladder/lower/rocm/bfloat16.ll"
    linked.write_bytes(linked.read_bytes() + b";")
    assert digest(root=root) != plain
    assert digest(("ladder/frontend",), root) != digest(("ladder/capture",), root)


def test_digests_of_sources_are_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, read = cache.source_digest.__wrapped__, []
    monkeypatch.setattr(cache, "_digest_of", lambda files, root: read.append(1) or f"{len(read)} times")
    source = tmp_path / "sources" / "tile_types" / "one.py"
    source.parent.mkdir(parents=True)

    def found(clock: float) -> str:
        monkeypatch.setattr(cache.time, "time", lambda: clock)
        return str(digest(("tile_types",), tmp_path / "sources"))

    with knobs.override(cache_dir=tmp_path / "cache"):
        source.write_text("a = 1")
        now = source.stat().st_ctime
        assert [found(now), found(now)] == ["1 times", "2 times"]  # it may be written again at that time
        assert [found(now + 9), found(now + 9)] == ["3 times", "3 times"]
        compiled = source.parent / "__pycache__" / "one.py"
        compiled.parent.mkdir()
        compiled.touch()
        assert found(now + 9) == "3 times"
        source.write_text("a = 2")  # as long as before
        os.utime(source, (now, now))
        assert [found(now + 99), found(now + 99)] == ["4 times", "4 times"]
        with knobs.override(cache=False):
            assert found(now + 99) == "5 times"
        KernelCache(tmp_path / "cache").clear()
        assert found(now + 99) == "6 times"


def imported(path: Path, root: Path) -> set[Path]:
    """Return the files of ours that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    bases = [root / name.replace(".", "/") for name in names - {"ladder"}]
    files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
    return {file for file in files if file.is_file()}


def test_what_emitters_import_is_in_the_key() -> None:
    """Emitters reach no package that the key leaves out."""
    root, seen = cache.ROOT, set()
    waiting = set((root / "ladder/lower").rglob("*.py"))
    while waiting:
        seen |= (new := waiting - seen)
        waiting = {file for path in new for file in imported(path, root)} - seen
    reached = {"/".join(path.relative_to(root).parts[:2]) for path in seen}
    assert {"ladder/movement", "ladder/ir"} <= reached
    assert not reached & cache.APART


def test_kernels_of_a_type_of_ones_own_follow_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a user gives may mean other values in another process."""
    facts = {"block": "kernel f { %w = input() : test_own_type[4] }"}
    keys = []
    for scale in (1, 2):
        ttype = TType("test_own_type", 2, lambda code, ops, by=scale: ops.cast(code * by, "float32"), doc="")
        with monkeypatch.context() as patch:
            patch.setattr(type_library, "_TYPES", dict(type_library._TYPES))
            type_library.register_type(ttype)
            keys.append(cache_key(facts, IDENTITY))
    assert keys[0] != keys[1]


def test_identity_follows_device_and_values_of_the_type() -> None:
    cpus = [cpu_device("cpu/x", "x", frozenset(features), 2) for features in ({"avx2"}, {"avx2", "fma"})]
    texts = [Identity.of(replace(GEMM, weight=weight), cpu) for cpu in cpus for weight in ("int4", "uint4")]
    assert len(set(texts)) == 4
    assert Identity.of(GEMM, cpus[0]) == texts[0]


def test_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LADDER_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_root() == tmp_path / "ladder"
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path / "mine"))
    assert KernelCache().root == tmp_path / "mine"
    with knobs.override(cache_dir=tmp_path / "block"):
        assert KernelCache().root == tmp_path / "block"


def test_store_then_lookup(kernels: KernelCache, library: Path) -> None:
    assert kernels.lookup("k1") is None
    stored = kernels.store("k1", library, {"entries": ["f"]})
    found = kernels.lookup("k1")
    assert found == stored
    assert found.library.read_bytes() == library.read_bytes()
    assert found.manifest["entries"] == ["f"]
    assert [entry.key for entry in kernels.entries()] == ["k1"]
    assert kernels.size() == found.nbytes > 5000
    assert not any(kernels.temporary.iterdir())


def test_sources_are_kept_and_their_damage_is_named(kernels: KernelCache, library: Path) -> None:
    entry = kernels.store("k1", library, {}, {"tir": "text"})
    assert kernels.lookup("k1").sources() == {"tir": "text"}
    (entry.folder / cache.SOURCES_FILE).write_text("{")
    with pytest.raises(CacheError, match="cache clear"):
        kernels.lookup("k1").sources()


def test_notes_are_whole_or_absent(kernels: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    assert kernels.read_note("plans", "a") is None
    kernels.write_note("plans", "a", ["m<=1: x", 2])
    assert kernels.read_note("plans", "a") == ["m<=1: x", 2]
    path = kernels.root / "plans" / "a.json"
    assert list(path.parent.iterdir()) == [path]
    whole = path.read_text()
    for damaged in (whole[:-3], whole.replace("<=1", "<=7")):
        path.write_text(damaged)
        assert kernels.read_note("plans", "a") is None
    assert "not intact" in caplog.text


def test_clear_removes_kernels_only(kernels: KernelCache, library: Path) -> None:
    for key in ("k1", "k2"):
        kernels.store(key, library, {})
    (kernels.root / "tuning.json").write_text("{}")
    assert kernels.clear() == 2
    assert list(kernels.entries()) == []
    assert (kernels.root / "tuning.json").exists()
    assert kernels.clear() == 0


def _truncate(folder: Path) -> None:
    data = (folder / cache.LIBRARY).read_bytes()
    (folder / cache.LIBRARY).write_bytes(data[: len(data) // 2])


def _edit(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    (folder / cache.MANIFEST).write_text(json.dumps({**manifest, **changes}))


DAMAGE = {
    "truncated library": _truncate,
    "missing library": lambda folder: (folder / cache.LIBRARY).unlink(),
    "truncated manifest": lambda folder: (folder / cache.MANIFEST).write_text('{"format": 1, "k'),
    "missing manifest": lambda folder: (folder / cache.MANIFEST).unlink(),
    "manifest of another shape": lambda folder: (folder / cache.MANIFEST).write_text("[1]"),
    "other version": lambda folder: _edit(folder, format=cache.FORMAT + 1),
    "other key": lambda folder: _edit(folder, key="k2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_a_logged_miss_and_is_replaced(
    kernels: KernelCache, library: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[damage](kernels.store("k1", library, {}).folder)
    assert kernels.lookup("k1") is None
    assert "k1" in caplog.text
    assert list(kernels.entries()) == []
    repaired = kernels.store("k1", library, {"second": True})
    assert repaired.manifest["second"] is True
    assert kernels.lookup("k1") == repaired


def test_a_library_that_changes_after_it_was_found_is_not_loaded(kernels: KernelCache, library: Path) -> None:
    entry = kernels.store("k1", library, {"entry": "f"})
    entry.library.write_bytes(b"\x7fELF another")
    with pytest.raises(CacheError, match="was changed since it was found"):
        load_entry(Kernel(entry.library, entry.manifest, True, dict), "cpu")


def test_libraries_are_loaded_from_a_private_folder_by_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tvm_ffi

    from ladder.runtime import library as loading

    seen = []

    def load(path: str) -> dict[str, object]:
        found = Path(path)
        assert found.read_bytes() == b"\x7fELF"
        seen.append((found.parent.parent, found.parent.stat().st_mode & 0o777, found.name))
        return {}

    monkeypatch.setattr(tvm_ffi, "load_module", load)
    with knobs.override(cache_dir=tmp_path / "cache"):
        loading.load_library(b"\x7fELF", "../x.so")
    digest = hashlib.sha256(b"\x7fELF").hexdigest()
    assert seen == [(tmp_path / "cache" / "tmp", 0o700, f"{digest}.so")]
    assert not list((tmp_path / "cache" / "tmp").iterdir())


@pytest.mark.parametrize("room", [True, False])
def test_libraries_are_loaded_where_the_caches_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    import tvm_ffi

    from ladder.runtime import library as loading

    def write(path: Path, data: bytes) -> None:
        if not room or tmp_path / "cache" in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_bytes(path, data)

    write_bytes = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr(tvm_ffi, "load_module", lambda path: Path(path).read_bytes())
    with knobs.override(cache_dir=tmp_path / "cache"):
        if room:
            assert loading.load_library(b"\x7fELF", "x.so") == b"\x7fELF"
            return
        with pytest.raises(ArtifactError, match=r"x\.so anywhere: No space left.*TMPDIR"):
            loading.load_library(b"\x7fELF", "x.so")


def test_libraries_are_loaded_where_the_caches_name_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tvm_ffi

    from ladder.runtime import library as loading

    monkeypatch.setattr(tvm_ffi, "load_module", lambda path: path.encode())
    with knobs.override(cache_dir=tmp_path / "\udcff"):
        assert loading.load_library(b"\x7fELF", "x.so").endswith(b".so")


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with knobs.override(cache_dir=tmp_path / "file"):
        for key in ("k1", "k2"):
            with KernelCache().building(key):
                assert build._keep(key, library, {}, {}).library.read_bytes() == library.read_bytes()
    (told,) = caplog.messages
    assert "LADDER_CACHE_DIR" in told


def test_unwritable_folder_is_a_readable_error(tmp_path: Path, library: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="LADDER_CACHE_DIR"):
        KernelCache(tmp_path / "file").store("k1", library, {})


def _child(code: str, *arguments: str) -> subprocess.Popen[str]:
    root = str(Path(cache.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )


FILL = """
    import sys
    from pathlib import Path
    from ladder.runtime.cache import KernelCache
    kernels = KernelCache(Path(sys.argv[1]))
    print("ready", flush=True)
    for number in range(60):
        kernels.store(f"k{number % 6}", Path(sys.argv[2]), {"writer": sys.argv[3]})
        assert number % 6 == 0 or kernels.lookup(f"k{number % 6}") is not None  # k0 is damaged on purpose
        if number % 20 == 19:
            (kernels.kernels / "k0" / "kernel.so").write_bytes(b"damage")
            kernels.store("k0", Path(sys.argv[2]), {"writer": sys.argv[3]})
"""


def test_two_processes_fill_one_cache(kernels: KernelCache, library: Path) -> None:
    children = [_child(FILL, str(kernels.root), str(library), writer) for writer in "ab"]
    assert [child.wait(60) for child in children] == [0, 0]
    for child in children:
        child.stdout.close()
    entries = list(kernels.entries())
    assert {entry.key for entry in entries} == {f"k{number}" for number in range(6)}
    assert all(entry.library.read_bytes() == library.read_bytes() for entry in entries)


HANG = """
    import shutil, sys, time
    from pathlib import Path
    from ladder.runtime import cache
    def half(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        print("writing", flush=True)
        time.sleep(60)
    shutil.copyfile = half
    cache.KernelCache(Path(sys.argv[1])).store("k1", Path(sys.argv[2]), {})
"""


def test_kill_in_the_middle_of_a_write_leaves_nothing_visible(kernels: KernelCache, library: Path) -> None:
    child = _child(HANG, str(kernels.root), str(library))
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    assert kernels.lookup("k1") is None
    assert list(kernels.entries()) == []
    leftovers = list(kernels.temporary.iterdir())
    assert len(leftovers) == 1
    old = time.time() - cache.STALE_SECONDS - 10
    os.utime(leftovers[0], (old, old))
    assert kernels.store("k1", library, {}).library.read_bytes() == library.read_bytes()
    assert not any(kernels.temporary.iterdir())


def test_a_full_disk_is_an_error_not_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM aborts where it cannot write."""
    usage = shutil.disk_usage("/")._replace(free=5 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    values = (0.0, 1.0, -1.0, 0.8125)  # of no other test, so that no kernel is at hand
    ttype = ladder.register_type(TType("disk_full", 2, lambda code, ops: ops.lookup(values, code)))
    operator = ladder.Matmul(N=3, K=7, weight=ttype, activation="float16")
    packed = operator.pack(ladder.quantize(torch.ones(3, 7), ttype))
    with knobs.override(cache=False), pytest.raises(CompilerError, match=r"has 5 KiB left.*TMPDIR"):
        operator(torch.ones(1, 7).half(), packed)


def test_what_the_system_refuses_a_build_is_a_compiler_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that callers that can do without the kernel do."""

    def refuse(path: Path) -> Never:
        raise OSError(errno.ENOSPC, "No space left on device")

    job = Job({"kind": "refused"}, Identity.of(None, get_device("cpu")), get_device("cpu"), refuse)
    with pytest.raises(CompilerError, match=r"No space left on device.*TMPDIR"):
        find_or_build([job])


def test_a_limit_of_file_sizes_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (4096, 4096))
    where = get_device("cpu")
    job = Job(
        {"kind": "limited"}, Identity.of(None, where), where, lambda folder: pytest.fail("it was built")
    )
    with pytest.raises(CompilerError, match=r"limited to 4 KiB.*ulimit"):
        find_or_build([job])


def test_compilers_are_asked_once_for_as_long_as_their_program_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's file does not change with what it calls; other programs and forgotten notes ask anew."""
    program, asked = tmp_path / "nvcc", []
    toolchain = SimpleNamespace(
        compiler_file=lambda: program,
        compiler_identity=lambda: asked.append(1) or f"release {len(asked)}",
    )
    monkeypatch.setitem(sys.modules, "told_toolchain", toolchain)
    monkeypatch.setitem(cache.TOOLCHAINS, "cuda", "told_toolchain")

    def told(clock: float) -> str:
        monkeypatch.setattr(cache.time, "time", lambda: clock)
        cache._compiler_identity.cache_clear()  # as in another process
        return cache._compiler(get_device("cuda/sm_90a"))

    with knobs.override(cache_dir=tmp_path / "cache"):
        program.write_bytes(b"\x7fELF one")
        later = program.stat().st_ctime + 9
        assert [told(later - 9), told(later - 9)] == ["release 1", "release 2"]  # it may be written again
        assert [told(later), told(later)] == ["release 3", "release 3"]
        program.write_bytes(b"\x7fELF two")
        assert [told(later), told(later)] == ["release 4", "release 4"]
        with knobs.override(cache=False):
            assert told(later) == "release 5"
        KernelCache(tmp_path / "cache").clear()
        assert told(later) == "release 6"
        program.write_text("#!/bin/sh")
        assert [told(later), told(later)] == ["release 7", "release 8"]
    cache._compiler_identity.cache_clear()
