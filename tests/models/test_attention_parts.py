"""Attention in plans for GPUs: which form it takes, who serves it, and what its kernel gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attention_layout
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import ladder
from ladder.frontend.torch_fx import import_fx
from ladder.ir import GraphBuilder, evaluate
from ladder.ir.attention import Attention
from ladder.ir.attention_row import operand_names
from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph
from ladder.lower.build import ATTENTION, resolve
from ladder.partition import Subgraph, partition
from ladder.partition.attention import OPEN_REASON, chosen, node_of, served
from ladder.rewrite import simplify
from ladder.runtime.model.attention import as_bias, attention_call, in_order, library_attention
from ladder.runtime.operator import attend
from ladder.simulate import simulate_launch
from schedules.attention import AnySchedule
from targets import TileDevice, get_device

DEVICE = get_device("cuda/sm_90a")
KEYS, SIZE = 40, 32


class Decode(nn.Module):
    """One step with a static cache; how the mask and the cache are written is the case."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def forward(self, x: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = x.view(b, t, 4, SIZE).transpose(1, 2)
        mask: Tensor | None = torch.arange(KEYS) <= position[:, None]
        if self.case == "float mask":
            mask = torch.zeros(t, KEYS, dtype=x.dtype).masked_fill(~mask, -1e4)
        if self.case == "offset":  # transformers adds what the cache has dropped: of a static one, 0
            mask = torch.arange(KEYS) + 0 <= position[:, None]
        if self.case == "strict":
            mask = torch.arange(KEYS)[None, None] < position[:, None]
        if self.case in ("no mask", "causal"):
            mask = None
        if self.case == "codes":
            k, v = ((c.float() * s).to(x.dtype) for c, s in ((k, scale), (v, scale)))
        if self.case == "repeated":
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        causal = self.case == "causal"
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(b, t, -1)


