"""Gathers and scatters of ONNX models by computed numbers, in kernels of ours."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import ladder

RANDOM = np.random.default_rng(3)


def model_of(operator: str, given: dict[str, np.ndarray], axis: int | None) -> onnx.ModelProto:
    """Return a model of one node, all of whose operands are inputs; their second axis is open."""
    infos = []
    for name, x in given.items():
        shape: list[int | str] = [*x.shape]
        shape[1] = f"{name}_1" if axis == 1 else shape[1]
        infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), shape))
    code = helper.np_dtype_to_tensor_dtype(given["x"].dtype)
    result = helper.make_tensor_value_info("y", code, None)
    node = helper.make_node(operator, list(given), ["y"], **({} if axis is None else {"axis": axis}))
    graph = helper.make_graph([node], "one", infos, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def ran(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> tuple[np.ndarray, str]:
    """Return the result, and the plan's text; called often enough for a plan of the shapes."""
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(3):
            found = fast(**{name: torch.from_numpy(x) for name, x in given.items()})
    return found.numpy(), fast.plan()


@pytest.mark.parametrize(("kind", "axis"), [("float32", 0), ("float32", 1), ("int64", 2)])
def test_numbers_along_an_axis(kind: str, axis: int) -> None:
    x = RANDOM.integers(-90, 90, (3, 5, 4)).astype(kind)
    shape = [7 if at == axis else n for at, n in enumerate(x.shape)]
    ids = RANDOM.integers(-x.shape[axis], x.shape[axis], shape)
    given = {"x": x, "ids": ids}
    found, plan = ran(model_of("GatherElements", given, axis), given)
    assert "ladder onnx.GatherElements" in plan
    assert np.array_equal(found, np.take_along_axis(x, ids, axis))


@pytest.mark.parametrize("axis", [0, 1])
def test_places_along_an_axis(axis: int) -> None:
    x = RANDOM.standard_normal((3, 6, 4)).astype(np.float32)
    order = np.argsort(RANDOM.random(x.shape), axis)
    ids = np.take(order, [0, 1], axis).astype(np.int32)
    ids = np.where(RANDOM.random(ids.shape) < 0.5, ids, ids - x.shape[axis]).astype(np.int32)
    new = RANDOM.standard_normal(ids.shape).astype(np.float32)
    given = {"x": x, "ids": ids, "new": new}
    found, plan = ran(model_of("ScatterElements", given, axis), given)
    wanted = x.copy()
    np.put_along_axis(wanted, ids.astype(np.int64), new, axis)
    assert "ladder onnx.ScatterElements" in plan
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(("kind", "depth"), [("float32", 1), ("int64", 2), ("float32", 3)])
def test_rows_by_several_numbers(kind: str, depth: int) -> None:
    x = RANDOM.integers(-90, 90, (4, 5, 3)).astype(kind)
    ids = RANDOM.integers([-n for n in x.shape[:depth]], x.shape[:depth], (2, 6, depth))
    new = RANDOM.integers(-90, 90, (2, 6, *x.shape[depth:])).astype(kind)
    given = {"x": x, "ids": ids, "new": new}
    found, plan = ran(model_of("ScatterND", given, None), given)
    wanted = x.copy()
    for place in np.ndindex(2, 6):
        wanted[tuple(ids[place])] = new[place]
    assert "ladder onnx.ScatterND" in plan
    assert np.array_equal(found, wanted)
    ids[1, 2, 0] = 4
    with pytest.raises(ladder.LadderError, match="of an axis of 4"):
        ran(model_of("ScatterND", given, None), given)


@pytest.mark.parametrize("number", [5, -6])
def test_a_number_outside_of_the_axis_is_named(number: int) -> None:
    given = {"x": np.zeros((2, 5), np.float32), "ids": np.array([[0, 4], [number, 1]])}
    fast = ladder.compile(model_of("GatherElements", given, 1))
    with pytest.raises(ladder.LadderError, match="of an axis of 5"):
        fast(**{name: torch.from_numpy(x) for name, x in given.items()})
    given["ids"][1, 0] = -5
    assert not fast(**{name: torch.from_numpy(x) for name, x in given.items()}).any()
