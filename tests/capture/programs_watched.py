"""Modes that programs push themselves: they see each operator, change it, and are left again."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as functional
from capture_world import calls, normal, program
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.overrides import TorchFunctionMode

SIZES = [lambda size=size: (normal(size, 4),) for size in (4, 4, 5, 6, 4)]


class Scaling(TorchFunctionMode):
    """Multiplies what ``relu`` gives, in each of its forms."""

    def __init__(self, factor=2):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found * self.factor if function in (torch.relu, functional.relu, torch.Tensor.relu) else found


class Noting(TorchFunctionMode):
    """Notes what it is told."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append((function.__name__, len(args), len(types), sorted(kwargs or {})))
        return function(*args, **(kwargs or {}))


class Replacing(TorchFunctionMode):
    """Answers other than the operators do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return function(args[0], 0)
        if function == torch.Tensor.shape.__get__:
            return torch.Size([7])
        if function is torch.relu:
            raise KeyError("no relu")
        return function(*args, **(kwargs or {}))


@program
def watched_by_two_modes():
    def fn(x):
        with Scaling(), Scaling(3):
            y = torch.relu(x).relu()
        return functional.relu(y)

    return calls(fn, *SIZES)


@program
def watched_operators_of_all_forms():
    norm = nn.LayerNorm(4)

    def fn(x):
        with Noting() as mode:
            y = norm(torch.relu(x)).sum() + x.mean() + x.shape[0] + x.size(0) + len(x)
            z = x[0] * 2 + x[:, None].mT.sum() + torch.zeros(4) + torch.arange(x.shape[0]).sum()
            for row in x:
                z = z - row
            x = x.clone()
            x[0] = 1
            x += 1
            x = torch.cat([x, -x]) @ x.mT + 1
            x = functional.scaled_dot_product_attention(x, x, x).view(2, -1)
            with torch.no_grad(), torch.device("cpu"):
                w = 1 + torch.ones(2)
        return y, z, x, w, mode.seen

    return calls(fn, *SIZES)


@program
def watched_by_a_mode_that_replaces():
    def fn(x):
        with Replacing():
            y = x[1] * x.shape[0]
            try:
                y = torch.relu(y)
            except KeyError as error:
                y = y + len(error.args[0])
        return y

    return calls(fn, *SIZES)


@program
def watched_while_a_call_is_native():
    def fn(x, told):
        with Scaling(5):
            y = functional.relu(x)
            told.append(time.monotonic() > 0)
            y = functional.relu(y)
        return functional.relu(y)

    return calls(fn, *[lambda size=size: (normal(size), []) for size in (3, 3, 4, 3)])


@torch.compiler.allow_in_graph
def scaled_by_hand(x):
    return functional.relu(x.relu() * 2)


@program
def watched_operators_of_the_program():
    def fn(x):
        with Scaling(5), Noting() as mode:
            y = scaled_by_hand(x)
        return y, mode.seen

    return calls(fn, *SIZES)


@program
def watched_branches():
    def fn(x):
        with Noting() as mode:
            y = x + 1 if x.sum() > 0 else x - 1
            y = y * 2
        return y, mode.seen

    return calls(fn, *[lambda sign=sign: (normal(3).abs() * sign,) for sign in (1, 1, -1, 1, -1)])


@program
def watched_by_a_mode_that_stays():
    mode = Scaling(5)

    def fn(x):
        mode.__enter__()
        return x.relu()

    def clean(x):
        try:
            return fn(x), torch._C._len_torch_function_stack()
        finally:
            mode.__exit__(None, None, None)

    return calls(clean, *SIZES)


@program
def watched_by_modes_that_are_asked_for():
    mode = Scaling(5)

    def fn(x):
        with torch.device("cpu"), mode:
            inner = torch.overrides._get_current_function_mode_stack()
            rows = torch.vmap(lambda row: row + torch.arange(4, device=torch.get_default_device()))(x)
        return rows, inner[-1] is mode, len(inner) - torch._C._len_torch_function_stack()

    return calls(fn, *SIZES)


@program
def watched_indices_of_rows():
    def fn(x):
        def mask(batch, head, query, key):
            return x[query, key] > batch

        with TransformGetItemToIndex():
            for axes in (
                (None, None, None, 0),
                (None, None, 0, None),
                (None, 0, None, None),
                (0, None, None, None),
            ):
                mask = torch.vmap(mask, in_dims=axes)
            return mask(torch.arange(2), torch.arange(3), torch.arange(len(x)), torch.arange(4))

    return calls(fn, *SIZES)


@program
def watched_places_of_tensors():
    def fn(x, device):
        with torch.device(device):
            y, z = torch.zeros(3), torch.ones_like(x)
        return y, z, torch.ones(2), [t.device.type for t in (y, z)]

    return calls(
        fn, *[lambda device=device: (normal(3), device) for device in ("meta", "cpu", "meta", "meta")]
    )


@program
def watched_functions_among_others():
    def fn(x, function, others):
        return x * 2 if function in (torch.relu, functional.relu) else x + (functional.gelu in others)

    names = "relu relu gelu gelu silu relu".split()
    return calls(
        fn,
        *[lambda name=name: (normal(3), getattr(functional, name), [1, functional.gelu]) for name in names],
        lambda: (normal(3), functional.gelu, [functional.relu]),
    )