def arguments(case: str, tokens: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(2, tokens, 4 * SIZE).to(dtype)
    k, v = torch.randn(2, 2, 2, KEYS, SIZE).to(dtype).unbind(0)
    if case == "codes":
        k, v = ((value * 30).round().clamp(-127, 127).to(torch.int8) for value in (k, v))
    position = torch.arange(tokens) + 17
    return x, k, v, position, torch.rand(2, 2, KEYS, 1) * 0.03


def parts_of(case: str, tokens: int = 1, device: TileDevice = DEVICE) -> tuple[Graph, list[Subgraph]]:
    found: list[Graph] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append(simplify(import_fx(module, examples).graph, device))
        return module

    with torch.no_grad():
        ladder.compile(Decode(case), backend=backend)(*arguments(case, tokens))
    (graph,) = found
    return graph, partition(graph, device=device)


def simulated(graph: Graph, device: TileDevice = DEVICE) -> Callable[..., None]:
    """Return the call of a part whose kernel runs on the simulator."""
    form, choice = chosen(graph, node_of(graph), device)
    return attention_call([simulated_kernel(form, choice.schedule, device)], graph, device)


def simulated_kernel(
    form: Attention, schedule: AnySchedule, device: TileDevice = DEVICE
) -> Callable[..., None]:
    function = resolve(ATTENTION, "target kind", device.kind)(form, device, schedule, "simulated")

    def entry(*values: Any) -> None:
        arrays = [value if isinstance(value, int) else value.numpy() for value in values]
        result = simulate_launch(function, arrays, target=device)
        assert not result.findings, result.report()

    return entry


CASES = {
    "no mask": {"causal": False}, "strict": {"extras": ("position",), "reach": 0},
    "position": {"extras": ("position",), "reach": 1}, "offset": {"extras": ("position",), "reach": 1},
    "float mask": {"choose": False}, "codes": {"extras": ("position", "k_scale", "v_scale"), "reach": 1},
    "repeated": {"extras": ("position",), "reach": 1}, "causal": {"causal": True},
}  # fmt: skip


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_decoding_is_ours_and_right(case: str, tokens: int, target: str) -> None:
    device = get_device(target)
    _, parts = parts_of(case, tokens, device)
    (part,) = (part for part in parts if "attention" in part.operators)
    assert part.kind == "attention", part.reason
    node = node_of(part.graph)
    attributes = node_attributes(node)
    turned = tokens > 1  # one token's heads lie as they are wanted
    assert attributes == attributes | CASES[case] | {"turned": turned}
    x, k, v, position, scale = arguments(case, tokens)
    named = {"position": position[None], "k_scale": scale, "v_scale": scale}
    mask = torch.where(torch.arange(KEYS) <= position[:, None], 0.0, -1e4).half()
    extras = operand_names(len(node.inputs), attributes)[3:]
    q = x.view(2, tokens, 4, SIZE).transpose(1, 2)
    operands = [q, k, v, *(mask if name == "mask" else named[name] for name in extras)]
    out = torch.full((2, tokens, 4, SIZE) if turned else (2, 4, 1, SIZE), float("nan"), dtype=x.dtype)
    simulated(part.graph, device)(*operands, out)
    wide = Decode(case)(
        *(value.float() if value.is_floating_point() else value for value in arguments(case, tokens))
    )
    expected = wide.view_as(out).double().numpy()
    got = out.double().numpy()
    assert np.linalg.norm(got - expected) < 2e-3 * np.linalg.norm(expected)
    torchs = library_attention(node)(*operands).double().numpy()
    assert np.linalg.norm(torchs - expected) < 2e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(("tokens", "stays"), [(64, False), (65, True)])
def test_masks_of_many_tokens_stay(tokens: int, stays: bool) -> None:
    graph, _ = parts_of("offset", tokens)
    attributes = node_attributes(node_of(graph))
    assert (attributes["choose"], "position" in attributes["extras"]) == (stays, not stays)


@pytest.mark.parametrize("ttype", ["float16", "int8"])
def test_a_cache_that_is_updated_by_position(ttype: str) -> None:
    """The same as a cache that counts, whose tokens so far are those up to the position."""
    torch.manual_seed(0)
    counted, placed = ladder.KVCache(1, 2, 8, 16, ttype), ladder.KVCache(1, 2, 8, 16, ttype)
    for at in range(3):
        keys, values = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)
        expected = counted.append(keys, values)
        found = placed.update(keys, values, torch.tensor([at]))
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got[:, :, : at + 1], wanted)


def ones() -> Tensor:
    """Return a square of truth."""
    return torch.ones(9, 9, dtype=torch.bool)


REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": lambda mask: ones().triu(1),
    "window": lambda mask: ones().triu(1) | ones().tril(-4),
    "causal, slopes": lambda mask: ones().triu(1),
    "all are seen": lambda mask: ones().triu(9),
    "a row sees nothing": lambda mask: ones().triu(0),
    "an input": lambda mask: mask > 0,
}
"""Case -> which scores are replaced by the least number."""


