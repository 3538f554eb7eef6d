"""Programs that a replay may get wrong: what a call leaves behind or brings is not as in the recording."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ladder

CALLS = 6
"""The first two run step by step on a GPU, the third is recorded."""


class Counting(nn.Module):
    """A buffer and a number count calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        return x * self.count + self.calls


class Ring(nn.Module):
    """Rows are written in turn, by a number of Python's or by a tensor."""

    def __init__(self, by_tensor: bool) -> None:
        super().__init__()
        self.by_tensor, self.at = by_tensor, 0
        self.register_buffer("rows", torch.zeros(4, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.by_tensor:
            self.rows.index_copy_(0, self.place, x[:1])
            self.place.add_(1).remainder_(4)
        else:
            self.rows[self.at % 4] = x.mean(0)
            self.at += 1
        return F.softmax(x @ self.rows.t(), -1) @ self.rows


class Changed(nn.Module):
    """A weight that is written between calls, or is another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))

    def between(self, call: int) -> None:
        """Do what a user does between calls."""
        if call % 2:
            self.linear.weight.data = self.linear.weight.data * 0.5
        else:
            self.linear.weight.mul_(1.5)


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


def _row(call: int) -> tuple[Any, ...]:
    return (torch.randn(4, 8),)


def _special(call: int) -> tuple[Any, ...]:
    x = torch.randn(4, 8)
    x[0, call], x[1, 1], x[2, 2], x[3, 3] = float("nan"), float("inf"), -float("inf"), -0.0
    return (x,)


def _overlapping(call: int) -> tuple[Any, ...]:
    x = torch.randn(6, 8)
    return x[:4], x[2:]


def _changed(v: Tensor) -> tuple[Tensor, Tensor]:
    v = torch.tanh(v)
    return v, v * 2


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "counting": (Counting, _row),
    "ring by number": (lambda: Ring(False), _row),
    "ring by tensor": (lambda: Ring(True), _row),
    "weights that change": (Changed, _row),
    "running statistics": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), _row),
    "random": (lambda: Of(lambda x: F.dropout(x, 0.5, True) + torch.rand_like(x)), _row),
    "number on the CPU": (
        lambda: Of(lambda x, s: torch.tanh(x * s) + s),
        lambda call: (torch.randn(4, 8), torch.tensor(float(call))),
    ),
    "number of Python": (
        lambda: Of(lambda x, n: x + torch.full((8,), n, device=x.device) * n),
        lambda call: (torch.randn(4, 8), float(call)),
    ),
    "rows by a mask": (lambda: Of(lambda x: (x[x[:, 0] > 0] * 2, torch.nonzero(x > 0))), _row),
    "branch": (lambda: Of(lambda x: x * 2 if x.sum() > 0 else x - 1), _row),
    "sizes": (
        lambda: Of(lambda x: torch.softmax(x @ x.t(), -1).sum(0)),
        lambda call: (torch.randn((3, 4, 4, 4, 0, 4)[call], 8),),
    ),
    "layouts": (
        lambda: Of(lambda x: torch.tanh(x) * 2),
        lambda call: (torch.randn(8, 4).t() if call % 2 else torch.randn(4, 16)[:, ::2],),
    ),
    "one tensor twice": (lambda: Of(lambda x, y: torch.tanh(x) + y), lambda call: (torch.randn(4, 8),) * 2),
    "arguments that overlap": (lambda: Of(lambda x, y: x.add_(y.sum(1)[:, None]) * 2), _overlapping),
    "results that the caller changes": (lambda: Of(_changed), _row),
    "special values": (
        lambda: Of(lambda x: (x.amax(-1), x.softmax(-1), x.relu(), x.clamp(-1, 1), x.argmax(-1), x.sum(0))),
        _special,
    ),
    "attention of one tensor": (
        lambda: Of(lambda x, m: F.scaled_dot_product_attention(x, x, x, attn_mask=m)),
        lambda call: (torch.randn(2, 4, 9, 32).half(), torch.rand(9, 9) > 0.3),
    ),
}


def differences(name: str, device: str) -> list[str]:
    """Return in which calls a compiled program differs from eager: results, arguments or its state."""
    make, given = PROGRAMS[name]
    torch.manual_seed(0)
    program = make().to(device)
    own = copy.deepcopy(program)
    fast, found = ladder.compile(own), []
    for call in range(CALLS):
        torch.manual_seed(call)
        arguments = given(call)
        inputs = _there(arguments, device)
        copied = copy.deepcopy(inputs)
        for each in (program, own):
            if isinstance(each, Changed):
                each.between(call)
        torch.manual_seed(call)
        wanted = program(*inputs)
        torch.manual_seed(call)
        result = fast(*copied)
        state, expected = (list(each.state_dict().values()) for each in (own, program))
        half = any(isinstance(value, Tensor) and value.dtype is torch.float16 for value in inputs)
        bound = 2e-3 if half else 2e-5
        try:
            torch.testing.assert_close(
                (result, copied, state), (wanted, inputs, expected), rtol=bound, atol=bound, equal_nan=True
            )
        except AssertionError as error:
            found.append(f"call {call}: {error}")
        for tensor in torch.utils._pytree.tree_leaves(result) if "changes" in name else ():
            tensor.add_(1)
    return found


def _there(arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Return arguments on a device as they lie, views of one tensor as such; numbers stay on the CPU."""
    memory: dict[int, Tensor] = {}
    found = []
    for value in arguments:
        if isinstance(value, Tensor) and value.ndim:
            whole = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
            place = memory.setdefault(value.untyped_storage().data_ptr(), whole.to(device))
            value = place.as_strided(value.shape, value.stride(), value.storage_offset())
        found.append(value)
    return tuple(found)
