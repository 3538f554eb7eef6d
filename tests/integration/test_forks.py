"""Processes made after the first call: forked, from a fork server, spawned, and by torch's DataLoader."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ladder
from ladder import knobs
from ladder.runtime import compile as runtime_compile
from ladder.runtime import library, threads

SECONDS = 60


def product() -> tuple[ladder.Matmul, object, torch.Tensor]:
    matrix = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    weight = ladder.quantize(matrix, "int4", group_size=32)
    op = ladder.Matmul(48, 128, "int4", group_size=32)
    return op, op.pack(weight), torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).half()


def computed() -> torch.Tensor:
    op, packed, x = product()
    return op(x, packed)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 96), torch.nn.GELU(), torch.nn.Softmax(-1)).eval()


def in_child(body: Callable[[], object]) -> int:
    """Fork, run ``body`` in the child and return its exit status; a child that hangs ends by a signal."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def test_a_forked_child_computes() -> None:
    op, packed, x = product()
    y = op(x, packed)
    fast, rows = ladder.compile(model()), torch.randn(64, 128)
    with torch.no_grad():
        for _ in range(2):
            z = fast(rows)

    def body() -> None:
        assert torch.equal(op(x, packed), y)
        with torch.no_grad():
            assert torch.allclose(fast(rows), z)
        with knobs.override(num_threads=3):
            assert torch.equal(op(x, packed), y)
        found: list[torch.Tensor] = []
        other = threading.Thread(target=lambda: found.append(op(x, packed)))
        other.start()
        other.join()
        assert torch.equal(found[0], y)
        assert library.thread_count() == 1
        assert threads.runs_inline()
        assert in_child(lambda: _require(torch.equal(op(x, packed), y))) == 0  # its child, too

    assert in_child(body) == 0
    assert not threads.runs_inline()
    assert torch.equal(op(x, packed), y)


def _require(condition: bool) -> None:
    assert condition


ENDS = {"sys.exit(3)": 3, "raise ValueError": 1, "pass": 0, "raise SystemExit('no')": 1}
"""How a child leaves -> its exit status."""


@pytest.mark.parametrize(("leave", "threads"), [(leave, 2 + 3 * at) for at, leave in enumerate(ENDS)])
def test_a_child_has_the_exit_status_that_it_leaves_with(leave: str, threads: int) -> None:
    """Whatever TVM's pool does at exit; workers sleep a millisecond after the last kernel."""
    program = f"""
        import os, sys, time, test_forks
        for pause in (0, 0.05):
            expected = test_forks.computed()
            time.sleep(pause)
            pid = os.fork()
            if pid == 0:
                same = bool((test_forks.computed() == expected).all())
                print("computed", same, flush=True)
                {leave}
                sys.exit()
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    """
    assert printed(program, threads) == f"computed True\n{ENDS[leave]}\n" * 2


def printed(program: str, threads: int) -> str:
    """Run a program whose kernels have so many threads; return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LADDER_NUM_THREADS": str(threads)},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_child_computes_after_kernels_that_are_no_products() -> None:
    """torch's operators would wait in it for the threads that the parent had."""
    program = """
        import os, sys, torch
        from ladder.formats import repack
        words = torch.arange(64 * 96, dtype=torch.int32).reshape(64, 96)
        print(torch.equal(repack.transposed_words(words), words.T), flush=True)
        pid = os.fork()
        if pid == 0:
            print(float(torch.ones(1 << 20).exp().sum()) > 0, flush=True)
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert printed(program, 2) == "True\nTrue\n3\n"


def leaves() -> None:
    computed()
    sys.exit(5)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_have_the_exit_status_that_they_leave_with(method: str) -> None:
    computed()
    process = multiprocessing.get_context(method).Process(target=leaves)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 5


@pytest.mark.usefixtures("plain_compiler")
def test_a_child_builds_kernels_while_another_thread_of_the_parent_held_locks(tmp_path: Path) -> None:
    """Locks that belong to threads which the child does not have are free there."""
    computed()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with runtime_compile._lock, library._lock:
            held.set()
            done.wait(SECONDS)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(SECONDS)

    def body() -> None:
        with knobs.override(cache_dir=tmp_path):
            op = ladder.Matmul(32, 64, "int8")
            op(torch.ones(1, 64).half(), op.pack(ladder.quantize(torch.ones(32, 64), "int8")))

    status = in_child(body)
    done.set()
    holder.join()
    assert status == 0


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_every_method_compute(method: str) -> None:
    expected = computed()
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        found = pool.apply_async(computed).get(SECONDS)
    assert torch.equal(found, expected)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that Ladder computes."""

    def __init__(self) -> None:
        self.op, self.packed, self.x = product()
        self.y = self.op(self.x, self.packed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.op(self.x, self.packed)[at]


def test_workers_of_a_data_loader_compute() -> None:
    rows = Rows()
    loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=2, timeout=SECONDS)
    batches = iter(loader)
    workers = batches._workers
    assert torch.equal(torch.cat(list(batches)), rows.y)
    for worker in workers:
        worker.join(SECONDS)
    assert [worker.exitcode for worker in workers] == [0, 0]


POOL = """
    import multiprocessing, os, sys, time
    from concurrent.futures import ProcessPoolExecutor
    from ladder.forks import follow_parent

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        with ProcessPoolExecutor(2, mp_context=context, initializer=follow_parent) as pool:
            sleeping = pool.submit(time.sleep, 600)
            print(pool.submit(os.getpid).result(), flush=True)
            sleeping.result()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(method: str, ending: int, tmp_path: Path) -> None:
    """The idle worker and the one at work close the pipe that the parent's output goes to."""
    path = tmp_path / "pool.py"
    path.write_text(textwrap.dedent(POOL))
    root = str(Path(ladder.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, str(path), method], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    ) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.send_signal(ending)
        assert parent.communicate(timeout=SECONDS)[0] == b""
        assert parent.returncode == -ending