class SpeltOut(nn.Module):
    """Attention as BERT has it, and forms near it."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = x.view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2)
        if self.case in REPLACED:
            scores = scores / 4.0 + torch.arange(9) * 0.5 if "slopes" in self.case else scores / 4.0
            scores = scores.masked_fill(REPLACED[self.case](mask), torch.finfo(scores.dtype).min)
        elif self.case == "mask before scale":
            scores = (scores + mask) * 0.5
        else:
            scores = scores / 4.0 + mask if self.case != "no mask" else scores * 0.25
        if self.case == "other axis":
            weights = scores.softmax(2)
        elif self.case == "no softmax":
            weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + 1.0)
        else:
            weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(2, 9, 64)


ATTENTION_PATTERNS = {
    "mask": 1, "no mask": 1, "mask before scale": 0, "other axis": 0, "no softmax": 0, "causal": 1,
    "window": 1, "causal, slopes": 1, "all are seen": 1, "a row sees nothing": 0, "an input": 0,
}  # fmt: skip
"""Case -> how many attentions are found."""


def simplified(module: torch.nn.Module, *arguments: Tensor) -> list[Graph]:
    """Return a module's graph as it is captured, and as it is simplified."""
    found: list[Graph] = []

    def backend(captured: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graph = import_fx(captured, examples).graph
        found.extend((graph, simplify(graph, DEVICE)))
        return captured

    with torch.no_grad():
        ladder.compile(module, backend=backend)(*arguments)
    return found


@pytest.mark.parametrize("case", ATTENTION_PATTERNS)
def test_attention_that_is_spelt_out(case: str) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 9, 192), torch.randn(2, 1, 1, 9)
    before, after = simplified(SpeltOut(case), x, mask)
    assert sum(node.operator == "attention" for node in after.nodes) == ATTENTION_PATTERNS[case]
    given = {tuple(value.shape): value.double().numpy() for value in (x, mask)}
    inputs = [given[node.tile.known_shape] for node in before.inputs]
    again = [given[node.tile.known_shape] for node in after.inputs]
    assert np.allclose(evaluate(after, again), evaluate(before, inputs), atol=1e-12)


INFINITE = float("-inf")


