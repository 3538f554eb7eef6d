"""Kernels run on the threads that torch's operators run on, and wait for none that has lost its core."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ladder
from ladder import knobs
from ladder.runtime import launch, library, snapshot, threads
from ladder.runtime.cache import is_whole

BODY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NUMBER = ctypes.CFUNCTYPE(ctypes.c_int)
OTHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
ERROR = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


def program(text: str, **environment: str) -> str:
    """Run a program of two threads; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


SHARED = """
    import pathlib, torch, ladder
    threads = lambda: {entry.name for entry in pathlib.Path("/proc/self/task").iterdir()}
    weight = ladder.quantize(torch.randn(256, 256), "int4", group_size=64)
    op = ladder.Matmul(N=256, K=256, weight="int4", activation="bfloat16", group_size=64)
    packed, x, large = op.pack(weight), torch.randn(64, 256).bfloat16(), torch.randn(1000, 1000)
    large.exp()
    with ladder.knobs.override(num_threads=1):
        op(x, packed)
    before = threads()
    for _ in range(5):
        op(x, packed)
        large.exp()
    print(len(threads() - before))
"""


def test_kernels_start_no_threads_beside_those_of_torch() -> None:
    """Two pools on two cores take them from each other: some milliseconds at each change between them."""
    assert program(SHARED) == "0"


