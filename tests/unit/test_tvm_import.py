"""TVM is imported without errors of its libraries, whose first reads the symbols of all of torch."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import numpy as np
import pytest

from ladder.lower.tvm_lock import tvm_lock
from tile_types.arrays import is_torch

PROGRAM = """
import contextlib, json, sys, time
import torch
from ladder.api.problem import gemm_for
from ladder.lower import build
from ladder.lower.tvm_lock import tvm_lock
from schedules.schedule import GpuSchedule
from targets import get_device

def attributes():
    from tvm.ir import Op
    found = {}
    for name in sorted(map(str, Op.list_op_names())):
        found[name] = str(Op.get(name).get_attr("TScriptPrinterName"))
    return found

def seconds_of_an_error():
    start = time.thread_time()
    try:
        tvm.ir.Op.get("no.such.operator")
    except AttributeError as error:
        said = str(error)
    return time.thread_time() - start, said

with tvm_lock() if sys.argv[1] == "quiet" else contextlib.nullcontext():
    import tvm
    gemm = gemm_for(256, 512, "int4", "float16", group_size=128)
    script = build.emit(gemm, get_device("cuda/sm_90a"), GpuSchedule("mma", 16), "kernel").script()
names = attributes()
(first, said), (second, _) = seconds_of_an_error(), seconds_of_an_error()
disco = "tvm.runtime.disco" in sys.modules
print(json.dumps([first / second, [said, script, names, disco, type(tvm.ir._ffi_api.GetOp).__name__]]))
"""


def test_quiet_import_meets_no_error_and_leaves_the_same() -> None:
    found = {}
    for how in ("plain", "quiet"):
        command = [sys.executable, "-c", PROGRAM, how]
        found[how] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    (plain, left), (quiet, same) = found["plain"], found["quiet"]
    assert same == left
    assert plain < 20 < quiet  # only the first error of a process reads symbols: it was none of the import's


def test_what_is_wrong_after_the_import_is_an_error_as_ever() -> None:
    tvm = pytest.importorskip("tvm")
    with tvm_lock(), pytest.raises(AttributeError, match="Operator no_such_operator"):
        tvm.ir.Op.get("no_such_operator")


def test_a_plan_is_chosen_while_a_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM's libraries import torch: what the plan computes with numpy goes on."""
    begun = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", begun)
    assert not is_torch(np.zeros(1))
    monkeypatch.setattr(begun, "Tensor", np.ndarray, raising=False)
    assert is_torch(np.zeros(1))
