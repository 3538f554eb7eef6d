"""The weight of a quantized layer answers for its type and shape without being dequantized."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import ladder
from ladder.api.stored_weight import DecodedValues, StoredWeight
from ladder.integrations import dynamo

N, K = 48, 64


@pytest.fixture
def layer() -> ladder.Linear:
    torch.manual_seed(5)
    return ladder.Linear.from_linear(torch.nn.Linear(K, N), "int4", group_size=32)


def exact(layer: ladder.Linear) -> torch.Tensor:
    values: torch.Tensor = layer.canonical.dequantize("float32")
    return values


class Asked(Exception):
    """Values were asked for."""


@pytest.fixture
def undecodable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dequantization fail."""

    def fails(*_: Any) -> None:
        raise Asked

    monkeypatch.setattr(ladder.QuantizedTensor, "dequantize", fails)


METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda w: w.dtype,
    "shape": lambda w: w.shape,
    "device": lambda w: w.device,
    "size": lambda w: (w.size(), w.size(-1)),
    "length": len,
    "dimensions": lambda w: (w.ndim, w.dim(), w.numel(), w.element_size()),
    "strides": lambda w: (w.stride(), w.is_contiguous()),
    "kind": lambda w: (isinstance(w, torch.Tensor), w.is_floating_point(), w.is_cuda, w.requires_grad),
    "place": lambda w: (w.is_cpu, w.is_meta, w.get_device(), w.layout, w.device.type),
}


@pytest.mark.parametrize("what", METADATA)
@pytest.mark.usefixtures("undecodable")
def test_metadata_needs_no_values(layer: ladder.Linear, what: str) -> None:
    assert METADATA[what](layer.weight) == METADATA[what](torch.nn.Linear(K, N).weight.detach())
    with pytest.raises(Asked):
        layer.weight.sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_type_follows_the_layer(layer: ladder.Linear, dtype: torch.dtype) -> None:
    moved = layer.to(dtype)
    assert moved.weight.dtype == dtype == moved.weight.clone().dtype
    assert torch.equal(moved.weight, exact(layer).to(dtype)) or dtype != torch.float32


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda w: w[3, 5].item(),
    "array": lambda w: torch.from_numpy(w.numpy()),
    "numpy": lambda w: torch.from_numpy(np.asarray(w)),
    "converted": lambda w: w.double().T,
    "data": lambda w: w.data,
    "copied": copy.deepcopy,
    "pickled": lambda w: pickle.loads(pickle.dumps(w)),
    "listed": lambda w: torch.stack([w, w]),
    "keyword": lambda w: functional.linear(torch.ones(1, K), weight=w),
    "operator": lambda w: 2 - w,
    "from C++": lambda w: torch.ops.aten.mm.default(w, w.t()),
    "text": repr,
    "first": lambda w: next(iter(w)),
}


@pytest.mark.parametrize("use", USES)
def test_uses_of_the_values_are_those_of_a_plain_tensor(layer: ladder.Linear, use: str) -> None:
    found, want = USES[use](layer.weight), USES[use](exact(layer))
    assert type(found) is (DecodedValues if use in ("data", "first") else type(want))
    assert torch.equal(found, want) if isinstance(want, torch.Tensor) else found == want


def other_data(w: torch.Tensor) -> None:
    w.data = torch.zeros(N, K)


def one_row(w: torch.Tensor) -> None:
    w.data[0] = 1


def added(w: torch.Tensor) -> None:
    w = w.data
    w += 1


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda w: w.data.mul_(2),
    "copied": lambda w: w.data.copy_(torch.zeros(N, K)),
    "other data": other_data,
    "other data twice": lambda w: other_data(w.data),
    "row": one_row,
    "added": added,
    "view": lambda w: w.data.view(-1)[3:].zero_(),
    "detached": lambda w: w.detach().t().zero_(),
    "first": lambda w: next(iter(w)).zero_(),
    "initialised": lambda w: torch.nn.init.normal_(w.data),
    "operator": lambda w: torch.ops.aten.mul_.Scalar(w.data, 2),
    "several": lambda w: torch._foreach_mul_([torch.ones(2), w.data], 2),
    "output": lambda w: torch.add(torch.ones(N, K), 1, out=w.data),
    "function": lambda w: functional.relu(w.data, True),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_refused(layer: ladder.Linear, write: str, inference: bool) -> None:
    before = exact(layer)
    with torch.inference_mode(inference), pytest.raises(ladder.LadderError, match="set_weight"):
        WRITES[write](layer.weight)
    assert torch.equal(layer.weight, before)