def transformers_mask(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores, as libraries make it of 1 where a text has a token."""
    batch, keys = torch.arange(shown.shape[0]), torch.arange(shown.shape[1]) + 0
    seen = (shown != 0)[batch[:, None, None, None], keys[None, None, None]]
    seen = (torch.arange(9)[:, None] >= 0) & seen
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)


KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "all": (lambda x: (torch.arange(9) >= 0).expand(2, 1, 9, 9), "none"),
    "behind": (lambda x: (torch.arange(9) <= torch.arange(9)[:, None]).expand(2, 1, 9, 9), "causal"),
    "tril": (lambda x: ones().tril(), "causal"),
    "infinities": (lambda x: torch.full((9, 9), INFINITE).triu(1).to(x.dtype), "causal"),
    "filled": (lambda x: torch.zeros(9, 9).masked_fill(ones().triu(1), INFINITE).to(x.dtype), "causal"),
    "zeros": (lambda x: torch.zeros(9, 9).masked_fill(~ones(), INFINITE).to(x.dtype), "none"),
    "torch's": (lambda x: nn.Transformer.generate_square_subsequent_mask(9, dtype=x.dtype), "causal"),
    "finite, none hidden": (lambda x: torch.where(ones(), 0.0, -1e4).to(x.dtype), "none"),
    "texts without borders": (lambda x: transformers_mask(torch.ones(2, 9), x.dtype), "none"),
    "texts with borders": (lambda x: transformers_mask((x[..., 0] < 9).float(), x.dtype), "mask"),
    "window": (lambda x: ones().tril().triu(-4), "mask"),
    "the token itself is hidden": (lambda x: ones().tril(-1), "mask"),
    "finite": (lambda x: torch.full((9, 9), -1e4).triu(1).to(x.dtype), "mask"),
    "slopes": (lambda x: (torch.arange(9) * 0.5).expand(9, 9).to(x.dtype), "mask"),
    "an input": (lambda x: (x[0, :, 0] > -9).expand(9, 9), "mask"),
}
"""Masks, and what attention keeps of each."""


@pytest.mark.parametrize("case", KNOWN)
def test_masks_that_are_known_while_compiling(case: str) -> None:
    """Those of all keys are dropped, those of the keys so far are an attribute."""
    make, keeps = KNOWN[case]

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = x.view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=make(x))

    torch.manual_seed(0)
    x = torch.randn(2, 9, 192)
    before, after = simplified(Masked(), x)
    (node,) = (node for node in after.nodes if node.operator == "attention")
    given = node_attributes(node)
    assert keeps == ("mask" if len(node.inputs) > 3 else "causal" if given["causal"] else "none")
    with np.errstate(invalid="ignore"):  # a row that sees nothing is 0 / 0
        expected, found = (evaluate(graph, [x.double().numpy()]) for graph in (before, after))
    assert np.allclose(found, expected, atol=1e-12, equal_nan=True)


def test_masks_of_open_sizes() -> None:
    """What a mask hides is no constant where it depends on a size."""

    class Masked(nn.Module):
        def forward(self, q: Tensor, x: Tensor) -> Tensor:
            seen = torch.arange(9) < x.shape[0]
            behind = torch.arange(x.shape[0]) <= torch.arange(x.shape[0])[:, None]
            own = F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], behind)
            return F.scaled_dot_product_attention(q, q, q, seen[None]) + own.sum()

    torch.manual_seed(0)
    q, fast = torch.randn(1, 2, 9, 8), ladder.compile(Masked())
    with torch.no_grad():
        for size in (3, 5, 9, 2, 12):
            x = torch.randn(size, 8)
            torch.testing.assert_close(fast(q, x), Masked()(q, x))


def test_heads_that_no_kernel_takes_are_torchs() -> None:
    g = GraphBuilder("model")
    operands = [g.input(name, "float16", (2, 4, 1, 6)) for name in "qkv"]
    (part,) = partition(g.finish(g.add("attention", *operands)), device=DEVICE)
    assert (part.kind, part.reason) == ("library", "torch's: heads of 6 elements have no kernel")


@pytest.mark.parametrize("size", [6, 20, 8])
def test_heads_are_filled_up_to_what_kernels_take(size: int) -> None:
    class Attending(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    torch.manual_seed(0)
    operands = torch.randn(3, 2, 4, 5, size).half().unbind(0)
    before, after = simplified(Attending(), *operands)
    (node,) = (node for node in after.nodes if node.operator == "attention")
    assert after.tile(node.inputs[0]).shape[-1] == -(-size // 8) * 8
    assert any(part.kind == "attention" for part in partition(after, device=DEVICE))
    values = [x.double().numpy() for x in operands]
    assert np.allclose(evaluate(after, values), evaluate(before, values), atol=1e-12)


def test_masks_are_added_where_attention_is_torchs() -> None:
    """Once for all layers, and of what repeats along tokens only that."""

    class Twice(nn.Module):
        def forward(self, q: Tensor, seen: Tensor) -> Tensor:
            mask = (seen[:, None, None] > 0).expand(-1, 1, q.shape[-2], -1)
            for _ in range(2):
                q = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return q

    for batch, tokens, added in ((8, 512, True), (1, 4, False)):
        q, seen = torch.randn(batch, 12, tokens, 64).half(), torch.ones(batch, tokens)
        _, after = simplified(Twice(), q, seen)
        first, second = (node for node in after.nodes if node.operator == "attention")
        assert first.inputs[3] == second.inputs[3]
        assert node_attributes(first)["choose"] == node_attributes(second)["choose"] == (not added)
        assert after.tile(first.inputs[3]).ttype.name == ("float16" if added else "bool")
        assert {node.tile.shape for node in after.nodes if node.operator == "select"} == (
            {(batch, 1, 1, tokens)} if added else set()
        )


def test_torchs_attention_gets_masks_whose_rows_are_dense() -> None:
    """Else it takes all scores to memory; what repeats along other axes still does."""
    row = torch.tensor([True, False, True])
    for mask in (row[:, None].expand(2, 1, 3, 3), row.expand(2, 1, 3, 3), torch.eye(3).t()[None, None]):
        found = in_order(mask)
        assert torch.equal(found, mask)
        assert found.stride(-1) == 1
        assert found.untyped_storage().nbytes() <= 9 * mask.element_size()
    found = as_bias(row[:, None].expand(2, 1, 3, 3), torch.float16)
    assert found.dtype == torch.float16
    assert found.stride()[0] == 0
    assert torch.equal(found == 0, row[:, None].expand(2, 1, 3, 3))
    assert torch.equal(found == INFINITE, ~row[:, None].expand(2, 1, 3, 3))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("masked", ["no", "keys", "all", "mixed"])
def test_attention_of_any_number_of_axes(lead: tuple[int, ...], masked: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *lead, 2, 5, 8).unbind(0)
    spread = {"no": (), "keys": (), "all": (*lead, 2), "mixed": (*(1 for _ in lead[1:]), *lead[-1:], 1)}
    mask = None if masked == "no" else torch.randn(*spread[masked], 5, 5)

    class Attending(nn.Module):
        def forward(self, *operands: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*operands)

    operands = (q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v, *(() if mask is None else (mask,)))
    exact = F.scaled_dot_product_attention(*(x.double() for x in operands))
    with torch.no_grad():
        torch.testing.assert_close(ladder.compile(Attending())(*operands).double(), exact, rtol=0, atol=1e-5)


def test_open_sizes_take_a_kernel_or_torchs() -> None:
    """A few kernels serve every size; long prompts go to torch, and so does nothing."""
    g = GraphBuilder("model")
    shapes = (("b", 4, "t", SIZE), ("b", 2, "s + t", SIZE), ("b", 2, "s + t", SIZE))
    operands = [g.input(name, "float16", shape) for name, shape in zip("qkv", shapes, strict=True)]
    (part,) = partition(g.finish(g.add("attention", *operands)), device=DEVICE)
    assert (part.kind, part.reason) == ("attention", OPEN_REASON)
    form, schedules = served(part.graph, node_of(part.graph), DEVICE)
    assert 1 < len(schedules) <= 4
    used: list[int] = []

    def counted(at: int) -> Callable[..., None]:
        entry = simulated_kernel(form, schedules[at])
        return lambda *values: (used.append(at), entry(*values))[1]

    call = attention_call([counted(at) for at in range(len(schedules))], part.graph, DEVICE)
    for batch, tokens, keys in ((1, 1, 1), (2, 1, 37), (1, 3, 40), (1, 1, 700), (1, 2000, 2000), (0, 1, 8)):
        q = torch.randn(batch, 4, tokens, SIZE).half()
        k, v = torch.randn(2, batch, 2, keys, SIZE).half().unbind(0)
        found = call(q, k, v, torch.full_like(q, float("nan")))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
        assert torch.linalg.norm(found.double() - exact) <= 2e-3 * torch.linalg.norm(exact)
    assert 0 < len(used) < 5  # 2000 tokens are torch's, and so is nothing


@pytest.mark.parametrize("tokens", [9, "t"])
def test_one_tensor_may_be_queries_keys_and_values(tokens: int | str) -> None:
    """A part has each of its inputs once, in an order of its own."""
    g = GraphBuilder("model")
    mask = g.input("mask", "float16", (tokens, tokens))
    x = g.input("x", "float16", (2, 4, tokens, SIZE))
    (part,) = partition(g.finish(g.add("attention", x, x, x, mask)), device=DEVICE)
    assert part.kind == "attention", part.reason
    torch.manual_seed(0)
    hidden, values = torch.randn(9, 9).half(), torch.randn(2, 4, 9, SIZE).half()
    given = [{"mask": hidden, "x": values}[value] for value in part.inputs]
    if tokens == 9:
        call = simulated(part.graph)
    else:
        form, schedules = served(part.graph, node_of(part.graph), DEVICE)
        kernels = [simulated_kernel(form, schedule) for schedule in schedules]
        call = attention_call(kernels, part.graph, DEVICE)
    found = call(*given, torch.full_like(values, float("nan")))
    exact = F.scaled_dot_product_attention(*[values.double()] * 3, attn_mask=hidden.double())
    assert torch.linalg.norm(found.double() - exact) <= 2e-3 * torch.linalg.norm(exact)


class Turned(nn.Module):
    """Attention of rotated queries, as Llama has it."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (part.view(2, 9, 4, 16).transpose(1, 2) for part in x.split(64, -1))
        cos, sin = angles.cos(), angles.sin()
        q, k = (y * cos + torch.cat((-y[..., 8:], y[..., :8]), -1) * sin for y in (q, k))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def test_queries_are_computed_token_by_token() -> None:
    """Then so is attention's result, which nobody copies."""
    torch.manual_seed(0)
    x, angles = torch.randn(2, 9, 192), torch.randn(9, 16)
    before, after = simplified(Turned(), x, angles)
    (node,) = (node for node in after.nodes if node.operator == "attention")
    q = after.producer(node.inputs[0])
    assert (q.operator, after.tile(q.inputs[0]).shape) == ("transpose", (2, 9, 4, 16))
    given = [x.double().numpy(), angles.double().numpy()]
    assert np.allclose(evaluate(after, given), evaluate(before, given), atol=1e-12)


def test_nothing_to_attend_to_is_torchs() -> None:
    g = GraphBuilder("part")
    q, k, v = (g.input(n, "float16", (1, 2, t, 64)) for n, t in (("q", 1), ("k", 0), ("v", 0)))
    graph = g.finish(g.add("attention", q, k, v))
    (part,) = (part for part in partition(graph, device=DEVICE) if "attention" in part.operators)
    assert (part.kind, part.reason) == ("library", "torch's: there is nothing to attend to")


PROBE = """
import sys
from pathlib import Path
import ladder.lower.build as build
from ladder.ir import GraphBuilder
from ladder.runtime.model.attention import attention_job
from targets import TileDevice, get_device
g = GraphBuilder("part")
q, k, v = (g.input(n, "float16", (1, 2, t, 64)) for n, t in (("q", 1), ("k", 64), ("v", 64)))
job = attention_job(g.finish(g.add("attention", q, k, v)), get_device("cuda/sm_90a"))
build.build_function = lambda emitted, name, device, folder: name
job.make(Path())
assert "tvm" not in sys.modules, "TVM is imported outside of the turn with it"
"""


def test_the_compiler_is_imported_in_its_turn() -> None:
    """Two threads that import TVM at once see modules that are not whole."""
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("case", attention_layout.CASES)
def test_strides_of_the_result_are_torchs(case: str) -> None:
    """On CPUs; whether a reshape is a view, through which the result is written, depends on them."""
    attention_layout.check_strides(case, "cpu", torch.float16 if case == "half" else torch.float32)


REPLACING: dict[str, Callable[..., Tensor]] = {
    "added": lambda scores, mask: scores + mask,
    "replaced by the least number": lambda s, mask: s.masked_fill(mask < 0, torch.finfo(s.dtype).min),
    "replaced where an input says so": lambda s, mask: s.masked_fill(mask, torch.finfo(s.dtype).min),
}


@pytest.mark.parametrize("case", REPLACING)
def test_attention_written_as_several_operators_on_cpus(case: str) -> None:
    """Rows of which a mask hides all keys are what softmax makes of them, not 0 as torch's operator has."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return REPLACING[case](q @ k.transpose(-1, -2) * 0.5, mask).softmax(-1) @ v

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    mask = torch.zeros(2, 1, 6, 6)
    mask[0, 0, 2] = mask[1, 0, 3, :3] = -torch.inf
    mask, none = (mask < 0, mask > 0) if "input" in case else (mask, mask.clamp(min=0))
    fast = ladder.compile(attention)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(q, k, v, mask), attention(q, k, v, mask), equal_nan=True)
        torch.testing.assert_close(fast(q, k, v, none), attention(q, k, v, none), equal_nan=True)
    assert "attention" in str(fast.plan())


def test_heads_of_keys_may_be_an_open_extent() -> None:
    """A cache whose extents are all open, as of an encoder, has as many heads as the queries."""
    q, k = torch.randn(2, 32), torch.randn(2, 4, 6, 8)

    def cross(q: Tensor, k: Tensor) -> Tensor:
        return attend(q.view(q.shape[0], 4, 1, 8), k, k)

    traced = make_fx(cross, tracing_mode="symbolic")(q, k)
    torch.testing.assert_close(traced(q, k), cross(q, k))
