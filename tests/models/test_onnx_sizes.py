"""ONNX models of open sizes: fixed for a plan by `shapes`, and bound to what calls repeat."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import ladder
from tile_types.errors import ShapeError, UnknownNameError

WEIGHT = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)


def model() -> onnx.ModelProto:
    """Return ``relu(x w) + every other row of z``: sizes that no plan knows to be equal."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Relu", ["p"], ["r"]),
        helper.make_node("Slice", ["z", "begin", "end", "axis", "step"], ["half"]),
        helper.make_node("Add", ["r", "half"], ["y"]),
    ]
    numbers = {"begin": 0, "end": 1 << 40, "axis": 0, "step": 2}
    stored = [onnx.numpy_helper.from_array(np.array([n]), name) for name, n in numbers.items()]
    graph = helper.make_graph(
        nodes,
        "open",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["m", 4]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(WEIGHT, "w"), *stored],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def inputs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=draw), torch.randn(2 * rows, 4, generator=draw)


def wanted(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ torch.from_numpy(WEIGHT)) + z[::2]


def test_sizes_of_all_calls_make_one_plan() -> None:
    assert len(ladder.compile(model()).staged.stages) > 1
    fast = ladder.compile(model(), shapes={"x": (5, 8), "z": (10, 4)})
    assert len(fast.staged.stages) == 1
    for seed in range(3):
        torch.testing.assert_close(fast(*inputs(5, seed)), wanted(*inputs(5, seed)))
    with pytest.raises(ShapeError, match="must have shape"):
        fast(*inputs(6))


def test_sizes_that_calls_repeat() -> None:
    """Steps are bound to sizes that come again; others, and results that callers change, stay right."""
    fast = ladder.compile(model())
    kept = []
    for rows in (5, 5, 5, 5, 7, 5, 1, 7, 7, 7, 5, 300, 5, 7):
        given = inputs(rows, len(kept))
        kept.append((fast(*given), wanted(*given)))
        kept[-1][0].add_(1)
    for found, right in kept:
        torch.testing.assert_close(found, right + 1)


@pytest.mark.parametrize(
    ("shapes", "error", "what"),
    [
        ({"q": (1,)}, UnknownNameError, "'q'"),
        ({"x": (5,)}, ShapeError, "2 axes"),
        ({"x": (5, 7)}, ShapeError, "8 elements"),
        ({"x": (-5, 8)}, ShapeError, "2 axes"),
    ],
)
def test_shapes_that_do_not_fit(
    shapes: dict[str, tuple[int, ...]], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        ladder.compile(model(), shapes=shapes)


def test_only_files_have_shapes() -> None:
    with pytest.raises(TypeError, match="leave out shapes"):
        ladder.compile(torch.relu, shapes={"x": (1,)})  # type: ignore[call-overload]


def branching() -> onnx.ModelProto:
    """Return ``relu(x w) if c else x[:3] w + k``: both branches read values around them."""
    info = helper.make_tensor_value_info
    out = [info("b", TensorProto.FLOAT, None)]
    then = helper.make_graph([helper.make_node("Relu", ["p"], ["b"])], "then", [], out)
    nodes = [
        helper.make_node("Slice", ["p", "zero", "three"], ["s"]),
        helper.make_node("Add", ["s", "k"], ["b"]),
    ]
    stored = [onnx.numpy_helper.from_array(np.array([n]), name) for name, n in (("zero", 0), ("three", 3))]
    otherwise = helper.make_graph(nodes, "else", [], out, stored)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["p"]),
            helper.make_node("If", ["c"], ["f"], then_branch=then, else_branch=otherwise),
            helper.make_node("Neg", ["f"], ["y"]),
        ],
        "branching",
        [info("x", TensorProto.FLOAT, ["n", 8]), info("c", TensorProto.BOOL, [])],
        [info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(WEIGHT, "w"), onnx.numpy_helper.from_array(WEIGHT[0], "k")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def test_branches_are_models() -> None:
    fast, weight = ladder.compile(branching()), torch.from_numpy(WEIGHT)
    for rows, taken in (
        (5, True),
        (5, False),
        (2, False),
        (5, True),
        (4, False),
        (4, False),
        (4, False),
        (4, True),
    ):
        x = inputs(rows)[0]
        wanted = torch.relu(x @ weight) if taken else (x @ weight)[:3] + weight[0]
        torch.testing.assert_close(fast(x, torch.tensor(taken)), -wanted)
    stages = [stage for stage in fast.on("cpu").stages if hasattr(stage, "make")]
    assert [None not in stage._made.values() for stage in stages] == [True]


def test_no_plans_for_shapes_that_the_file_states() -> None:
    """Calls bring no further shapes then: a model of several stages is imported once."""
    model = branching()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5
    fast, x = ladder.compile(model), inputs(5)[0]
    torch.testing.assert_close(fast(x, torch.tensor(True)), -torch.relu(x @ torch.from_numpy(WEIGHT)))
    assert len(fast.staged.stages) > 1
    assert not fast.plan().count("inputs [")
    assert fast._file is None
    with pytest.raises(ladder.ShapeError):
        fast(x[:3], torch.tensor(True))


def test_what_is_no_program_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="takes a function, a module or an ONNX model, not int"):
        ladder.compile(3)  # type: ignore[call-overload]


