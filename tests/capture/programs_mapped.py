"""``torch.vmap``, higher-order operators and ``torch.func.functional_call``."""

from __future__ import annotations

import copy

import torch
from capture_world import calls, normal, program
from torch import nn
from torch._higher_order_ops.map import map as control_flow_map
from torch._higher_order_ops.scan import scan
from torch.func import functional_call, stack_module_state
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

SIZES = [lambda size=size: (normal(size, 4),) for size in (3, 3, 5, 6, 3)]
PAIRS = [lambda size=size: (normal(size, 4), normal(size, 3, seed=1)) for size in (3, 3, 5, 6, 3)]

ROWS = [lambda seed=seed: (normal(4, 4, seed=seed),) for seed in range(3)]


def perceptron(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


@program
def rows_and_a_tensor_from_outside():
    weight = normal(4, seed=2)
    return calls(lambda x, y: torch.vmap(lambda a, b: (a * weight).sin() + b.sum())(x, y) * 2, *PAIRS)


@program
def rows_of_rows_in_dictionaries():
    def inner(a):
        return {"sin": a.sin(), "others": (a.sum(), a + 1)}

    def fn(x, other):
        return torch.vmap(torch.vmap(inner))(x.unsqueeze(1) * other["scale"])

    arguments = [lambda size=size: (normal(size, 4), {"scale": normal(4)}) for size in (3, 3, 5)]
    return calls(fn, *arguments)


@program
def a_module_over_rows():
    model = perceptron(3)
    return calls(lambda x: torch.vmap(model)(x), *SIZES)


@program
def axes_of_rows():
    def fn(x, y):
        outer = torch.vmap(torch.outer, in_dims=(1, None), out_dims=2)(x, y[0])
        return outer, torch.vmap(torch.dot, chunk_size=2)(x, x)

    return calls(fn, *PAIRS)


@program
def masks_of_indices():
    offset = torch.tensor(2)

    def mask(batch, query, key):
        return (query + offset >= key) & (batch >= 0)

    def fn(x):
        found = mask
        for axes in ((None, None, 0), (None, 0, None), (0, None, None)):
            found = torch.vmap(found, in_dims=axes)
        return found(torch.arange(2), torch.arange(x.shape[0]), torch.arange(x.shape[1])), x + 1

    return calls(fn, *SIZES)


@program
def rows_with_effects():
    log, count = [], torch.zeros(2)

    def row(a):
        log.append(tuple(a.shape))
        count.add_(1)
        changed = a.clone()
        changed[0] = 1.0
        a.mul_(2)
        return changed + a

    return calls(lambda x: torch.vmap(row)(x), *SIZES, observe=lambda: (list(log), count.clone()))


@program
def random_rows():
    def fn(x):
        same = torch.vmap(lambda a: a + torch.rand(4), randomness="same")(x)
        return same, torch.vmap(lambda a: a + torch.rand(4), randomness="different")(x)

    return calls(fn, *SIZES)


@program
def weights_of_another():
    model, other = perceptron(0), dict(perceptron(1).named_parameters())
    return calls(lambda x: functional_call(model, other, (x,)) + model(x), *SIZES, observe=model.state_dict)


@program
def tied_weights_of_another():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    model[2].weight = model[0].weight
    other = {"0.weight": normal(4, 4, seed=5)}
    return calls(lambda x: functional_call(model, other, (x,)), *SIZES, observe=lambda: model[2].weight)


@program
def rows_of_models():
    models = [perceptron(seed) for seed in range(3)]
    weights, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def run(weights, buffers, x):
        return functional_call(base, (weights, buffers), (x,))

    return calls(lambda x: torch.vmap(run, (0, 0, None))(weights, buffers, x), *SIZES)


@program
def rows_that_read_values():
    log = []

    def row(a):
        log.append(1)
        return a * 2 if a.sum() > 0 else a * a.sum().item()

    return calls(lambda x: torch.vmap(row)(x), *SIZES, observe=lambda: len(log))


@program
def attention_with_functions():
    slopes = torch.tensor([0.5, 0.25])

    def falling(score, batch, head, query, key):
        return torch.where(query >= key, score - (query - key) * slopes[head] * 0.1, -float("inf"))

    def fn(x):
        q, k, v = x.view(1, 2, -1, 2), x.view(1, 1, -1, 4)[..., :2], x.view(1, 2, -1, 2).sin()
        turned = q.transpose(1, 2).contiguous().transpose(1, 2)
        with_sums = flex_attention(q, q, v, score_mod=falling, return_aux=AuxRequest(lse=True))
        return with_sums, flex_attention(turned, k, k, enable_gqa=True, scale=0.3)

    return calls(fn, *SIZES)


@program
def attention_in_blocks():
    def near(batch, head, query, key):
        return (query - key).abs() < 3

    blocks = create_block_mask(near, None, None, 4, 4, device="cpu", BLOCK_SIZE=2)
    return calls(
        lambda x: flex_attention(x[None, None], x[None, None], x[None, None], block_mask=blocks), *ROWS
    )


@program
def functions_over_rows():
    weight = normal(4, seed=2)

    def step(carried, row):
        return carried + row["x"] * weight, carried.sin()

    def fn(x):
        carried = scan(step, torch.zeros(4), {"x": x}, reverse=True)
        return carried, control_flow_map(lambda row, other: (row * other).cos(), x, weight)

    return calls(fn, *SIZES)


@program
def items_replaced_again():
    kept, log = {"a": None, "b": 0}, []

    def fn(x):
        kept["a"] = x + 1
        kept["b"] = 2
        before = dict(kept)
        kept["a"] = x * 2
        log.append(before["b"])
        kept["new"] = 1
        kept["b"] = kept["new"] = 3
        kept["a"] = before["a"] * 3
        return before, list(kept), kept["a"] * 2

    return calls(fn, *SIZES, observe=lambda: (dict(kept), list(log)))


@program
def pairs_in_order():
    """Tuples with tensors that all begin otherwise are ordered by what they begin with."""
    standing = {"b": torch.ones(2), "a": torch.zeros(2)}

    def fn(x):
        order = (
            [name for name, _ in sorted(standing.items())],
            sorted([(2, x), (1, x + 1), (3,)], reverse=True),
        )
        least = min({"q": x, "p": x}.items())[0], max(((2.0, x), (1.5, x)))[0]
        return order, least, sorted([((1, 2), x), ((1, 1), x)])[0][0]

    return calls(fn, *SIZES)


@program
def texts_of_tuples_of_sizes():
    def fn(x):
        rows = tuple(x.shape)
        return x + 1, f"{rows}, {(x.shape[0], 'a', None)!r:>24}, {rows!s}, {(1, 2)}, {()}"

    return calls(fn, *SIZES)


@program
def rows_that_stay():
    """What is kept of a row, as in a dictionary of parameters that were swapped, is read no more."""
    kept = []

    def row(a):
        kept[:] = [a * 2]
        return a.sum()

    return calls(lambda x: torch.vmap(row)(x + 1) * 2, *SIZES)
