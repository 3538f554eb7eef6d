"""A call builds the kernel that it needs and waits for no other; those of GPUs follow in another process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from contextvars import copy_context
from pathlib import Path

import pytest
import torch

import ladder
from ladder import knobs
from ladder.api.grouped_linear import GroupedLinear
from ladder.integrations import engine_layers
from ladder.integrations.engine_layers import build_ahead
from ladder.runtime import ahead
from ladder.runtime import compile as compiling
from ladder.runtime.build import Job, Kernel, missing
from ladder.runtime.compile import Request, jobs_of
from ladder.runtime.kernel import Later
from schedules.schedule import Plan

SECONDS = 120


def product() -> tuple[ladder.Matmul, object, torch.Tensor]:
    weight = ladder.quantize(torch.randn(48, 72), "int4", group_size=24)
    op = ladder.Matmul(48, 72, "int4", group_size=24)
    return op, op.pack(weight), weight.dequantize("float64").T


@pytest.fixture
def asked(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that takes how many kernels are asked for at once."""
    build, found = compiling.find_or_build, list[int]()

    def counted(jobs: Sequence[Job]) -> list[Kernel]:
        found.append(len(jobs))
        return build(jobs)

    monkeypatch.setattr(compiling, "find_or_build", counted)
    return found


def test_a_call_builds_the_kernel_of_its_rows(asked: list[int]) -> None:
    op, packed, exact = product()
    for m, builds in ((0, 0), (1, 1), (1, 1), (300, 2), (300, 2)):
        x = torch.randn(m, 72).half()
        assert torch.allclose(op(x, packed).double(), x.double() @ exact, rtol=1e-2, atol=1e-2)
        assert asked == [1] * builds
    kernels = op.compiled_for(torch.device("cpu"))
    for m in (1, 300):  # later calls go past what waited for it
        assert not isinstance(kernels.entry_for(m), Later)
    assert kernels._few[1] is kernels.entry_for(1)


def test_threads_that_call_at_once_build_a_kernel_once(
    asked: list[int], plain_compiler: list[object]
) -> None:
    op, packed, exact = product()
    x, found = torch.randn(3, 72).half(), list[torch.Tensor]()

    def call() -> None:
        found.append(op(x, packed))

    threads = [threading.Thread(target=copy_context().run, args=(call,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(plain_compiler) == 1
    assert len(found) == 6
    for y in found:
        assert torch.allclose(y.double(), x.double() @ exact, rtol=1e-2, atol=1e-2)


def test_a_call_that_cannot_build_says_so_and_a_later_one_can(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, packed, exact = product()
    x = torch.randn(2, 72).half()
    with monkeypatch.context() as broken:
        broken.setattr("ladder.lower.build.build", _fails)
        with pytest.raises(ladder.CompilerError, match="no room"):
            op(x, packed)
    assert torch.allclose(op(x, packed).double(), x.double() @ exact, rtol=1e-2, atol=1e-2)


def _fails(*_: object) -> None:
    raise ladder.CompilerError("no room")


@pytest.mark.parametrize("experts", [0, 2])
def test_layers_of_engines_have_the_kernels_of_all_rows(asked: list[int], experts: int) -> None:
    """Nobody who is served waits for one."""
    weight = ladder.quantize(torch.randn(max(experts, 1) * 48, 72), "int4", group_size=24)
    if experts:
        layer = GroupedLinear.from_stack(weight, experts, dtype=torch.float16)
    else:
        layer = ladder.Linear.from_quantized(weight, None, dtype=torch.float16)
    engine_layers._build.cache_clear()
    where = torch.device("cpu")
    assert build_ahead(layer, where) is layer
    built = list(asked)
    assert built[0] > 1
    build_ahead(layer, where)  # of another layer
    assert asked == built
    for m in (1, 300):
        ends = [torch.tensor([0, 1, m], dtype=torch.int32)] if experts else []
        layer(torch.randn(m, 72).half(), *ends)
    assert max(asked[len(built) :]) == 1
    assert not missing(jobs_of(Request(ladder.Matmul(48, 72, "int4", group_size=24).gemm, "cpu"))[1])


PROGRAM = """
    import subprocess, sys, time
    from ladder.runtime import ahead
    from ladder.runtime.build import missing
    from ladder.runtime.compile import Request, jobs_of
    start = subprocess.Popen
    as_urgent = "from ladder.runtime import ahead; ahead.NICE = 0; ahead.main()"
    subprocess.Popen = lambda command, **options: start([command[0], "-c", as_urgent], **options)
    text = sys.argv[1]
    ahead.build(["no request", text])
    (job,) = jobs_of(Request.parse(text))[1]
    end = time.monotonic() + 100
    while missing([job]) and time.monotonic() < end:
        time.sleep(0.1)
    print(len(missing([job])), ahead._builders[0].pid)
"""


@pytest.mark.costly
def test_a_process_builds_what_is_asked_for_and_ends_with_its_parent(tmp_path: Path) -> None:
    request = Request(ladder.Matmul(48, 72, "int4", group_size=24).gemm, "cpu")
    whole = compiling.plan_for(request)
    text = Request(request.gemm, "cpu", Plan(whole.entries[-1:])).text
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LADDER_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    count, pid = map(int, found.stdout.split())
    assert count == 0
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_is_asked_of_a_process_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ahead, "_builders", [])
    monkeypatch.setattr(ahead.spawn, "get_executable", lambda: str(tmp_path / "none"))
    ahead.build(["request"])
    assert ahead._builders == []
    for setting in ({"ahead": False}, {"cache": False}):
        monkeypatch.setattr(ahead.subprocess, "Popen", _fails)
        with knobs.override(**setting):
            ahead.build(["request"])


@pytest.mark.parametrize("program", ["true", "sleep 100"])
def test_a_process_that_ended_or_does_not_read_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    popen = subprocess.Popen

    def start(command: object, **options: object) -> subprocess.Popen[bytes]:
        return popen(program.split(), **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(ahead, "_builders", [])
    monkeypatch.setattr(ahead.subprocess, "Popen", start)
    begin = time.monotonic()
    for _ in range(50):
        ahead.build(["request" * 400])
    assert time.monotonic() - begin < 10
    (process,) = ahead._builders
    ahead._end(process, os.getpid())
    assert process.returncode is not None
