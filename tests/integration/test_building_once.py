"""Processes with one cold cache: one builds a kernel, the others wait for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ladder.runtime.cache import KernelCache

PROCESSES = 2
WORKER = """
import sys, time
from pathlib import Path
import torch, ladder

folder, rank, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
fast = ladder.compile(lambda x: torch.tanh(x * 2 + 1).sum(-1))
(folder / rank).touch()
while len(list(folder.iterdir())) < count:  # all are there before one begins
    time.sleep(0.01)
with torch.no_grad():
    x = torch.ones(3, 5)
    fast(x)
    assert torch.allclose(fast(x), torch.tanh(x * 2 + 1).sum(-1))
"""


@pytest.mark.costly
def test_one_process_builds_and_the_others_wait(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    environment = {**os.environ, "LADDER_CACHE_DIR": str(tmp_path / "cache"), "LADDER_TRACE": "1"}
    command = [sys.executable, "-c", WORKER, str(there)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(PROCESSES)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(PROCESSES)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0] * PROCESSES, said
    built = re.findall(r"ladder: built (\S+)", "".join(said))
    assert built
    assert len(built) == len(set(built)) == len(list((tmp_path / "cache" / "kernels").iterdir()))


def test_the_right_to_build_ends_with_its_process(tmp_path: Path) -> None:
    """A process that was killed leaves no lock behind."""
    code = (
        "import os, sys, pathlib\nfrom ladder.runtime.cache import KernelCache\n"
        "with KernelCache(pathlib.Path(sys.argv[1])).building('key'):\n    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    with KernelCache(tmp_path).building("key"):
        assert (tmp_path / "locks" / "key").exists()
    assert not (tmp_path / "locks" / "key").exists()
