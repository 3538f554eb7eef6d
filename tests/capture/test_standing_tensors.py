"""Tensors that stay are looked at by one native pass: whatever about them changes is still seen."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder.capture.heap.table import Table
from ladder.runtime import snapshot
from ladder.runtime.cache import is_whole
from ladder.runtime.model.probes import Noted
from ladder.runtime.snapshot import (
    DICTIONARIES_COUNT,
    LEAST_FOR_NATIVE,
    NATIVE,
    DictionaryVersions,
    Snapshot,
    refer_to,
)

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, snapshot.COMPILERS)), reason="the native pass needs a C++ compiler"
)
WIDTH, LAYERS, AT = 8, LEAST_FOR_NATIVE + 4, 5


@pytest.fixture(autouse=True)
def native() -> None:
    assert NATIVE.wait()


def grown(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.resize_(WIDTH + 1, WIDTH)


def elsewhere(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def of_another_storage(tensor: Tensor) -> None:
    tensor.set_(torch.ones(2 * WIDTH, WIDTH)[:WIDTH])


def swapped(tensor: Tensor) -> None:
    other = nn.Parameter(tensor.detach().clone(), requires_grad=False)
    torch.utils.swap_tensors(tensor, other)


def conjugated(tensor: Tensor) -> None:
    tensor.data = tensor.data.conj()


def freed(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def enlarged(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 4096)


def of_another_class(tensor: Tensor) -> None:
    tensor.__class__ = nn.Buffer  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "shape": grown,
    "strides": lambda tensor: setattr(tensor, "data", tensor.data.t()),
    "address": elsewhere,
    "storage": of_another_storage,
    "offset": lambda tensor: setattr(tensor, "data", torch.ones(WIDTH + 1, WIDTH)[1:]),
    "type": lambda tensor: setattr(tensor, "data", tensor.data.to(torch.float64)),
    "gradient": lambda tensor: tensor.requires_grad_(not tensor.requires_grad),
    "torch's part of it": swapped,
    "freed storage": freed,
    "larger storage": enlarged,
    "class": of_another_class,
}


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=dtype), requires_grad=False) for _ in range(LAYERS)]


@pytest.mark.parametrize("what", CHANGES)
def test_a_snapshot_sees_every_change(what: str) -> None:
    tensors = parameters()
    taken = Snapshot()
    assert not taken.holds(tensors)
    assert taken.confirm(tensors, lambda: True)
    assert taken.holds(tensors)
    CHANGES[what](tensors[AT])
    assert not taken.holds(tensors)


def test_a_snapshot_sees_conjugation() -> None:
    tensors = parameters(torch.complex64)
    taken = Snapshot()
    taken.confirm(tensors, lambda: True)
    assert taken.holds(tensors)
    conjugated(tensors[AT])
    assert not taken.holds(tensors)


def test_only_a_snapshot_of_versions_sees_writes() -> None:
    tensors = [*parameters(), torch.inference_mode()(torch.ones)(3)]
    plain, counted = Snapshot(), Snapshot(versions=True)
    plain.confirm(tensors, lambda: True)
    counted.confirm(tensors, lambda: True)
    assert plain.holds(tensors)
    assert counted.holds(tensors)
    with torch.no_grad():
        tensors[AT].mul_(2)
    assert plain.holds(tensors)
    assert not counted.holds(tensors)
    counted.confirm(tensors, lambda: True)
    assert not counted.holds(tensors), "it is taken more and more seldom"
    counted.confirm(tensors, lambda: True)
    assert counted.holds(tensors)


def test_what_is_not_confirmed_or_changes_meanwhile_is_asked_again() -> None:
    tensors = parameters()
    taken = Snapshot()
    assert not taken.confirm(tensors, lambda: False)
    assert not taken.holds(tensors)

    before = []

    def changing() -> bool:
        before.append(tensors[AT].data)  # no later memory lies at its address
        elsewhere(tensors[AT])
        return True

    for _ in range(3):
        assert taken.confirm(tensors, changing)
        assert not taken.holds(tensors)


COUNTED = pytest.mark.skipif(not DICTIONARIES_COUNT, reason="dictionaries hold no versions of their own")


@COUNTED
def test_dictionaries_are_confirmed_as_tensors_are() -> None:
    homes = [{"name": at} for at in range(LAYERS)]
    versions = DictionaryVersions(homes)
    assert not versions.confirm(lambda: False)
    assert versions.confirm(lambda: True)
    assert versions.confirm(lambda: False), "nothing changed: it is not asked"
    homes[AT]["more"] = 0
    assert not versions.confirm(lambda: False)


@COUNTED
def test_dictionaries_that_change_are_noticed_by_their_own_versions() -> None:
    homes = [{"name": at} for at in range(LAYERS)]
    table = Table()
    for home in homes:
        table.add(home, "name", home["name"], "name")
    table.finish(1)
    assert all(table.unchanged() for _ in range(3))
    homes[AT]["other"] = 1
    assert table.unchanged()
    homes[AT]["name"] = -1
    assert not table.unchanged()
    homes[AT]["name"] = AT
    assert table.unchanged()


def test_nothing_is_told_of_few_tensors_and_of_kinds_that_are_not_plain() -> None:
    class Own(Tensor):
        pass

    for tensors in (
        parameters()[: LEAST_FOR_NATIVE - 1],
        [*parameters(), torch.ones(2).to_sparse()],
        [*parameters(), torch.ones(2).as_subclass(Own)],
    ):
        taken = Snapshot()
        taken.confirm(tensors, lambda: True)
        assert not taken.holds(tensors)


def test_a_snapshot_keeps_no_tensor_alive() -> None:
    tensors = parameters()
    taken = Snapshot()
    taken.confirm(tensors, lambda: True)
    gone = weakref.ref(tensors[AT])
    tensors[AT] = parameters()[0]
    gc.collect()
    assert gone() is None
    assert not taken.holds(tensors)
    assert not taken.holds(tensors[:AT])


def test_what_objects_refer_to_is_told_as_the_collector_gives_it() -> None:
    class Plain:
        pass

    owners = *(Plain() for _ in range(LAYERS)), lambda: LAYERS, "not looked into"
    parts = gc.get_referents(*owners)
    assert refer_to(owners, parts)
    assert not refer_to(owners, parts[:-1])
    assert not refer_to(owners, [*parts, None])
    owners[AT].__dict__ = {}
    assert not refer_to(owners, parts)


@pytest.mark.parametrize("what", [what for what in CHANGES if "storage" not in what])
def test_tensors_that_calls_give_are_seen_to_change(what: str) -> None:
    def summed(*tensors: Tensor) -> Tensor:
        return torch.cat([tensor.double().flatten() for tensor in tensors]).cumsum(0)

    fast = ladder.compile(summed)
    tensors = parameters()
    for change in (lambda tensor: None, CHANGES[what]):
        change(tensors[AT])
        for _ in range(3):
            torch.testing.assert_close(fast(*tensors), summed(*tensors))
    twice = [*tensors[:-1], tensors[0]]
    torch.testing.assert_close(fast(*twice), summed(*twice))


def test_writes_and_moves_are_noted_where_many_tensors_are() -> None:
    tensors = parameters()
    noted = Noted(tensors)
    for _ in range(3):
        assert noted.hold([*tensors])
        assert noted.unwritten()
    with torch.no_grad():
        tensors[AT][0, 0] = 7
    assert not noted.hold([*tensors])
    noted = Noted(tensors)
    assert noted.hold([*tensors])
    elsewhere(tensors[AT])
    assert not noted.hold([*tensors])


class Deep(nn.Module):
    """Many layers, each with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for at in range(LAYERS):
            self.register_buffer(f"shift{at}", torch.full((WIDTH,), 0.01 * at))

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) + getattr(self, f"shift{at}"))
        return x


