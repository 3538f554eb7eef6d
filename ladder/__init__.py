"""Ladder: a compiler of low-precision tensor programs, from one matrix product to whole models.

This module is all that users need: `Matmul` and `Linear` for products, `quantize_` and `compile` for
models. It is lazy: a name is imported on first use, and ``import ladder`` loads neither torch nor TVM.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ladder.garbage import uncollected
from ladder.interrupts import import_whole

if TYPE_CHECKING:
    from ladder import knobs as knobs
    from ladder.api.cache import KVCache as KVCache
    from ladder.api.conv import Conv as Conv
    from ladder.api.experts import GroupedMatmul as GroupedMatmul
    from ladder.api.expression import compile_expression as compile_expression
    from ladder.api.linear import Linear as Linear
    from ladder.api.matmul import Matmul as Matmul
    from ladder.api.model import compile as compile
    from ladder.api.quantization import quantize_tokens as quantize_tokens
    from ladder.api.rules import quantization as quantization
    from ladder.api.rules import quantize as quantize
    from ladder.api.rules import quantize_ as quantize_
    from ladder.api.superoptimize import superoptimize as superoptimize
    from ladder.formats.checkpoint import Checkpoint as Checkpoint
    from ladder.formats.checkpoint import load_checkpoint as load_checkpoint
    from ladder.ir import compute as compute
    from ladder.ir import tensor as tensor
    from ladder.ir.gemm import Gemm as Gemm
    from ladder.runtime.artifact import Artifact as Artifact
    from ladder.runtime.cache import KernelCache as KernelCache
    from ladder.runtime.loading import load as load
    from ladder.runtime.model.program import ImportRefused as ImportRefused
    from ladder.runtime.packed import PackedWeight as PackedWeight
    from targets import get_device as get_device
    from targets import list_devices as list_devices
    from tile_types import Metadata as Metadata
    from tile_types import QuantizedTensor as QuantizedTensor
    from tile_types import Tile as Tile
    from tile_types import TType as TType
    from tile_types import get_type as get_type
    from tile_types import group_scaled as group_scaled
    from tile_types import list_types as list_types
    from tile_types import register_type as register_type
    from tile_types.errors import AliasingError as AliasingError
    from tile_types.errors import ArtifactError as ArtifactError
    from tile_types.errors import CacheError as CacheError
    from tile_types.errors import CheckpointError as CheckpointError
    from tile_types.errors import CompilerError as CompilerError
    from tile_types.errors import ConversionError as ConversionError
    from tile_types.errors import DeviceError as DeviceError
    from tile_types.errors import DTypeError as DTypeError
    from tile_types.errors import LadderError as LadderError
    from tile_types.errors import MissingToolError as MissingToolError
    from tile_types.errors import OutOfRangeError as OutOfRangeError
    from tile_types.errors import ParseError as ParseError
    from tile_types.errors import ScheduleError as ScheduleError
    from tile_types.errors import ShapeError as ShapeError
    from tile_types.errors import TypeValuesError as TypeValuesError
    from tile_types.errors import UnknownNameError as UnknownNameError
    from tile_types.errors import ValueRangeError as ValueRangeError
    from tile_types.errors import VerificationError as VerificationError

_HOMES = {
    "ladder.api.experts": ("GroupedMatmul",),
    "ladder.api.cache": ("KVCache",),
    "ladder.api.conv": ("Conv",),
    "ladder.api.expression": ("compile_expression",),
    "ladder.api.linear": ("Linear",),
    "ladder.api.matmul": ("Matmul",),
    "ladder.api.model": ("compile",),
    "ladder.api.quantization": ("quantize_tokens",),
    "ladder.api.rules": ("quantization", "quantize", "quantize_"),
    "ladder.api.superoptimize": ("superoptimize",),
    "ladder.formats.checkpoint": ("Checkpoint", "load_checkpoint"),
    "ladder.ir": ("compute", "tensor"),
    "ladder.ir.gemm": ("Gemm",),
    "ladder.runtime.artifact": ("Artifact",),
    "ladder.runtime.cache": ("KernelCache",),
    "ladder.runtime.loading": ("load",),
    "ladder.runtime.model.program": ("ImportRefused",),
    "ladder.runtime.packed": ("PackedWeight",),
    "targets": ("get_device", "list_devices"),
    "tile_types": (
        *("Metadata", "QuantizedTensor", "TType", "Tile"),
        *("get_type", "group_scaled", "list_types", "register_type"),
    ),
    "tile_types.errors": (
        *("AliasingError", "ArtifactError", "CacheError", "CheckpointError", "CompilerError"),
        *("ConversionError", "DTypeError", "DeviceError", "LadderError", "MissingToolError"),
        *("OutOfRangeError", "ParseError", "ScheduleError", "ShapeError", "TypeValuesError"),
        *("UnknownNameError", "ValueRangeError", "VerificationError"),
    ),
}
"""Module -> the public names that live there."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

_MODULES = ("knobs", "simulate")

__all__ = [*_MODULES, *_HOME_OF]

SIBLINGS = ("tile_types", "targets", "schedules")
"""Top-level packages of this distribution whose names another package might take."""


def _origin(name: str) -> Path | None:
    """Return the file from which ``import name`` is or would be served."""
    module = sys.modules.get(name)
    if isinstance(module, ModuleType) and module.__file__:
        return Path(module.__file__).resolve()
    spec = importlib.machinery.PathFinder.find_spec(name)
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _check_siblings() -> None:
    """Raise if another module shadows one of our packages.

    Raises
    ------
    ImportError
        Says which file shadows which package, and how to fix it.
    """
    home = Path(__file__).resolve().parents[1]
    for name in SIBLINGS:
        found = _origin(name)
        if found == home / name / "__init__.py":
            continue
        shadow = f"{found} would be imported in its place" if found else "it is not there"
        raise ImportError(
            f"ladder needs its own package {name!r} in {home}, but {shadow}."
            f" Rename your {name!r} module, or move its folder behind {home} on sys.path;"
            " if the package is missing, install ladder-compiler again."
        )


_check_siblings()
import_whole()


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES and name not in _HOME_OF:
        raise AttributeError(f"module 'ladder' has no attribute {name!r}")
    with uncollected():
        if name in _MODULES:
            return importlib.import_module(f"ladder.{name}")
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
