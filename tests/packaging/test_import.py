"""Importing is cheap, lazy, and says so when another package is in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "tvm", "tvm_ffi", "onnx", "z3", "typer", "rich")


def python(code: str, *, folder: Path = ROOT, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_import_takes_less_than_a_third_of_a_second() -> None:
    """Processor time, so that a busy machine does not count; no thread shares the work."""
    code = "import time; start = time.process_time(); import ladder; print(time.process_time() - start)"
    seconds = min(float(python(code).stdout) for _ in range(3))
    assert seconds < 0.3


@pytest.mark.parametrize("package", ["ladder", "tile_types", "targets", "schedules", "ladder.cli"])
def test_import_loads_nothing_heavy(package: str) -> None:
    done = python(f"import sys, {package}; print([m for m in {HEAVY} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_first_use_of_a_name_collects_no_garbage() -> None:
    """A collection looks at all of torch: 50 ms of a process's first call, a third of the import."""
    code = """
import gc, torch, ladder
found = []
gc.callbacks.append(lambda phase, info: found.append(phase))
ladder.Matmul
print(found.count("start"), gc.isenabled())
"""
    done = python(code)
    count, enabled = done.stdout.split()
    assert int(count) < 3, done.stdout + done.stderr  # dozens where they are made
    assert enabled == "True"


def test_what_runs_exported_models_needs_no_compiler() -> None:
    loaded = "[m for m in ('tvm', 'onnx') if m in sys.modules]"
    done = python(f"import sys, ladder.runtime.model.saved; print({loaded})")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_quantizer_that_is_in_the_cache_needs_no_compiler() -> None:
    """A first call of a new process takes tens of milliseconds then, importing the compiler seconds."""
    code = """
import sys
from ladder.runtime import tokens
from targets import get_device

asked = []
tokens.find_or_build = lambda jobs: asked.extend(jobs) or [None]
tokens.warn_of_spills = lambda kernels, device: kernels
tokens.gpu_kernel("float16", "int8", 0, 4096, get_device("cuda/sm_90a"))
print(len(asked), "tvm" in sys.modules)
"""
    done = python(code)
    assert done.stdout.split() == ["1", "False"], done.stdout + done.stderr


def test_every_public_name_resolves() -> None:
    done = python("import ladder; print(sorted(n for n in ladder.__all__ if getattr(ladder, n) is None))")
    assert done.stdout.strip() == "[]", done.stderr
    assert python("import ladder; set(ladder.__all__) <= set(dir(ladder)) or exit(3)").returncode == 0


def test_unknown_public_name_is_an_attribute_error() -> None:
    done = python("import ladder; ladder.Matmull")
    assert "AttributeError" in done.stderr
    assert "Matmull" in done.stderr


@pytest.mark.parametrize("name", ["targets", "schedules", "tile_types"])
def test_shadowed_package_is_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    """A user's own ``targets.py`` beside a script hides ours: the error says which file does."""
    (tmp_path / f"{name}.py").write_text("answer = 42\n")
    done = python("import ladder; ladder.quantize", folder=tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert "ImportError" in message
    assert str(tmp_path) in message
    assert repr(name) in message
    assert "rename" in message.lower()


INTERRUPTED = """
import signal, sys, time
import ladder

def interrupt(event, given):
    if event == "import" and given[0] == "tvm.tirx" and not interrupted:
        interrupted.append(1)
        signal.raise_signal(signal.SIGINT)

interrupted = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what runs behind
sys.addaudithook(interrupt)
try:
    import tvm
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
import tvm.tirx
print(tvm.runtime.__name__, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_an_interrupt_while_tvm_is_imported_takes_effect_behind_the_import() -> None:
    """What is left in the middle of its import cannot be imported again."""
    done = python(INTERRUPTED, path=str(ROOT))
    assert done.stdout.split() == ["interrupted", "tvm.runtime", "True"], done.stderr
