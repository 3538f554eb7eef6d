"""What TVM's import waits for is done by a thread: the import is shorter then, and errors say the same."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from ladder.runtime.compiler_start import compiler_beside
from tile_types.arrays import is_torch

PROGRAM = """
import contextlib, json, sys, threading, time, traceback
import torch
from ladder.runtime.compiler_start import compiler_beside

with compiler_beside() if sys.argv[1] == "beside" else contextlib.nullcontext():
    assert "tvm" not in sys.modules
assert threading.active_count() == 1
start = time.thread_time()
import tvm
taken = time.thread_time() - start
try:
    tvm.ir.Op.get("no.such.operator")
except AttributeError as error:
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    print(json.dumps([taken, [str(error), *frames]]))
"""


def test_import_is_shorter_and_errors_are_the_same() -> None:
    found = {}
    for how in ("alone", "beside"):
        command = [sys.executable, "-c", PROGRAM, how]
        found[how] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    (alone, error), (beside, same) = found["alone"], found["beside"]
    assert error == same
    assert any("Op::Get" in frame for frame in error)  # a function of libtvm_compiler.so
    assert beside < 0.75 * alone


def test_a_plan_is_chosen_while_a_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM's libraries import torch: what the plan computes with numpy goes on."""
    begun = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", begun)
    assert not is_torch(np.zeros(1))
    monkeypatch.setattr(begun, "Tensor", np.ndarray, raising=False)
    assert is_torch(np.zeros(1))


def test_nothing_is_done_where_tvm_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tvm")
    monkeypatch.setattr(threading, "Thread", None)
    with compiler_beside():
        pass
