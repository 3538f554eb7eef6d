"""How long a call takes, and `finetune`, which measures kernels for one product on the GPU that is here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ladder.api.matmul import Matmul as Product
from ladder.runtime.compile import forget, target_of, tuning_database
from ladder.runtime.compile_pool import Campaign, CompilePool
from ladder.runtime.cores import usable_cores
from ladder.runtime.gauge import Gauge
from ladder.runtime.tune import Effort, Run, finals, remember, tune
from targets import get_device

REPEATS = 10


def milliseconds(call: Callable[[], Any], where: str) -> float:
    """Return the median milliseconds of a call, after one that warms up.

    call: What to time; on a GPU, what it launches.
    where: Type of the device: ``"cuda"`` or ``"cpu"``.
    """
    call()
    times = []
    for _ in range(REPEATS):
        if where == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if where == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def finetune(product: Product, rows: list[int], kernels: int) -> None:
    """Measure some kernels of a product for some rows and remember the fastest in the user's database."""
    name = target_of(torch.device("cuda"))
    campaign = Campaign([product.gemm], rows, name)
    with CompilePool(min(kernels, usable_cores())) as pool, Gauge() as gauge:
        run = Run(pool, gauge, Effort(kernels, refined=0), lambda line: None)
        tune([campaign], run)
    remember(tuning_database(), get_device(name), finals(run.timed))
    forget()
