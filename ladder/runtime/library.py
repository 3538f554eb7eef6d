"""Load kernels with TVM's runtime alone: no compiler, and no ``import tvm``.

A built kernel needs ``tvm_ffi``, ``libtvm_runtime.so`` and, on NVIDIA GPUs,
``libtvm_runtime_cuda.so`` (on AMD's, `ladder.runtime.hip` does what TVM's wheel lacks). The two
libraries are taken from `LADDER_RUNTIME_DIR` or from the installed TVM distribution, whose Python
package stays unimported.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ladder import knobs
from ladder.forks import renewed
from ladder.installation import cache_root, find_library
from ladder.runtime import hip, launch, tensor_map, threads, workspace
from tile_types.errors import ArtifactError, MissingToolError

RUNTIME = "libtvm_runtime.so"
RUNTIME_FOR = {"cuda": "libtvm_runtime_cuda.so"}
"""Additional library by device family."""

ELF = b"\x7fELF"
"""How the shared libraries of Linux begin."""

_lock = renewed(threading.Lock())
_loaded: dict[str, ctypes.CDLL] = {}


def _open(path: Path) -> None:
    """Load a library so that its symbols are visible to kernels; once per process."""
    if path.name in _loaded:
        return
    try:
        _loaded[path.name] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise MissingToolError(
            f"cannot load {path.name}: {error}; `ladder doctor` lists what this machine lacks"
        ) from error


def load_foreign_interface() -> None:
    """Import ``tvm_ffi``, which calls kernels; ahead of time, it takes half of a warm first call.

    Raises MissingToolError if it, or torch, is not installed.
    """
    try:
        import torch  # noqa: F401  torch brings the CUDA runtime library
        import tvm_ffi  # noqa: F401
    except ImportError as error:
        raise MissingToolError(
            f"running kernels needs {error.name or 'tvm_ffi'}: install apache-tvm-ffi and torch"
        ) from error


def load_runtime(family: str = "cpu") -> None:
    """Load what kernels of a device family need; later calls return at once.

    family: ``"cpu"``, ``"cuda"`` or ``"rocm"``.
    Raises MissingToolError if ``tvm_ffi`` or a library is not there, or cannot be loaded (no driver, no HIP).
    """
    needed = RUNTIME_FOR.get(family, RUNTIME)
    if needed in _loaded and family != "rocm":
        return
    with _lock:
        load_foreign_interface()
        if RUNTIME not in _loaded:
            _prepare_threads()
            _open(find_library(RUNTIME))
            threads.runtime_is_loaded(launch.load(_loaded[RUNTIME]))
            knobs.on_override(apply_threads)
        if family == "rocm":
            hip.register()
        if needed != RUNTIME:
            _open(find_library(needed))
            workspace.register()
            tensor_map.register()


def load_module(path: Path, family: str = "cpu") -> Any:
    """Load a kernel library from a file; see `load_library`."""
    return load_library(path.read_bytes(), path.name, family)


def load_library(data: bytes, title: str, family: str = "cpu") -> Any:
    """Load a kernel library from its bytes, which the caller has checked.

    The system's loader reads files only: it gets one in a folder that only this user can enter, named by the
    digest of the bytes, which is gone afterwards.

    data: The ``.so`` that the compiler exported.
    title: For messages.
    family: Device family it was built for.
    Returns: ``tvm_ffi.Module``; ``module[name]`` is an entry.
    Raises ArtifactError if the system's loader refuses the library, or there is no room for it.
    """
    if not data.startswith(ELF):
        raise ArtifactError(f"cannot load the kernel library {title}: it is none; build it again")
    load_runtime(family)
    import tvm_ffi

    with contextlib.ExitStack() as folders:
        try:
            path = _private_file(data, folders)
        except OSError as error:
            raise ArtifactError(
                f"cannot write the kernel library {title} anywhere: {error.strerror or error}; free some"
                " room, or set TMPDIR to a folder that you can write"
            ) from error
        try:
            module = tvm_ffi.load_module(str(path))
            threads.library_is_loaded(path)
        except RuntimeError as error:
            raise ArtifactError(f"cannot load the kernel library {title}: {error}; build it again") from error
    return module


def entry_of(module: Any, name: str, family: str) -> Callable[..., None]:
    """Return an entry of a kernel library.

    Where there are several GPUs a call makes that of its first tensor the current one, and the one before
    current again: entries leave theirs behind, and may ask for memory before they have changed to it.

    family: Device family that the library was built for.
    """
    import torch

    entry = module[name]
    if family == "cpu" or torch.cuda.device_count() < 2:
        return entry  # type: ignore[no-any-return]

    def call(*arguments: Any) -> None:
        where = next((x.get_device() for x in arguments if isinstance(x, torch.Tensor)), None)
        with torch.cuda.device(where):
            entry(*arguments)

    return call


def _private_file(data: bytes, folders: contextlib.ExitStack) -> Path:
    """Write a new folder's only file, below the cache or, where that is off or takes none, the system's."""
    name = f"{hashlib.sha256(data).hexdigest()}.so"
    if knobs.settings.cache:
        with contextlib.suppress(OSError, UnicodeEncodeError):
            parent = cache_root() / "tmp"
            str(parent).encode()  # the loader takes names that are text
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept = tempfile.TemporaryDirectory(prefix=f"{os.getpid()}-", dir=parent)
            return _written(Path(folders.enter_context(kept)) / name, data)
    return _written(Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="ladder-"))) / name, data)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def thread_count() -> int:
    """Return how many threads a CPU kernel uses: LADDER_NUM_THREADS, else torch's number; inline 1."""
    if threads.runs_inline():
        return 1
    return knobs.settings.num_threads or threads.torch_threads()


def alone(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that computes in the thread that calls it: itself where kernels have one thread."""
    return entry if thread_count() == 1 else threads.alone(entry, find_library(RUNTIME))


def _prepare_threads() -> None:
    """Tell the runtime's thread pool its size before a thread of ours first uses it."""
    threads.prepare_environment(thread_count())


def apply_threads() -> None:
    """Let kernels use `thread_count` threads from now on; does nothing before `load_runtime`."""
    if RUNTIME not in _loaded:
        return
    import tvm_ffi

    count = thread_count()
    os.environ["TVM_NUM_THREADS"] = str(count)
    threads.share_threads()
    if not threads.uses_openmp() and tvm_ffi.get_global_func("runtime.NumThreads")() != count:
        threads.start_workers(count)