LOST = [("ladder", write) for write in ("data", "other data", "row", "added", "initialised", "output")]
LOST += [("torch", write) for write in ("data", "row", "added", "initialised")]
LOST += [("torch", write) for write in ("other data", "several", "output")]  # torch breaks graphs at these


@pytest.mark.parametrize(("compiler", "write"), LOST)
def test_compiled_functions_refuse_writes_too(layer: ladder.Linear, compiler: str, write: str) -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        WRITES[write](layer.weight)
        return layer(x)

    fast = ladder.compile(written) if compiler == "ladder" else torch.compile(written, backend="ladder")
    for _ in range(2):
        with torch.no_grad(), pytest.raises(Exception, match="set_weight") as raised:
            fast(torch.ones(3, K))
        assert compiler == "torch" or raised.type is ladder.LadderError


BEHIND: dict[str, Callable[[torch.Tensor], Any]] = {
    "weight": lambda w: w,
    "data": lambda w: w.data,
    "row": lambda w: w[0],
}


@pytest.mark.parametrize("what", BEHIND)
def test_what_leaves_a_graph_is_not_written(layer: ladder.Linear, what: str) -> None:
    """Behind a graph break, by code that is not compiled, and by who called."""

    def written(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = BEHIND[what](layer.weight)
        torch._dynamo.graph_break()
        found.mul_(2)
        return layer(x)

    def given(_: torch.Tensor) -> torch.Tensor:
        return BEHIND[what](layer.weight)

    def added(x: torch.Tensor) -> torch.Tensor:
        found = BEHIND[what](layer.weight)
        torch._dynamo.graph_break()
        return found + x[0, 0]

    torch._dynamo.reset()
    fast, read = torch.compile(written, backend="ladder"), torch.compile(added, backend="ladder")
    leaves, x = torch.compile(given, backend="ladder"), torch.ones(3, K)
    for _ in range(2):
        with torch.no_grad():
            with pytest.raises(Exception, match="set_weight"):
                fast(x)
            with pytest.raises(ladder.LadderError, match="set_weight"):
                leaves(x).zero_()
            sums = read(x)
            assert type(sums) is torch.Tensor
            assert torch.equal(sums, BEHIND[what](exact(layer)) + 1)


@pytest.mark.parametrize("what", BEHIND)
def test_what_a_captured_program_gives_is_not_written(layer: ladder.Linear, what: str) -> None:
    kept = []

    def given(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = BEHIND[what](layer.weight)
        kept.append(found)
        if len(x.flatten().tolist()) > 64:  # the graph breaks
            found = found.t()
        return found

    fast, x = ladder.compile(given), torch.ones(3, K)
    with torch.no_grad():
        for _ in range(3):
            found = fast(x)
            for each in (found, kept.pop()):
                with pytest.raises(ladder.LadderError, match="set_weight"):
                    each.zero_()
            assert torch.equal(found + 1, BEHIND[what](exact(layer)).t() + 1)
    assert fast.outcome == "split"


def test_compiled_functions_may_write_copies(layer: ladder.Linear) -> None:
    def copied(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, layer.weight.clone().mul_(2))

    fast, x = ladder.compile(copied), torch.ones(3, K)
    with torch.no_grad():
        assert all(torch.allclose(fast(x), x @ (2 * exact(layer)).T, rtol=1e-4, atol=1e-4) for _ in range(2))


OWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "copied": copy.deepcopy,
    "pickled": lambda w: pickle.loads(pickle.dumps(w)),
    "cloned": torch.clone,
    "sum": lambda w: w + 0,
    "rows": lambda w: w[[0, 1]],
    "parameter": torch.nn.Parameter,
    "parameter without gradient": lambda w: torch.nn.Parameter(w, requires_grad=False),
}


@pytest.mark.parametrize("make", OWN)
def test_what_is_made_of_values_is_plain(layer: ladder.Linear, make: str) -> None:
    made = OWN[make](layer.weight.data)
    assert type(made) is (torch.nn.Parameter if "parameter" in make else torch.Tensor)
    with torch.no_grad():
        assert not made.zero_().any()
    assert layer.weight.any()


def test_a_layer_of_decoded_values_learns(layer: ladder.Linear) -> None:
    plain = torch.nn.Linear(K, N)
    plain.weight = torch.nn.Parameter(layer.weight.data)
    plain(torch.ones(2, K)).sum().backward()
    torch.optim.SGD(plain.parameters(), 0.5).step()
    assert torch.equal(plain.weight, exact(layer) - 1)
    assert torch.equal(copy.deepcopy(plain).half().weight, plain.weight.half())


def test_no_tensor_takes_memory_that_is_not_there(layer: ladder.Linear) -> None:
    """Torch's setter of ``data`` takes the memory, and asks the tensor nothing."""
    parameter = torch.nn.Parameter(torch.zeros(N, K), requires_grad=False)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = layer.weight
    parameter.data = layer.weight.data
    assert torch.equal(parameter + 1, exact(layer) + 1)


@pytest.mark.parametrize("given", [torch.zeros(N, K), torch.nn.Parameter(torch.zeros(N, K))])
def test_another_weight_in_its_place_is_refused(layer: ladder.Linear, given: torch.Tensor) -> None:
    before = exact(layer)
    with pytest.raises(ladder.LadderError, match="set_weight"):
        layer.weight = given
    assert torch.equal(exact(layer), before)


def test_a_weight_lies_where_it_will_be() -> None:
    weight = StoredWeight((2, 3), torch.float16, torch.device("cuda:1"), lambda: torch.zeros(2, 3).half())
    assert weight.device == torch.device("cuda:1")
    assert (weight.is_cuda, weight.is_cpu) == (True, False)
    assert weight.get_device() == 1


def test_values_are_computed_once_for_each_access(layer: ladder.Linear) -> None:
    computed: list[torch.Tensor] = []

    def compute() -> torch.Tensor:
        computed.append(torch.ones(2, 3))
        return computed[-1]

    weight = StoredWeight((2, 3), torch.float32, torch.device("cpu"), compute)
    assert not computed
    assert torch.equal(weight + 1, weight * 2)
    assert len(computed) == 1
    assert layer.weight is not layer.weight


class AsksForItsType(torch.nn.Module):
    """As transformers' T5: the input takes the type of the next weight."""

    def __init__(self, inner: ladder.Linear) -> None:
        super().__init__()
        self.wo = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.wo.weight
        if isinstance(weight, torch.Tensor) and x.dtype != weight.dtype and weight.dtype != torch.int8:
            x = x.to(self.wo.weight.dtype)
        result: torch.Tensor = self.wo(x) * weight.shape[0]
        return result


class TakesValues(AsksForItsType):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.to(self.wo.weight.dtype), self.wo.weight) + self.wo(x.float())


