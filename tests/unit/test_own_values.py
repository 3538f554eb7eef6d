"""What is stored of a program's own type says its values: a type of that name with others is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ladder
from ladder.ir.gemm import Gemm
from ladder.runtime.artifact import reading
from ladder.runtime.cache import Identity, cache_key
from ladder.runtime.compile import Request
from ladder.runtime.packed import PackedWeight
from ladder.superopt.generator.stored import Database
from schedules.tuning import class_key
from targets import host_cpu
from tile_types import Metadata, QuantizedTensor, TType, get_type, library
from tile_types.errors import ArtifactError, CheckpointError, TypeValuesError
from tile_types.identity import own_values, own_values_named

pytestmark = pytest.mark.usefixtures("one_schedule")

HERE = (-1.0, -0.5, 0.0, 2.0)
OTHERS = (-1.0, -0.5, 0.0, 4.0)
NAME = "of_two_minds"
OTHER_VALUES = rf"type '{NAME}' has other values here .*values -1 to 2, .* here \[2 bits, values -1 to 4, "
GEMM = Gemm(n=32, k=64, weight=NAME, group_size=32)


def register(values: tuple[float, ...]) -> TType:
    """Make the name mean these values, as another process might."""
    library._TYPES.pop(NAME, None)
    return ladder.register_type(TType(NAME, 2, lambda code, ops: ops.lookup(values, code)))


def quantized() -> QuantizedTensor:
    generator = torch.Generator().manual_seed(0)
    return ladder.quantize(torch.randn(32, 64, generator=generator), NAME, group_size=32)


def linear(**options: Any) -> ladder.Linear:
    return ladder.Linear(64, 32, weight=NAME, group_size=32, bias=False, **options)


def of_linear(**options: Any) -> Callable[[], Any]:
    """Return what stores a layer and gives what loads it, strictly."""

    def store() -> Callable[[], Any]:
        state = ladder.Linear.from_quantized(quantized(), **options).state_dict()
        return lambda: linear(**options).load_state_dict(state, strict=True)

    return store


def of_dict() -> Callable[[], Any]:
    stored = quantized().to_dict()
    text = json.dumps(stored["metadata"])
    return lambda: QuantizedTensor.from_dict({**stored, "metadata": json.loads(text)})


def pickled(value: Any) -> Callable[[], Any]:
    file = io.BytesIO()
    torch.save(value, file)
    return lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def packed() -> PackedWeight:
    return ladder.Matmul(N=32, K=64, weight=NAME, activation="float16", group_size=32).pack(quantized())


def of_packed() -> Callable[[], Any]:
    data = packed().to_bytes()
    return lambda: PackedWeight.from_bytes(data)


def of_request() -> Callable[[], Any]:
    """An operator's text: what `torch.export` keeps of a product."""
    text = Request(GEMM).text
    return lambda: Request.parse.__wrapped__(text)


STORED = {
    "from_dict": of_dict,
    "torch.load": lambda: pickled(quantized()),
    "load_state_dict": of_linear(),
    "packed state": of_linear(keep_canonical=False),
    "packed bytes": of_packed,
    "torch.load of packed": lambda: pickled(packed()),
    "request": of_request,
}


@pytest.mark.parametrize("store", STORED.values(), ids=STORED)
def test_other_values_under_a_name_are_refused(store: Callable[[], Callable[[], Any]]) -> None:
    register(HERE)
    load = store()
    register(HERE)
    load()
    register(OTHERS)
    with pytest.raises((TypeValuesError, RuntimeError), match=OTHER_VALUES):
        load()


def test_checkpoints_artifacts_and_models_are_refused(tmp_path: Path) -> None:
    register(HERE)
    path = tmp_path / "a.safetensors"
    layers = torch.nn.ModuleDict({"a": ladder.Linear.from_quantized(quantized())})
    save_file(layers.state_dict(), path)
    operator = ladder.Matmul(N=32, K=64, weight=NAME, activation="float16", group_size=32)
    operator.export(tmp_path / "a.ladder", packed())
    assert ladder.load_checkpoint(path)["a.weight"].type_name == NAME
    ladder.load(tmp_path / "a.ladder")
    register(OTHERS)
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: a\.weight: {OTHER_VALUES}"):
        ladder.load_checkpoint(path)["a.weight"]
    with pytest.raises(TypeValuesError, match=rf"a\.ladder: {OTHER_VALUES}"):
        ladder.load(tmp_path / "a.ladder")


