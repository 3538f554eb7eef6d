"""The state of torch that tracing may change: read before, put back after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ladder.capture.values.settings import all_settings, restore_settings
from ladder.runtime.dispatch import dispatch_kept

KINDS = ("cpu", "cuda")
"""Kinds of devices that autocasting and random numbers are kept for."""


def _autocast() -> tuple[Any, ...]:
    kinds = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS)
    torch.autocast_increment_nesting()
    return (*kinds, torch.is_autocast_cache_enabled(), torch.autocast_decrement_nesting())


def _set_autocast(state: tuple[Any, ...]) -> None:
    *kinds, caches, nesting = state
    for kind, (enabled, dtype) in zip(KINDS, kinds, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(caches)
    while (now := _autocast()[-1]) != nesting:
        (torch.autocast_decrement_nesting if now > nesting else torch.autocast_increment_nesting)()


def _functorch_depth() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())


def _unwind_functorch(depth: int) -> None:
    while _functorch_depth() > depth:  # torch 2.11 cannot take all levels at once
        torch._C._functorch.pop_dynamic_layer_stack()


def _unwind_modes(count: int) -> None:
    while torch._C._len_torch_function_stack() > count:
        torch._C._pop_torch_function_stack()


def _cuda_random() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def _set_cuda_random(states: list[torch.Tensor]) -> None:
    if states:
        torch.cuda.set_rng_state_all(states)


STATE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_functorch_depth, _unwind_functorch),  # a level keeps grad modes of its own: the first to go
    (torch._C._len_torch_function_stack, _unwind_modes),  # default devices are such modes
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (_autocast, _set_autocast),
    (all_settings, restore_settings),
    (torch.get_rng_state, torch.set_rng_state),
    (_cuda_random, _set_cuda_random),
)
"""(Reads a part of the state, puts it back), in the order in which they are put back."""


@contextmanager
def kept_state() -> Iterator[None]:
    """Leave torch's state as it was, whatever happens within: tracing runs the program's operators."""
    before = [read() for read, _ in STATE]
    try:
        with dispatch_kept():
            yield
    finally:
        for (_, restore), state in zip(STATE, before, strict=True):
            restore(state)
