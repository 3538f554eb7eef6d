"""Threads that call compiled models at the same time."""

from __future__ import annotations

import threading
import time

import torch
from torch import nn

import ladder

PATIENCE = 120
"""Seconds, far more than a thread needs until its model is recorded."""


def test_models_that_compile_in_threads_are_whole() -> None:
    """Tracers of torch replace what modules do when called, in all threads: nobody records that."""
    models = [nn.Sequential(nn.Linear(8 + i, 16), nn.GELU(), nn.Linear(16, 4)).eval() for i in range(3)]
    fast, begin = [ladder.compile(model) for model in models], threading.Barrier(len(models))
    errors = list[float]()

    def serve(at: int) -> None:
        x = torch.randn(3, 8 + at)
        with torch.no_grad():
            begin.wait()
            limit = time.monotonic() + PATIENCE
            while fast[at].outcome == "new" and time.monotonic() < limit:
                errors.append(float((fast[at](x) - models[at](x)).abs().max()))
                time.sleep(0.05)

    threads = [threading.Thread(target=serve, args=(at,)) for at in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.outcome for each in fast] == ["whole"] * len(models)
    assert [len(each.records) for each in fast] == [1] * len(models)
    assert max(errors) < 1e-5
