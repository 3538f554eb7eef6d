"""Text that models of the zoo continue: the same tokens as eager's, and the processor time beside it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from typing import Any

import torch

import ladder
from benchmarks.zoo_speed import own_time

PROMPTS = (0, 2, 3, 4)
"""Numbers of the inputs that are continued: each of another length and batch."""

TOKENS = 8
"""Tokens that each prompt is continued by."""

GIVEN = ("input_ids", "attention_mask", "input_features")


def generated(made: tuple[Any, list[dict[str, Any]]], rounds: int) -> dict[str, Any]:
    """Return how many continuations equal eager's, and processor time over eager's; empty if none can be.

    Parameters
    ----------
    made
        A model and its inputs.
    rounds
        How often all prompts are continued after the first time; 0: the first time only.

    Returns
    -------
    ``after_first``: of all prompts but the first, the first time; ``again``: of all prompts, the least of
    some rounds; ``each``: of each prompt the first time; ``recorded``: graphs that were recorded in each.
    """
    model, inputs = made
    if not getattr(model, "can_generate", bool)() or "input_ids" not in inputs[0]:
        return {}
    prompts = [{key: inputs[at][key] for key in GIVEN if key in inputs[at]} for at in PROMPTS]
    eager, fast = copy.deepcopy(model), model
    compiled: Any = ladder.compile(model.forward)
    fast.forward = compiled
    for prompt in prompts:
        _timed(eager, prompt)
    first = [_pair(eager, fast, prompts[0], compiled)]
    gc.collect()  # what recording left, in its time and not in that of a later prompt
    first += [_pair(eager, fast, prompt, compiled) for prompt in prompts[1:]]
    later = [[_pair(eager, fast, prompt, compiled) for prompt in prompts] for _ in range(min(rounds, 3))]
    pairs = [*first, *(pair for row in later for pair in row)]
    whole = [sum(pair["fast"] for pair in row) / sum(pair["eager"] for pair in row) for row in later]
    return {
        "equal": sum(pair["equal"] for pair in pairs),
        "of": len(pairs),
        "after_first": sum(p["fast"] for p in first[1:]) / sum(p["eager"] for p in first[1:]),
        "again": min(whole, default=float("nan")),
        "each": [pair["fast"] / pair["eager"] for pair in first],
        "recorded": [pair["recorded"] for pair in first],
    }


def _timed(model: Any, prompt: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    clock = own_time()
    start = clock()
    with torch.no_grad():
        tokens = model.generate(**copy.deepcopy(prompt), max_new_tokens=TOKENS, do_sample=False)
    return tokens, clock() - start


def _pair(eager: Any, fast: Any, prompt: Mapping[str, torch.Tensor], compiled: Any) -> dict[str, Any]:
    """Continue a prompt both ways."""
    before = compiled.calls["recorded"]
    expected, by_torch = _timed(eager, prompt)
    found, by_ours = _timed(fast, prompt)
    same = torch.equal(expected, found)
    return {
        "equal": same,
        "eager": by_torch,
        "fast": by_ours,
        "recorded": compiled.calls["recorded"] - before,
    }