class Stand:
    """A launch whose OpenMP library is this object: one caller, and a worker that comes late or not at all.

    together: Whether the worker comes at once, on the caller's own core.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.regions, self.late, self.errors, self.own, self.together = 0, 0.0, list[bytes](), 0, False
        self.seen, self.fails, self.seconds = list[int](), False, 0.0
        self.kept = [PARALLEL(self.parallel), NUMBER(lambda: self.own), NUMBER(lambda: 0)]
        self.kept += [NUMBER(lambda: count), OTHER(lambda *_: 7), ERROR(self.failed)]
        functions = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self.kept]
        self.library = ctypes.CDLL(str(path))
        self.launch = launch.Launch(self.library, functions)
        self.bodies = [BODY(lambda task, *_: self.body(task)) for _ in range(2)]

    def parallel(self, work: int, data: int, team: int, flags: int) -> None:
        self.regions, self.own = self.regions + 1, 0
        WORK(work)(data)
        if self.together:
            self.own = 1
            WORK(work)(data)
        time.sleep(self.late)

    def failed(self, kind: bytes, message: bytes) -> None:
        self.errors.append(message)

    def body(self, task: int) -> int:
        self.seen.append(task)
        time.sleep(self.seconds)
        return int(self.fails)

    def run(self, fails: bool = False, asked: int = 0, seconds: float = 0.0, body: int = 0) -> list[int]:
        """Return the tasks of one launch in the order in which they ran; -1 at its end where it failed."""
        self.seen, self.fails, self.seconds = [], fails, seconds
        status = self.library.ladder_launch(self.bodies[body], None, asked)
        return [*self.seen, status] if status else self.seen


@pytest.fixture
def stand(tmp_path: Path) -> Callable[[int], Stand]:
    path = tmp_path / "launch.so"
    launch._compile(path)
    return lambda count: Stand(path, count)


def test_tasks_of_a_thread_that_does_not_come_are_done_by_others(stand: Callable[[int], Stand]) -> None:
    tasks = stand(3)
    assert tasks.run() == list(range(12))
    assert tasks.run(asked=5) == list(range(5))


def test_a_caller_that_waited_for_a_late_thread_computes_alone_for_a_while(
    stand: Callable[[int], Stand],
) -> None:
    tasks = stand(2)
    tasks.late = 0.5
    assert len(tasks.run()) == 8
    tasks.late = 0.0
    begin = time.monotonic()
    while tasks.regions == 1:
        assert tasks.run() in ([0], list(range(8)))  # alone: one task has it all
        time.sleep(0.05)
    assert 1 < time.monotonic() - begin < 60  # eight times as long as the caller waited


@pytest.mark.parametrize(("threads", "late", "alone"), [(2, 0.5, True), (6, 0.1, False)])
def test_a_wait_shorter_than_to_compute_alone_is_none(
    stand: Callable[[int], Stand], threads: int, late: float, alone: bool
) -> None:
    tasks = stand(threads)
    tasks.late = late
    assert len(tasks.run(seconds=0.005)) == 4 * threads  # 40 ms of two threads' caller, 120 of six
    assert (tasks.run() == [0]) == alone


def test_more_work_than_what_was_late_has_all_threads(stand: Callable[[int], Stand]) -> None:
    """What prepares rows for some microseconds says nothing of the milliseconds that their product takes."""
    tasks = stand(2)
    tasks.run(seconds=0.005, body=1)
    tasks.late = 0.5
    assert len(tasks.run()) == 8
    assert tasks.run() == [0]
    assert len(tasks.run(body=1)) == 8


def test_a_caller_whose_core_another_thread_took_computes_everything_alone(
    stand: Callable[[int], Stand],
) -> None:
    """Each waits, spinning, until the other has its turn."""
    tasks, allowed = stand(2), os.sched_getaffinity(0)
    tasks.run(seconds=0.005, body=1)
    tasks.together = True
    try:
        os.sched_setaffinity(threading.get_native_id(), {min(allowed)})
        assert len(tasks.run(seconds=0.001)) == 8
        assert tasks.run(body=1) == [0]
    finally:
        os.sched_setaffinity(threading.get_native_id(), allowed)


def test_one_thread_nested_regions_and_kernels_alone_start_nothing(stand: Callable[[int], Stand]) -> None:
    tasks = stand(2)
    tasks.launch.use_threads(1)
    assert tasks.run() == [0]
    tasks.launch.use_threads(0)
    found = list[list[int]]()
    tasks.launch.alone(lambda: found.append(tasks.run()))()
    assert found == [[0]]
    assert tasks.regions == 0
    tasks.launch.leave_openmp()
    assert tasks.run() == [7]
    assert stand(1).run() == [0]


def test_a_failure_of_a_task_is_an_error(stand: Callable[[int], Stand]) -> None:
    tasks = stand(2)
    assert tasks.run(fails=True)[-1] == -1
    assert tasks.errors == [b"a thread of a kernel failed"]


def product() -> tuple[ladder.Matmul, object, torch.Tensor]:
    matrix = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    op = ladder.Matmul(96, 128, "int4", group_size=32)
    return op, op.pack(ladder.quantize(matrix, "int4", group_size=32)), torch.ones(40, 128).half()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_any_number_of_threads_computes_the_same(count: int) -> None:
    op, packed, x = product()
    with knobs.override(num_threads=1):
        wanted = op(x, packed)
    before = torch.get_num_threads()
    try:
        for own in (1, 2, 5, 2):
            torch.set_num_threads(own)
            with knobs.override(num_threads=count):
                assert torch.equal(op(x, packed), wanted)
            torch.randn(300, 300).exp()
    finally:
        torch.set_num_threads(before)


def test_several_callers_have_threads_of_their_own() -> None:
    op, packed, x = product()
    wanted, found = op(x, packed), list[bool]()

    def call() -> None:
        for _ in range(30):
            found.append(torch.equal(op(x, packed), wanted))
            torch.randn(200, 200).exp()

    with knobs.override(num_threads=2):
        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert found == [True] * 120


FORKED = """
    import os, signal, torch, ladder
    from ladder.runtime import threads
    torch.randn(1000, 1000).exp()  # torch's threads, which a child has not
    weight = ladder.quantize(torch.ones(96, 128), "int4", group_size=32)
    op = ladder.Matmul(96, 128, "int4", group_size=32)
    packed, x = op.pack(weight), torch.ones(40, 128).half()
    if USED:
        op(x, packed)
        assert threads.uses_openmp()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        op(x, packed)
        print("computed", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.costly
@pytest.mark.parametrize("used", [False, True])
def test_a_child_of_a_process_whose_torch_had_threads_computes(used: bool) -> None:
    assert program(FORKED.replace("USED", str(used))) == "computed"


FROM_ONE_THREAD = """
    import multiprocessing, os
    def computes():
        import torch, ladder
        from ladder.runtime import threads
        torch.randn(1000, 1000).exp()
        op = ladder.Matmul(96, 128, "int4", group_size=32)
        op(torch.ones(40, 128).half(), op.pack(ladder.quantize(torch.ones(96, 128), "int4", group_size=32)))
        print("on torch's threads", threads.uses_openmp(), flush=True)
    pid = os.fork()
    if pid == 0:
        computes()
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.costly
def test_a_child_of_a_process_of_one_thread_uses_torchs() -> None:
    assert program(FROM_ONE_THREAD) == "on torch's threads True"


def test_without_a_compiler_the_pool_of_tvm_runs_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library.load_runtime()
    monkeypatch.setenv("CC", "no-such-compiler")
    with knobs.override(cache_dir=tmp_path):
        assert launch.load(library._loaded[library.RUNTIME]) is None
    assert threads.uses_openmp()


def test_a_cache_that_takes_nothing_does_not_keep_kernels_from_torchs_threads(tmp_path: Path) -> None:
    (tmp_path / "native").write_text("no folder")
    with knobs.override(cache_dir=tmp_path):
        assert launch.load(library._loaded[library.RUNTIME]) is not None


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:900] + b"?" + b[901:]]
)
def test_a_damaged_launch_is_compiled_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Loading one that was cut short ended every process that used the cache."""
    library.load_runtime()
    with knobs.override(cache_dir=tmp_path):
        assert launch.load(library._loaded[library.RUNTIME]) is not None
        (made,) = (tmp_path / "native").iterdir()
        copy = made.with_suffix(".copy")  # what is loaded keeps its file
        copy.write_bytes(damage(made.read_bytes()))
        copy.replace(made)
        assert not is_whole(made)
        assert launch.load(library._loaded[library.RUNTIME]) is not None
        assert is_whole(made)
        assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_damaged_snapshot_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(snapshot, "_compile", asked.append)
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path))  # of all threads
    path = snapshot._path()
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF cut short")
    assert not snapshot.Native().wait()
    assert asked == [path]
