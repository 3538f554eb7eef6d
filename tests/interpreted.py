"""Plans whose chains are executed as Python, as TVM's passes leave them (`tests/simulate/loops.py`).

No compiler runs, so that thousands of programs can be tried; every access is checked against its tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm_ffi
from tvm.tirx.buffer import is_buffer_var

from ladder.lower.passes import as_it_runs
from tests.bounds import unproven

sys.path.append(str(Path(__file__).parent / "simulate"))
from loops import translate


def interpret_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans that are made from now on execute their chains as Python."""
    monkeypatch.setenv("LADDER_STRICT", "1")
    monkeypatch.setattr("ladder.lower.build.build_function", _lowered)
    monkeypatch.setattr("ladder.runtime.model.build.attempt", _kernels)
    monkeypatch.setattr("ladder.runtime.model.build.all_built", list)
    monkeypatch.setattr("ladder.runtime.model.build.load_entry", lambda kernel, family: kernel.call)


def _lowered(emitter: Any, name: str, device: Any, folder: object) -> Any:
    """Take the place of what compiles a function: prove its bounds, unless calls are checked for sizes."""
    function = emitter(name)
    is_open = any(not is_buffer_var(parameter) for parameter in function.params)
    outside = [] if is_open else unproven(function)
    assert not outside, str(outside[0])
    call = _entry(as_it_runs(function, device.tvm_target))
    return SimpleNamespace(entry=name, call=call, library=Path(), manifest={}, spilled=0)


def _kernels(jobs: Sequence[Any]) -> list[Any]:
    return [job.make(Path()) for job in jobs]


def _entry(function: Any) -> Any:
    kernel = translate(function)

    def call(*values: Any) -> None:
        given = (torch.from_dlpack(v) if isinstance(v, tvm_ffi.Tensor) else v for v in values)
        kernel(*(_array(value) if isinstance(value, torch.Tensor) else value for value in given))

    return call


def _array(tensor: torch.Tensor) -> Any:
    import ml_dtypes

    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()
