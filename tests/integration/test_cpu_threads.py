"""TVM's thread pool, where torch's threads cannot be had: callers are not pinned, workers keep elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, pathlib, torch, ladder
from ladder.runtime import launch, threads
launch.load = lambda runtime: None
before = os.sched_getaffinity(0)
weight = ladder.quantize(torch.randn(256, 256), "int4", group_size=64)
op = ladder.Matmul(N=256, K=256, weight="int4", activation="bfloat16", group_size=64)
op(torch.randn(1, 256).bfloat16(), op.pack(weight))
workers = threads._callers.workers
assert os.sched_getaffinity(0) == before
assert len(workers.ids) == 1, workers
for worker in workers.ids:
    assert os.sched_getaffinity(worker) == before - {workers.avoided}, workers
print("ok")
"""


@pytest.mark.costly
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not place threads")
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores")
def test_workers_keep_off_the_callers_core() -> None:
    environment = {**os.environ, "LADDER_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr
