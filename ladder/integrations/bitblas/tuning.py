"""`finetune`: measure kernels for one product on the GPU that is here."""

from __future__ import annotations

import torch

from ladder.api.matmul import Matmul as Product
from ladder.runtime.compile import forget, target_of, tuning_database
from ladder.runtime.compile_pool import Campaign, CompilePool
from ladder.runtime.cores import usable_cores
from ladder.runtime.gauge import Gauge
from ladder.runtime.tune import Effort, Run, finals, remember, tune
from targets import get_device


def finetune(product: Product, rows: list[int], kernels: int) -> None:
    """Measure some kernels of a product for some rows and remember the fastest in the user's database."""
    name = target_of(torch.device("cuda"))
    campaign = Campaign([product.gemm], rows, name)
    with CompilePool(min(kernels, usable_cores())) as pool, Gauge() as gauge:
        run = Run(pool, gauge, Effort(kernels, refined=0), lambda line: None)
        tune([campaign], run)
    remember(tuning_database(), get_device(name), finals(run.timed))
    forget()
