"""Random programs that branch on values and change what they share: calls do what they do without capture."""

from __future__ import annotations

import os
import random
import types
from typing import Any

import pytest
import torch
from capture_world import World, calls, captured_run, compare, normal

CONDITIONS = ("x.sum() > 0", "y.mean() > 0", "known.all()", "(x > 0).any()", "len(items) > 2", "n > 2")
CONDITIONS += ("buffer.sum() > 1", "known.sum() > 2", "x.max().item() > 0.5", "state.n > 1", "bool(y[1] > 0)")

CHANGES = ("y = y * 2", "y.mul_(1.5)", "y = y.clone(); y.add_(1)", "buffer.add_(1)", "y = y + torch.rand(3)")
CHANGES += ("y = y + buffer", "w = y[:2]; w.mul_(2)", "known = known * 1", "known = torch.ones(3)", "n += 1")
CHANGES += ("items.append(n)", "items.append(y)", "items = list(items)", "items[:] = items[-3:]", "n = n * 2")
CHANGES += ("kept.append(1)", "items.extend(kept[-2:])", "state.n += 1", "d['n'] = d.get('n', 0) + 1")
CHANGES += (
    "state = types.SimpleNamespace(n=n)",
    "y = (lambda v: v + n)(y)",
    "d['y'] = y",
    "items = kept[-4:]",
)

SEEDS = [51, 84, 89, 232, *(16 * int(os.environ["LADDER_TEST_DAY"]) + number for number in range(16))]


def _block(draw: random.Random, depth: int) -> list[str]:
    lines: list[str] = []
    for _ in range(draw.randint(1, 3) if depth else draw.randint(4, 9)):
        if draw.random() < 0.3 and depth < 3:
            lines += [f"if {draw.choice(CONDITIONS)}:", *_indented(draw, depth)]
            lines += ["else:", *_indented(draw, depth)] if draw.random() < 0.5 else []
        elif draw.random() < 0.07 and depth < 2:
            lines += ["for _ in range(len(items) % 3):", *_indented(draw, depth)]
        else:
            lines += [draw.choice(CHANGES)]
    return lines


def _indented(draw: random.Random, depth: int) -> list[str]:
    return [f"    {line}" for line in _block(draw, depth + 1)]


def _program(seed: int) -> World:
    draw = random.Random(seed)
    begins = ("y, n, d = x * 1, 1, {}", "known, state = torch.ones(3), types.SimpleNamespace(n=0)")
    body = [*begins, *_block(draw, 0), "return y, n, state.n, items, d"]
    kept: list[int] = []
    names: dict[str, Any] = {"torch": torch, "types": types, "kept": kept, "buffer": torch.zeros(3)}
    exec("\n".join(["def program(x, items):", *(f"    {line}" for line in body)]), names)
    chosen = [draw.choice((0, 0, 1, 1, 2, 3)) for _ in range(9)]
    given = [lambda at=at: (normal(3, seed=at), [1, 2]) for at in chosen]
    return calls(names["program"], *given, observe=lambda: (names["buffer"].clone(), list(kept)))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_branches(seed: int) -> None:
    expected, found, _ = captured_run(lambda: _program(seed), 1)
    assert compare(expected, found) == ""
