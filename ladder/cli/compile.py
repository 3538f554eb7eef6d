"""The command `ladder compile`: a whole model to one file that needs neither its source nor a compiler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from ladder.cli.console import Progress, silent
from ladder.cli.model_report import PYTHON, place_of, placed
from ladder.runtime.model.saved import save_model
from ladder.runtime.model.whole import WholeModel
from targets import TileDevice
from tile_types.errors import DeviceError, ParseError
from tile_types.files import require_writable


def run_compile(
    target: str, output: Path | None, device: str = "", step: Progress = silent
) -> dict[str, Any]:
    """Compile a model for a device of this machine and write it.

    target: Path of an ONNX model, or ``python:module:function`` as for `ladder report`.
    output: The file; by default the model's name with ``.ladder``, in the current folder.
    device: Name of a target; by default that of a function's arguments, else this machine's CPU.
    Returns: JSON-able: ``path``, ``bytes``, ``device``, ``steps`` by kind, ``kernels`` of ours, ``seconds``.
    Raises LadderError if the model cannot be read, compiled or written.
    """
    start = time.perf_counter()
    path = output or Path(f"{Path(target.rpartition(':')[2]).stem}.ladder")
    require_writable(path)
    step(f"compiling {target}")
    chosen, model = compiled(target, device)
    step("writing")
    save_model(model, path)
    kinds = [part.part.kind for part in model.steps.steps]
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "device": chosen,
        "steps": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "kernels": len(model.libraries or {}),
        "seconds": round(time.perf_counter() - start, 2),
    }


def compiled(target: str, device: str) -> tuple[str, WholeModel]:
    """Return the device's name and the compiled model."""
    if target.startswith(PYTHON):
        from ladder.api.freeze import freeze_for_file

        chosen, where, model, arguments = placed(target, device)
        _require_here(chosen, where)
        return chosen.name, freeze_for_file(model, arguments, {}).whole()
    if Path(target).suffix != ".onnx":
        raise ParseError(f"{target!r} is no ONNX model (.onnx), and no {PYTHON}module:function")
    from ladder.api.onnx_model import OnnxModel

    chosen, where = place_of(device)
    return chosen.name, OnnxModel(target).whole(_require_here(chosen, where))


def _require_here(chosen: TileDevice, where: torch.device | None) -> torch.device:
    """Return where a target is, or raise."""
    if where is None:
        raise DeviceError(
            f"{chosen.name} is not here: models are compiled where they run, and copied as files"
        )
    return where


def as_fields(found: dict[str, Any]) -> dict[str, str]:
    """Return what was done as named lines."""
    steps = ", ".join(f"{count} {kind}" for kind, count in found["steps"].items())
    return {
        "file": f"{found['path']}, {found['bytes'] / 1e6:.2f} MB",
        "device": found["device"],
        "steps": f"{steps}; {found['kernels']} kernels of ours",
        "time": f"{found['seconds']:.1f} s",
    }