WAYS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "ladder": ladder.compile,
    "torch": lambda model: torch.compile(model, backend=dynamo.backend, fullgraph=True),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", [AsksForItsType, TakesValues])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_hold_it_whole(layer: ladder.Linear, kind: Any, way: str) -> None:
    model, x = kind(layer), torch.randn(3, K).double()
    torch._dynamo.reset()
    fast = WAYS[way](model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
        other = ladder.Linear.from_linear(torch.nn.Linear(K, N), "int4", group_size=32)
        layer.set_weight(other.canonical)
        torch.testing.assert_close(fast(x), model(x))
    if way == "ladder":
        assert fast.outcome == "whole"


def test_a_type_that_is_asked_for_leaves_no_step(layer: ladder.Linear) -> None:
    fast, both = ladder.compile(AsksForItsType(layer)), ladder.compile(TakesValues(layer))
    with torch.no_grad():
        fast(torch.randn(3, K))
        both(torch.randn(3, K))
    assert "0 in torch" in fast.explain()
    assert "0 in torch" not in both.explain()


def test_exported_programs_hold_it(layer: ladder.Linear) -> None:
    x = torch.randn(3, K)
    model = TakesValues(layer)
    with torch.no_grad():
        made = torch.export.export(model, (x,))
        torch.testing.assert_close(made.module()(x), model(x))


class HoldsData(torch.nn.Module):
    """Decoded values as an attribute, and a view of them."""

    def __init__(self, inner: ladder.Linear) -> None:
        super().__init__()
        self.wo, self.held = inner, inner.weight.data
        self.turned = self.held.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned + functional.linear(x, self.held, bias=self.held[:, 0]) + self.wo(x)


TRACED: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "make_fx": lambda model, x: make_fx(model)(x),
    "exported": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "exported by dynamo": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "torch": lambda model, x: torch.compile(model, backend=dynamo.backend, fullgraph=True),
}


@pytest.mark.parametrize("way", TRACED)
def test_tracers_take_decoded_values_that_a_module_holds(layer: ladder.Linear, way: str) -> None:
    """Tracers knew none but torch's own classes: only clones could be held."""
    model, x = HoldsData(layer), torch.randn(3, K)
    torch._dynamo.reset()
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(TRACED[way](model, x)(x), want)
    assert type(model.held) is DecodedValues
    with pytest.raises(ladder.LadderError, match="nobody reads again"):
        model.held.mul_(2)


def test_without_a_canonical_weight_there_is_none() -> None:
    layer = ladder.Linear.from_linear(torch.nn.Linear(K, N), "int4", group_size=32, keep_canonical=False)
    assert not hasattr(layer, "weight")