def layer_of(model: Deep) -> nn.Linear:
    layer = model.layers[AT]
    assert isinstance(layer, nn.Linear)
    return layer


def replaced(model: Deep) -> None:
    layer_of(model).weight = nn.Parameter(torch.eye(WIDTH))


def buffer_swapped(model: Deep) -> None:
    setattr(model, f"shift{AT}", torch.ones(WIDTH))


def weight_swapped(model: Deep) -> None:
    torch.utils.swap_tensors(layer_of(model).weight, nn.Parameter(torch.eye(WIDTH)))


def data_moved(model: Deep) -> None:
    layer_of(model).weight.data = torch.eye(WIDTH)


def data_turned(model: Deep) -> None:
    layer_of(model).weight.data = torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH).t() / 64


def written(model: Deep) -> None:
    with torch.no_grad():
        layer_of(model).weight.mul_(-1)


def buffer_written_by_data(model: Deep) -> None:
    model.get_buffer(f"shift{AT}").data.add_(1)


def of_doubles(model: Deep) -> None:
    model.double()


def asks_for_a_gradient(model: Deep) -> None:
    model.get_buffer(f"shift{AT}").requires_grad_(True)


def hooked(model: Deep) -> None:
    layer_of(model).register_forward_hook(lambda module, given, result: result + 1)


def resized(model: Deep) -> None:
    for at, rows in ((AT, WIDTH + 2), (AT + 1, WIDTH)):
        columns = WIDTH if at == AT else WIDTH + 2
        model.layers[at].get_parameter("weight").data = torch.full((rows, columns), 0.1)
    model.get_buffer(f"shift{AT}").resize_(WIDTH + 2).fill_(0.5)


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        buffer_swapped,
        weight_swapped,
        data_moved,
        data_turned,
        written,
        buffer_written_by_data,
        of_doubles,
        asks_for_a_gradient,
        hooked,
        resized,
    ],
    ids=lambda change: change.__name__,
)
def test_a_compiled_model_sees_what_changes(change: Callable[[Deep], None]) -> None:
    torch.manual_seed(0)
    model = Deep().eval()
    fast, x = ladder.compile(model), torch.randn(3, WIDTH)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
        change(model)
        given = x.to(layer_of(model).weight.dtype)
        for _ in range(3):
            found, want = fast(given), model(given)
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            torch.testing.assert_close(found, want)


def test_a_compiled_model_sees_that_it_was_moved() -> None:
    model = Deep().eval()
    fast, x = ladder.compile(model), torch.randn(3, WIDTH)
    with torch.no_grad():
        for _ in range(4):
            fast(x)
        model.to("meta")
        assert fast(x.to("meta")).device.type == "meta"


def test_a_program_that_ends_early_leaves_the_pass_to_the_next(tmp_path: Path) -> None:
    compiler, started = tmp_path / "slow", tmp_path / "started"
    steps = f"touch {started}", "sleep 3", 'while [ "$1" != -o ]; do shift; done', 'echo built > "$2"'
    compiler.write_text("\n".join(("#!/bin/sh", *steps, "")))
    compiler.chmod(0o700)
    code = (
        "import os, sys, time\nfrom ladder.runtime.snapshot import NATIVE\nNATIVE.begin()\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)\n"
    )
    environment = {**os.environ, "CXX": str(compiler), "LADDER_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code, str(started)], env=environment, check=True, timeout=120)
    begun, made = time.monotonic(), tmp_path / "cache" / "native"
    while not list(made.glob("*.so")):
        assert time.monotonic() < begun + 60
        time.sleep(0.1)
    (library,) = made.iterdir()
    assert is_whole(library)
    assert library.read_bytes().startswith(b"built\n")
