"""Loops whose bodies carry what never changes, and multiply elements of a sequence by a stored matrix."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array, to_array

import ladder
from ladder.frontend.onnx_scans import with_lean_loops

LENGTH, DEPTH, WIDTH = 5, 6, 8


def stated(name: str, shape: list[object] | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def recurrent(step: int = 1, number: str = "at", sequence: str = "x") -> onnx.ModelProto:
    """Return a layer as exporters write it: the matrices and a scale go from iteration to iteration."""
    draw = np.random.default_rng(0)
    stored = {
        "w": draw.standard_normal((DEPTH, WIDTH)).astype(np.float32),
        "u": draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4,
        "table": draw.standard_normal((LENGTH, 1, DEPTH)).astype(np.float32),
        "start": np.zeros((1, WIDTH), np.float32),
        "zero": np.array(0, np.int64),
        "go": np.array(True),
    }
    node = helper.make_node
    body = helper.make_graph(
        [
            node("Gather", [sequence, number], ["element"]),
            node("MatMul", ["element", "w_in"], ["product"]),
            node("MatMul", ["h", "u_in"], ["before"]),
            node("Add", ["product", "before"], ["sum"]),
            node("Mul", ["sum", "scale_in"], ["scaled"]),
            node("Tanh", ["scaled"], ["h_out"]),
            node("Identity", ["h_out"], ["shown"]),
            node("Identity", ["w_in"], ["w_out"]),
            node("Add", ["at", "one"], ["at_out"]),
        ],
        "body",
        [
            stated("i", [], TensorProto.INT64),
            stated("going", [], TensorProto.BOOL),
            stated("at", [], TensorProto.INT64),
            *(stated(name, None) for name in ("h", "w_in", "u_in", "scale_in")),
        ],
        [
            stated("going", [], TensorProto.BOOL),
            stated("at_out", [], TensorProto.INT64),
            *(stated(name, None) for name in ("h_out", "w_out", "u_in", "scale_in", "shown")),
        ],
        [from_array(np.array(step, np.int64), "one")],
    )
    loop = node(
        "Loop",
        ["count", "go", "zero", "start", "w", "u", "scale"],
        ["", "last", "w_after", "u_after", "scale_after", "all"],
        body=body,
    )
    results = [stated(name, None) for name in ("last", "all", "w_after", "scale_after")]
    given = [stated("x", [None, 1, DEPTH]), stated("scale", []), stated("count", [], TensorProto.INT64)]
    graph = helper.make_graph([loop], "g", given, results, [from_array(v, n) for n, v in stored.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def body_of(model: onnx.ModelProto) -> onnx.GraphProto:
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    return loop.attribute[0].g


def check(model: onnx.ModelProto, count: int, step: int = 1) -> None:
    """Compare with numpy, call after call: the body is a plan from the second iteration on."""
    draw, compiled = np.random.default_rng(1), ladder.compile(model)
    stored = {tensor.name: to_array(tensor) for tensor in model.graph.initializer}
    for _ in range(2):
        x = draw.standard_normal((LENGTH, 1, DEPTH)).astype(np.float32)
        found = compiled(torch.from_numpy(x), torch.tensor(0.5), torch.tensor(count))
        sequence = x if "x" in body_of(model).node[0].input else stored["table"]
        h, all_ = stored["start"], []
        for at in range(count):
            h = np.tanh((sequence[at * step] @ stored["w"] + h @ stored["u"]) * np.float32(0.5))
            all_.append(h)
        for got, want in zip(found, (h, np.stack(all_), stored["w"], np.float32(0.5)), strict=True):
            torch.testing.assert_close(got, torch.as_tensor(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", ["at", "i"])
def test_products_of_a_sequence_are_made_before_the_loop(number: str) -> None:
    model = recurrent(number=number)
    body = body_of(with_lean_loops(model))
    assert [node.op_type for node in body.node].count("MatMul") == 1
    assert [info.name for info in body.input] == ["i", "going", "at", "h"]
    for count in (LENGTH, 3):
        check(model, count)


@pytest.mark.parametrize("change", [{"step": 2}, {"step": 0}, {"sequence": "table"}])
def test_elements_that_may_be_few_of_many_are_left(change: dict[str, object]) -> None:
    model = recurrent(**change)  # type: ignore[arg-type]
    assert [node.op_type for node in body_of(with_lean_loops(model)).node].count("MatMul") == 2
    check(model, 3, int(change.get("step", 1)))  # type: ignore[call-overload]


def test_an_index_out_of_range_is_an_error() -> None:
    compiled = ladder.compile(recurrent())
    given = torch.zeros(LENGTH, 1, DEPTH), torch.tensor(0.5), torch.tensor(LENGTH + 1)
    with pytest.raises(ladder.LadderError):
        compiled(*given)


def test_models_without_loops_are_handed_on() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", [stated("x", [2])], [stated("y", [2])]
    )
    model = helper.make_model(graph)
    assert with_lean_loops(model) is model


def test_one_row_of_a_table_is_no_view_of_an_argument() -> None:
    """A row alone is looked at where it lies, unless a caller would see that."""
    nodes = [
        helper.make_node("Gather", ["x", "at"], ["row"]),
        helper.make_node("Relu", ["row"], ["y"]),
    ]
    given = [stated("x", [LENGTH, DEPTH]), stated("at", [], TensorProto.INT64)]
    for shown in (["y"], ["y", "row"]):
        graph = helper.make_graph(nodes, "g", given, [stated(name, [DEPTH]) for name in shown])
        compiled = ladder.compile(helper.make_model(graph))
        x = torch.randn(LENGTH, DEPTH)
        for at in (0, 2, -1):
            found = compiled(x, torch.tensor(at))
            y, *row = found if isinstance(found, tuple) else (found,)
            before = x[at].clone()
            x[at] = 0
            assert torch.equal(y, before.relu())
            assert all(torch.equal(r, before) for r in row)
            x[at] = before
        with pytest.raises((ladder.LadderError, IndexError)):
            compiled(x, torch.tensor(LENGTH))


def swapped(adds: bool) -> onnx.ModelProto:
    """Return a loop whose states take each other's names, where ``b`` stays, or one that changes nothing."""
    states = [("a", "b"), ("b", "a")] if adds else [("a", "a"), ("b", "b")]
    infos = [stated("i", [], TensorProto.INT64), stated("c", [], TensorProto.BOOL)]
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"])] if adds else []
    ends = ["b", "sum"] if adds else ["a", "b"]
    results = [stated("c", [], TensorProto.BOOL), *(stated(name, [2]) for name in ends)]
    body = helper.make_graph(nodes, "body", [*infos, *(stated(own, [2]) for _, own in states)], results)
    loop = helper.make_node("Loop", ["i", "c", *(first for first, _ in states)], ["p", "q"], body=body)
    given = [*infos, stated("a", [2]), stated("b", [2])]
    outer = helper.make_graph([loop], "g", given, [stated("p", [2]), stated("q", [2])])
    return helper.make_model(outer, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_states_may_have_the_names_of_values_around_their_loop() -> None:
    """The body's ``b`` is the outer ``a`` and never changes; by that name, the body reads its own ``a``."""
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    p, q = ladder.compile(swapped(adds=True))(torch.tensor(2), torch.tensor(True), a, b)
    assert torch.equal(p, a)
    assert torch.equal(q, b + 2 * a)


def test_loops_that_change_nothing_are_what_they_begin_with() -> None:
    model = swapped(adds=False)
    assert [node.op_type for node in with_lean_loops(model).graph.node] == ["Identity", "Identity"]
    a, b = torch.randn(2), torch.randn(2)
    p, q = ladder.compile(model)(torch.tensor(2), torch.tensor(True), a, b)
    assert torch.equal(p, a)
    assert torch.equal(q, b)


def test_loops_in_loops_that_change_nothing_are_none() -> None:
    graph = swapped(adds=False).graph
    for _ in range(3):
        loop = graph.node[0]
        inside = helper.make_node("Loop", ["i", "c", "a", "b"], ["x", "y"], body=loop.attribute[0].g)
        infos = [stated("c", [], TensorProto.BOOL), stated("x", [2]), stated("y", [2])]
        body = helper.make_graph([inside], "outer", loop.attribute[0].g.input, infos)
        del graph.node[:]
        graph.node.append(helper.make_node("Loop", ["i", "c", "a", "b"], ["p", "q"], body=body))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert not any(node.op_type == "Loop" for node in with_lean_loops(model).graph.node)
    a, b = torch.randn(2), torch.randn(2)
    assert torch.equal(ladder.compile(model)(torch.tensor(1), torch.tensor(True), a, b)[1], b)
