"""Settings of torch that programs switch around operators: attention's backends, flags, the default dtype.

Where a program writes one, the write becomes a node of the graph, in order, so that an operator between two
writes runs, and is traced, under what it was recorded under.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ladder.capture.python.words import words

Setting = tuple[Callable[..., Any], tuple[Any, ...]]
"""What reads a setting, and what it is called with."""

_ATTENTION = words("flash mem_efficient math cudnn overrideable")
_OF_LIBRARIES = words(
    "cudnn_enabled cudnn_benchmark cudnn_deterministic cudnn_allow_tf32 cudnn_depthwise_kernel mkldnn_enabled"
    " mkldnn_deterministic onednn_allow_tf32 nnpack_enabled float32_matmul_precision cublas_allow_tf32"
    " sdp_priority_order"
)
_PAIRS = (
    *((f"_set_sdp_use_{name}", f"_get_{name}_sdp_enabled") for name in _ATTENTION),
    *((f"_set_{name}", f"_get_{name}") for name in _OF_LIBRARIES),
    ("_set_fp32_precision_setter", "_get_fp32_precision_getter"),
    ("_set_default_dtype", "get_default_dtype"),
    ("_cuda_set_cudnn_benchmark_limit", "_cuda_get_cudnn_benchmark_limit"),
)


def deterministic_algorithms() -> tuple[bool, bool]:
    """Return whether only deterministic algorithms are used, and whether others only warn."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def set_deterministic_algorithms(state: tuple[bool, bool]) -> None:
    """Write what `deterministic_algorithms` gives."""
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


READS: dict[Any, Callable[..., Any]] = {
    set_deterministic_algorithms: deterministic_algorithms,
    **{
        getattr(torch._C, write): getattr(torch._C, read)
        for write, read in _PAIRS
        if hasattr(torch._C, write) and hasattr(torch._C, read)
    },
}
"""What writes a setting -> what reads it; a write takes what the read takes, and the value."""

WRITES: dict[Any, Callable[..., Any]] = {read: write for write, read in READS.items()}
"""What reads a setting -> what writes it."""

PARTS = {torch.is_deterministic_algorithms_warn_only_enabled: deterministic_algorithms}
"""What reads a part of a setting -> what reads all of it."""


UNTOLD = object()
"""The answer where torch refuses one: its older and its newer flags of one thing were both set."""


def is_now(setting: Setting) -> Any:
    """Return what a setting is, or `UNTOLD`."""
    read, given = setting
    try:
        return read(*given)
    except RuntimeError:
        return UNTOLD


def restore_settings(before: Iterable[tuple[Setting, Any]]) -> None:
    """Write settings as they were, those that are otherwise."""
    for setting, value in before:
        if value is not UNTOLD and is_now(setting) != value:
            read, given = setting
            WRITES[read](*given, value)


@contextmanager
def settings_at(before: dict[Setting, Any]) -> Iterator[None]:
    """Let settings be as they were `before`, within."""
    now = [(setting, is_now(setting)) for setting in before]
    restore_settings(before.items())
    try:
        yield
    finally:
        restore_settings(now)


def all_settings() -> list[tuple[Setting, Any]]:
    """Return what all settings that are read without arguments are."""
    with_arguments = getattr(torch._C, "_get_fp32_precision_getter", None)
    plain: list[Setting] = [(read, ()) for read in WRITES if read is not with_arguments]
    return [(setting, is_now(setting)) for setting in plain]