COUNTED = """
    <ir_version: 10, opset_import: ["" : 21]>
    counts (float[A, B] x) => (float[N] y, float h, float[A, B] z, int64[1] back)
    <float zero = {0}, float one = {1}, float two = {2}, int64 first = {0}>
    {
        shape = Shape(x)
        rows = Gather(shape, first)
        size = Cast <to = 1> (rows)
        y = Range(zero, size, one)
        h = Div(size, two)
        z = Mul(x, size)
        axes = Constant <value_ints = [0]> ()
        whole = Cast <to = 7> (size)
        back = Unsqueeze(whole, axes)
    }"""


def test_sizes_as_floats_are_counted_to_and_computed_with() -> None:
    fast = ladder.compile(onnx.parser.parse_model(COUNTED))
    assert "node" not in fast.plan()
    for rows, columns in [(3, 2), (1, 1), (0, 2), (7, 3)]:
        x = torch.randn(rows, columns)
        y, h, z, back = fast(x)
        assert torch.equal(y, torch.arange(float(rows)))
        assert (h.dtype, h.item()) == (torch.float32, rows / 2)
        assert torch.equal(z, x * rows)
        assert torch.equal(back, torch.tensor([rows]))


def _same_upper() -> onnx.ModelProto:
    """Return a model of three stages for all sizes, and of one for known ones."""
    weight = onnx.numpy_helper.from_array(
        np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("f4"), "w"
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Conv", ["a", "w"], ["c"], auto_pad="SAME_UPPER", strides=[2, 2]),
        helper.make_node("Sigmoid", ["c"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w_"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "same", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def test_shapes_that_calls_bring_have_plans_of_their_own() -> None:
    model = _same_upper()
    fast = ladder.compile(model)
    assert len(fast.staged.stages) == 3
    weight = torch.as_tensor(onnx.numpy_helper.to_array(model.graph.initializer[0]).copy())
    model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))  # the caller's own

    def expected(x: torch.Tensor) -> torch.Tensor:
        rows, columns = (max(-(-e // 2) * 2 + 1 - e, 0) for e in x.shape[2:])
        border = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
        padded = torch.nn.functional.pad(x.relu(), border)
        return torch.nn.functional.conv2d(padded, weight, stride=2).sigmoid()

    seen = []
    for shape in ((1, 3, 8, 8), (1, 3, 9, 6), (1, 3, 9, 6), (2, 3, 5, 5), (1, 3, 8, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), expected(x), rtol=1e-5, atol=1e-5)
        seen.append(fast.plan().count("inputs ["))
    assert seen == [1, 1, 2, 2, 2]  # the first at once, others when they come again
    with pytest.raises(ladder.DTypeError, match="'x' must have ONNX's type"):
        fast(torch.zeros(1, 3, 7, 7, dtype=torch.int64))
    with pytest.raises(ladder.ShapeError):
        fast(torch.zeros(1, 4, 7, 7))


def test_sizes_that_can_only_be_one_number() -> None:
    """A shape of the traced example in a model of open sizes: one plan; other sizes are refused."""
    traced = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (float[n, batch, 6] x, float[batch] b) => (y)
        <int64[4] parts = {0, 1, 2, 3}, int64[1] zero = {0}, int64[1] one = {1}> {
        s = Shape(x)  n = Slice(s, zero, one)  r = Reshape(x, parts)  t = Transpose <perm = [2, 1, 0, 3]> (r)
        flat = Concat <axis = 0> (n, six)  f = Reshape(t, flat)  y = Add(f, b) }"""
    )
    traced.graph.initializer.append(onnx.numpy_helper.from_array(np.array([6]), "six"))
    fast, x, b = ladder.compile(traced), torch.randn(5, 1, 6), torch.randn(1)
    assert len(fast.staged.stages) == 1
    torch.testing.assert_close(fast(x, b), x.reshape(5, 1, 2, 3).transpose(0, 2).reshape(5, 6) + b)
    with pytest.raises(ShapeError, match="must have shape"):
        fast(torch.randn(5, 2, 6), torch.randn(2))


def test_slices_by_sizes_from_the_end() -> None:
    """The last rows, as many as another input has; more than there are is all of them."""
    last = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (float[n, 4] x, float[m, 4] z) => (y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] far = {1000000}> {
        s = Shape(z)  m = Slice(s, zero, one)  begin = Neg(m)  y = Slice(x, begin, far, zero) }"""
    )
    fast, x = ladder.compile(last), torch.randn(5, 4)
    assert len(fast.staged.stages) == 1
    for rows in (1, 4, 5, 9):
        torch.testing.assert_close(fast(x, torch.randn(rows, 4)), x[-rows:])
    with pytest.raises(ladder.LadderError):
        fast(x, torch.randn(0, 4))


def test_sizes_that_are_called_as_those_of_plans_are() -> None:
    """The number of kept rows is another size than that of ``z``, which the model happens to call ``u1``."""
    nodes = [
        helper.make_node("Compress", ["x", "c"], ["kept"], axis=0),
        helper.make_node("Size", ["kept"], ["count"]),
        helper.make_node("Relu", ["z"], ["r"]),
        helper.make_node("Relu", ["kept"], ["y"]),
    ]
    kinds = {"x": (TensorProto.FLOAT, "n"), "c": (TensorProto.BOOL, "n"), "z": (TensorProto.FLOAT, "u1")}
    graph = helper.make_graph(
        nodes,
        "named",
        [helper.make_tensor_value_info(name, kind, [size]) for name, (kind, size) in kinds.items()],
        [helper.make_empty_tensor_value_info(name) for name in ("count", "r", "y")],
    )
    fast = ladder.compile(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    )
    for rows, kept in ((5, 2), (4, 0), (6, 6)):
        x, z = torch.randn(rows), torch.randn(3)
        count, r, y = fast(x, torch.arange(rows) < kept, z)
        assert count.item() == kept
        torch.testing.assert_close(r, z.relu())
        torch.testing.assert_close(y, x[:kept].relu())


def of_version_17(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.parametrize(
    "name",
    ["None", "True", "lambda", "max", "é", "batch-size", "2", "-1", "a*b", "b+1", "unk__1", "n" * 300, "?"],
)
def test_sizes_have_any_name(name: str) -> None:
    """A name that reads as arithmetic of sizes that no input shows is a name, too."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Concat", ["x", "x"], ["y"], axis=0), helper.make_node("Neg", ["z"], ["w"])],
        "names",
        [info("x", TensorProto.FLOAT, [name, 3]), info("z", TensorProto.FLOAT, [f"{name}_", name])],
        [info("y", TensorProto.FLOAT, None), info("w", TensorProto.FLOAT, [f"{name}_", name])],
    )
    fast = ladder.compile(of_version_17(graph))
    for rows, others in ((5, 4), (2, 7), (2, 2)):
        x, z = torch.randn(rows, 3), torch.randn(others, rows)
        y, w = fast(x, z)
        assert torch.equal(y, torch.cat([x, x]))
        assert torch.equal(w, -z)


@pytest.mark.parametrize("name", ["?", "None", "-1", "...", " ", "unk", "Unknown", "N/A", "null"])
def test_sizes_of_names_that_say_nothing_may_differ(name: str) -> None:
    """As converters write what they do not know, for all axes alike."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Add", ["x", "z"], ["w"])],
        "nothing",
        [info("x", TensorProto.FLOAT, [name, name]), info("z", TensorProto.FLOAT, [name])],
        [info("y", TensorProto.FLOAT, [name, name]), info("w", TensorProto.FLOAT, [name, name])],
    )
    fast = ladder.compile(of_version_17(graph))
    for shape in ((2, 3), (2, 3), (4, 4), (0, 1)):
        x, z = torch.randn(shape), torch.randn(shape[1])
        y, w = fast(x, z)
        assert torch.equal(y, x.relu())
        assert torch.equal(w, x + z)


def test_sizes_of_names_alike_differ() -> None:
    info = helper.make_tensor_value_info
    names = ("a b", "a_b", "a-b", "é", "è")
    inputs = [info(f"x{at}", TensorProto.FLOAT, [name]) for at, name in enumerate(names)]
    nodes = [helper.make_node("Neg", [f"x{at}"], [f"y{at}"]) for at in range(len(names))]
    outputs = [info(f"y{at}", TensorProto.FLOAT, None) for at in range(len(names))]
    graph = helper.make_graph(nodes, "alike", inputs, outputs)
    fast = ladder.compile(of_version_17(graph))
    xs = [torch.randn(at + 2) for at in range(len(names))]
    for x, y in zip(xs, fast(*xs), strict=True):
        assert torch.equal(y, -x)


def test_inputs_have_any_name() -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["self", "lambda"], ["None"])],
        "names",
        [info("self", TensorProto.FLOAT, ["n"]), info("lambda", TensorProto.FLOAT, ["n"])],
        [info("None", TensorProto.FLOAT, None)],
    )
    fast = ladder.compile(of_version_17(graph))
    given = {"self": torch.randn(3), "lambda": torch.randn(3)}
    assert torch.equal(fast(**given), given["self"] + given["lambda"])
