"""CUDA graphs whose recording may fail, so that nothing of it stays behind in torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record the launches of a block into a graph; ``options`` as of ``torch.cuda.graph``.

    Raises RuntimeError if something in it cannot be recorded.
    """
    import torch

    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool, **options):
            yield
    except RuntimeError:
        _end(pool)
        raise


def _end(pool: Any) -> None:
    """End a recording that failed, which torch leaves open.

    Until then random numbers are those of the recording, so that all that draws some raises, and no memory
    comes back that several streams have used. Generators leave it with another recording that ends well.
    """
    import torch

    with suppress(RuntimeError):  # it may have been ended
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is recorded
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            pass