def test_what_holds_a_type_that_is_not_here_says_what_to_do(tmp_path: Path) -> None:
    register(HERE)
    load, state = of_dict(), ladder.Linear.from_quantized(quantized()).state_dict()
    library._TYPES.pop(NAME)
    told = f"unknown type '{NAME}'.* is registered"
    with pytest.raises(ArtifactError, match=f"^{told}"):
        load()
    with pytest.raises(RuntimeError, match=f"weight: {told}"):
        ladder.Linear(64, 32, weight="int2", group_size=32).load_state_dict(state)
    with (
        pytest.raises(ArtifactError, match=rf"a\.ladder: manifest\.json: {told}"),
        reading(tmp_path / "a.ladder", "manifest.json"),
    ):
        get_type(NAME)


def test_onnx_models_are_refused(tmp_path: Path) -> None:
    register(HERE)
    x, layer = torch.randn(2, 64), ladder.Linear.from_quantized(quantized())
    ladder.compile(torch.nn.Sequential(layer).eval()).to_onnx(tmp_path / "a.onnx", x)
    ladder.compile(tmp_path / "a.onnx")
    register(OTHERS)
    with pytest.raises(TypeValuesError, match=OTHER_VALUES):
        ladder.compile(tmp_path / "a.onnx")


def test_caches_tell_the_values_of_a_name_apart(tmp_path: Path) -> None:
    identity = Identity.of(None, host_cpu())
    facts = {"graph": f"%w = input() : {NAME}_g32_sfloat32[4]"}
    found = []
    for values in (HERE, OTHERS, HERE):
        register(values)
        found.append(
            (
                cache_key(facts, identity),
                Identity.of(GEMM, host_cpu()).weight,
                class_key(host_cpu(), GEMM),
                Database(tmp_path).path(facts),
            )
        )
    assert found[0] == found[2]
    assert all(one != other for one, other in zip(*found[:2], strict=True))


def test_types_that_ship_say_nothing_and_files_without_values_are_read() -> None:
    for name in ("int4", "nf4", "mxfp4", "nvfp4", "int4_g32_zi", "fp5_e3m1", "float32"):
        assert own_values(name) == {}
    assert "values" not in ladder.quantize(np.eye(8), "int4").to_dict()["metadata"]
    assert "values" not in json.loads(Request(replace(GEMM, weight="int4")).text)
    register(HERE)
    stored = quantized().to_dict()
    del stored["metadata"]["values"]  # as older Ladders wrote it
    register(OTHERS)
    assert QuantizedTensor.from_dict(stored).ttype.maximum == 4


def test_own_types_are_found_in_block_types_texts_and_under_names_that_ship() -> None:
    register(HERE)
    block = ladder.register_type(
        TType("own_blocks", 2, shape=(16,), element=NAME, metadata=(Metadata("scale", "float16"),))
    )
    assert set(own_values(f"{NAME}_g32")) == {NAME}
    assert own_values(block) == own_values_named(f"own_blocks {NAME}_g64_zf")
    assert own_values(block)["own_blocks"] == f"blocks of [16] {NAME}, scale float16 per block"
    assert set(ladder.quantize(np.eye(16), block).to_dict()["metadata"]["values"]) == {NAME, "own_blocks"}
    hidden = TType("int4", 4, lambda code, ops: ops.cast(code, "int32"))  # not registered
    stored = ladder.quantize(np.eye(8), hidden).to_dict()
    with pytest.raises(ArtifactError, match=r"type 'int4' .* values 0 to 15, .* values -8 to 7, "):
        QuantizedTensor.from_dict(stored)
    stored["metadata"]["values"] = ["int4"]
    with pytest.raises(ArtifactError, match="not an object"):
        QuantizedTensor.from_dict(stored)
