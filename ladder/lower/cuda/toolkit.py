"""Where NVIDIA's tools are: in packages of pip (the extra ``cuda``), else in a toolkit on PATH."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ladder import knobs
from tile_types.errors import MissingToolError

CUDA_RUNTIME = "libcudart.so.13"
"""Library that the TVM wheel's CUDA runtime links against."""

PACKAGED = "cu13"
"""Folder of the packages of CUDA 13 within ``nvidia`` in site-packages."""

LIBRARY_FOLDERS = ("lib", "lib64", "targets/x86_64-linux/lib")
"""Where packages and toolkits keep their libraries."""

INCLUDE_FOLDERS = ("include", "targets/x86_64-linux/include")
"""Where they keep their headers."""

REMEDY = "pip install 'ladder-compiler[cuda]' brings it, as does NVIDIA's CUDA toolkit 13.0"


def package_folders() -> list[Path]:
    """Return the folders of NVIDIA's packages: those of the extra ``cuda``, and those that torch brings."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    return [Path(place) / PACKAGED for place in places or ()]


def packaged() -> Path | None:
    """Return the folder of the packages that has a compiler, and the program that it calls beside it."""
    parts = "bin/nvcc", "nvvm/bin/cicc"
    return next((home for home in package_folders() if all((home / part).is_file() for part in parts)), None)


def headers_elsewhere(compiler: Path) -> list[Path]:
    """Return the folders of headers that a compiler of the packages does not find itself.

    pip installs nothing that ``--system-site-packages`` shows: the runtime's headers then lie beside torch.
    """
    home, folders = compiler.parents[1], package_folders()
    others = (folder / "include" for folder in folders if folder != home) if home in folders else ()
    return [folder for folder in others if folder.is_dir()]


def find_tool(name: str) -> Path | None:
    """Return a program of the toolkit such as ``ptxas``: that of the packages, else the first on PATH."""
    homes = (packaged(),) if name == "nvcc" else (packaged(), *package_folders())
    programs = (home / "bin" / name for home in homes if home is not None)
    found = next(filter(Path.is_file, programs), None) or shutil.which(name)
    return Path(found) if found else None


def nvcc() -> Path:
    """Return the CUDA compiler: ``LADDER_NVCC``, else that of the packages, else the first on PATH.

    Raises MissingToolError if there is none.
    """
    chosen = knobs.settings.nvcc
    found = find_tool("nvcc") if chosen is None else chosen
    if found is None or not found.is_file():
        where = (
            "nvcc is not on PATH, and torch brings no NVRTC"
            if chosen is None
            else f"LADDER_NVCC={chosen} does not exist"
        )
        raise MissingToolError(f"cannot compile for CUDA: {where}; {REMEDY}, or set LADDER_NVCC")
    return found


def homes() -> list[Path]:
    """Return the folders of toolkits, the compiler's first."""
    found = package_folders()
    with suppress(MissingToolError):
        found.insert(0, nvcc().resolve().parents[1])
    return list(dict.fromkeys(found))


def runtime_libraries() -> Iterator[str]:
    """Yield where the CUDA runtime library may be: with the compiler, or where the system looks."""
    for home in homes():
        yield from (str(home / folder / CUDA_RUNTIME) for folder in LIBRARY_FOLDERS)
    yield CUDA_RUNTIME
