"""Graphs of ONNX nodes (branches, bodies of loops) as models for the shapes that calls show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest
import torch

import ladder
from benchmarks.onnx_suite import without_kernels
from ladder.runtime.model import build
from ladder.runtime.model.staged import IfStage, PlanStage, StagedModel
from tile_types.errors import DTypeError, ShapeError

MODELS = {
    "a loop that hands a matrix on": """
        <ir_version: 10, opset_import: ["" : 21]>
        loops (int64 n, float[B, 4] x) => (float[B, 4] y, float[T, B, 4] all)
        <float[4, 4] w = {0.5, -1, 0, 2, 1, 0.25, 0, 0, 0, 1, -0.5, 1, 1, 0, 0, 0.5}, bool go = {1}>
        {
            y, same, all = Loop <body = step (int64 i, bool c, float[B, 4] s, float[4, 4] m)
                => (bool again, float[B, 4] next, float[4, 4] kept, float[B, 4] out) {
                    again = Identity(c)
                    p = MatMul(s, m)
                    next = Tanh(p)
                    out = Add(next, x)
                    kept = Identity(m)
                }>(n, go, x, w)
        }""",
    "a loop whose state grows": """
        <ir_version: 10, opset_import: ["" : 21]>
        grows (int64 n, float[B, 4] x) => (float[R, 4] y)
        <bool go = {1}>
        {
            y = Loop <body = step (int64 i, bool c, float[R, 4] s) => (bool again, float[Q, 4] next) {
                    again = Identity(c)
                    next = Concat <axis = 0> (s, x)
                }>(n, go, x)
        }""",
    "a scan": """
        <ir_version: 10, opset_import: ["" : 21]>
        scans (int64 n, float[B, 4] x) => (float[4] last, float[B, 4] all)
        <float[4] zero = {0, 0, 0, 0}>
        {
            last, all = Scan <num_scan_inputs = 1, body = step (float[4] s, float[4] row)
                => (float[4] next, float[4] out) {
                    next = Add(s, row)
                    out = Exp(next)
                }>(zero, x)
        }""",
    "branches of different ranks": """
        <ir_version: 10, opset_import: ["" : 21]>
        branches (int64 n, float[B, 4] x) => (float[] y)
        <int64 two = {2}>
        {
            many = Greater(n, two)
            y = If(many) <
                then_branch = yes () => (float[] a) { a = Exp(x) },
                else_branch = no () => (float[] b) { s = ReduceSum <keepdims = 0> (x)  b = Neg(s) }
            >
        }""",
}


MATRIX = torch.tensor([[0.5, -1, 0, 2], [1, 0.25, 0, 0], [0, 1, -0.5, 1], [1, 0, 0, 0.5]])


def handed_on(count: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    state, found = x, [torch.empty(0, *x.shape)]
    for _ in range(count):
        state = (state @ MATRIX).tanh()
        found.append((state + x)[None])
    return state, torch.cat(found)


def chosen(count: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.exp() if count > 2 else -x.sum(),)


WANTED: Mapping[str, Callable[[int, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a loop that hands a matrix on": handed_on,
    "a loop whose state grows": lambda count, x: (x.repeat(count + 1, 1),),
    "a scan": lambda count, x: (x.sum(0), x.cumsum(0).exp()),
    "branches of different ranks": chosen,
}


@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_nodes_compute_what_the_standard_says(name: str) -> None:
    fast = ladder.compile(onnx.parser.parse_model(MODELS[name]))
    for count, rows in [(3, 2), (3, 2), (1, 2), (0, 2), (4, 5), (3, 2), (2, 1), (3, 0)]:
        x = torch.randn(rows, 4)
        x[:1, :2] = torch.tensor([float("nan"), -0.0])
        found = fast(n=torch.tensor(count), x=x)
        for a, b in zip(found if isinstance(found, tuple) else (found,), WANTED[name](count, x), strict=True):
            assert a.shape == b.shape or a.numel() == b.numel() == 0  # open extents of no iterations are 0
            torch.testing.assert_close(a.reshape(b.shape), b, rtol=2e-6, atol=1e-6, equal_nan=True)


def specials(model: Any) -> list[Any]:
    assert isinstance(model, StagedModel)
    stages = [stage for stage in model.stages if isinstance(stage, IfStage)]
    return [special for stage in stages for special in stage.special.values()]


def test_a_branch_is_a_model_for_the_shapes_that_it_is_first_given() -> None:
    general = ladder.compile(onnx.parser.parse_model(MODELS["branches of different ranks"])).on("cpu")
    x = torch.randn(2, 4)
    general(n=torch.tensor(3), x=x)
    first, second = specials(general)
    (model,) = first.models.values()
    assert model is not None
    assert not second.models
    assert torch.equal(general(n=torch.tensor(3), x=torch.ones(3, 4)), torch.ones(3, 4).exp())
    assert first.of([x] * len(first.names)) is model


def test_plans_do_not_hand_back_what_the_call_brings() -> None:
    """A branch and a later plan read an input that the first plan reads too."""
    listed = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        reads (float[2, 4] x) => (float[2, 4] y, float[2, 4] x, float[] s) <float zero = {0}> {
            s = ReduceSum <keepdims = 0> (x)
            more = Greater(s, zero)
            b = If(more) <
                then_branch = yes () => (float[2, 4] t) { t = Exp(x) },
                else_branch = no () => (float[2, 4] e) { e = Neg(x) }
            >
            y = Mul(b, x)
        }""")
    fast = ladder.compile(listed)
    general = fast.on("cpu")
    assert isinstance(general, StagedModel)
    plans = [stage for stage in general.stages if isinstance(stage, PlanStage)]
    assert [("x" in plan.reads, "x" in plan.writes) for plan in plans] == [(True, False)] * 2
    for x in (torch.ones(2, 4), -torch.ones(2, 4), torch.ones(2, 4)):
        y, same, total = fast(x)
        torch.testing.assert_close(y, (x.exp() if total > 0 else -x) * x)
        assert torch.equal(same, x)


def test_stages_take_what_is_like_a_call_before_and_refuse_what_is_not() -> None:
    fast = ladder.compile(onnx.parser.parse_model(MODELS["branches of different ranks"]))
    x, many = torch.randn(2, 4), torch.tensor(3)
    for given in (x, x, x.numpy(), x, x.numpy()):
        torch.testing.assert_close(fast(n=many, x=given), x.exp())
    for wrong, error in ((x.double(), DTypeError), (x[:, :3], ShapeError), (x.numpy()[0], ShapeError)):
        with pytest.raises(error, match="'x'"):
            fast(n=many, x=wrong)
    torch.testing.assert_close(fast(n=many, x=x), x.exp())


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("version", [10, 17, 21])
def test_pads_of_open_sizes_are_read_once(mode: str, version: int) -> None:
    """Borders wider than what they repeat too, which only a call shows; `wrap` is new in version 19."""
    if mode == "wrap" and version < 19:
        pytest.skip("the standard has no such mode")
    stored, operands, stated = "<int64[4] p = {0, 2, 3, 4}>", "e, p", ""
    if version < 11:
        stored, operands, stated = "", "e", ", pads = [0, 2, 3, 4]"
    listed = onnx.parser.parse_model(f"""
        <ir_version: 5, opset_import: ["" : {version}]>
        pads (float[a, b] x) => (float[c, d] y) {stored} {{
            e = Exp(x)
            y = Pad <mode = "{mode}"{stated}> ({operands})
        }}""")
    fast = ladder.compile(listed)
    (stage,) = [step for step in fast.whole("cpu").steps.steps if "call" in step.part.operators]
    assert len(stage.part.inputs) == 1
    for rows, columns in ((5, 7), (5, 7), (5, 7), (3, 2), (1, 1), (2, 3)):
        x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
        wanted = np.pad(np.exp(x), [(0, 3), (2, 4)], mode)
        np.testing.assert_allclose(fast(torch.from_numpy(x)), wanted, rtol=1e-6)


def test_a_result_that_is_listed_twice_is_returned_twice() -> None:
    listed = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        twice (float[n, 3] x) => (float[n, 3] y, float[n, 3] y, float[n, 3] z) { y = Exp(x)  z = Relu(x) }""")
    x = torch.randn(2, 3)
    first, second, other = ladder.compile(listed)(x)
    assert torch.allclose(first, x.exp())
    assert torch.equal(first, second)
    assert torch.equal(other, x.relu())


WHOLE = """
    <ir_version: 10, opset_import: ["" : 21]>
    halves ({0}[N] x) => ({0}[N] y) <{0} d = {{{1}}}> {{ q = Div(x, d)  y = Add(q, q) }}"""


@pytest.mark.parametrize("ttype", ["int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("divisor", [3, -7, -1])
def test_integers_divided_by_what_is_known(ttype: str, divisor: int) -> None:
    """Rounded toward 0, by a kernel; by -1, where processors trap, torch negates."""
    info = torch.iinfo(getattr(torch, ttype))
    if divisor < info.min:
        divisor = info.max
    fast = ladder.compile(onnx.parser.parse_model(WHOLE.format(ttype, divisor)))
    numbers = [*range(-20 if info.min else 0, 20), info.min, info.max, info.min + 1]
    x = torch.tensor(numbers, dtype=getattr(torch, ttype))
    wanted = [2 * (abs(n) // abs(divisor)) * (1 if (n < 0) == (divisor < 0) else -1) for n in numbers]
    wrapped = [(n - info.min) % (1 << info.bits) + info.min for n in wanted]
    assert fast(x).tolist() == wrapped
    assert fast(x[:0]).shape == (0,)
    assert ("quotient" in fast.plan()) == (divisor != -1)


def test_integers_divided_by_0() -> None:
    for ttype in ("int32", "uint64"):
        fast = ladder.compile(onnx.parser.parse_model(WHOLE.format(ttype, 0)))
        with pytest.raises(ladder.LadderError, match=r"(?i)zero"):
            fast(torch.ones(3, dtype=getattr(torch, ttype)))


@pytest.mark.parametrize(
    ("node", "result"),
    [("Cast <to = 10> (x)", "float16"), ("Cast <to = 6> (x)", "int32"), ("Pad (x, p)", "float8e4m3fn")],
)
def test_floats_of_8_bits_have_no_chains(node: str, result: str) -> None:
    """What converts or pads them runs in torch."""
    fast = ladder.compile(
        onnx.parser.parse_model(f"""
            <ir_version: 10, opset_import: ["" : 21]>
            codes (float8e4m3fn[N] x) => ({result}[M] y) <int64[2] p = {{1, 2}}> {{ y = {node} }}""")
    )
    x = torch.tensor([1.0, -2.0, 0.5, -0.0, 448.0]).to(torch.float8_e4m3fn)
    want = torch.nn.functional.pad(x.float(), (1, 2)) if "Pad" in node else x.float()
    want = want.int() if result == "int32" else want
    assert torch.equal(fast(x).to(want.dtype), want)


MIRRORED = {
    "Pad": """<ir_version: 8, opset_import: ["" : 18]> mirrored (float[3, 7, 5] x) => (y)
        <int64[6] p = {0, 2, 4, 1, 6, 0}> { z = Relu(x)  y = Pad <mode = "reflect"> (z, p) }""",
    "Pad around": """<ir_version: 9, opset_import: ["" : 19]> around (float[3, 7, 5] x) => (y)
        <int64[6] p = {0, 2, 5, 1, 7, 0}> { z = Relu(x)  y = Pad <mode = "wrap"> (z, p) }""",
    "Pad by the ends": """<ir_version: 8, opset_import: ["" : 18]> ends (float[3, 7, 5] x) => (y)
        <int64[6] p = {0, 9, 4, 1, 6, 0}> { z = Relu(x)  y = Pad <mode = "edge"> (z, p) }""",
    "Slice": """<ir_version: 8, opset_import: ["" : 18]> mirrored (float[3, 7, 5] x) => (y)
        <int64[2] s = {-1, 5}, int64[2] e = {-99, 0}, int64[2] a = {1, 2}, int64[2] t = {-2, -1}>
        { z = Relu(x)  q = Slice(z, s, e, a, t)  y = Neg(q) }""",
}


@pytest.mark.parametrize(("mode", "first"), [("edge", [2.0, 2.0, 2.0]), ("constant", [0.0, 0.0, 2.0])])
def test_pads_below_zero_take_away(mode: str, first: list[float]) -> None:
    """Shifted signals, as kaldi's features have them; the kernel of what follows reads them so."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]> shifted (float[4] x) => (y)
        <int64[2] p = {{2, -1}}> {{ z = Pad <mode = "{mode}"> (x, p)  y = Neg(z) }}"""
    )
    fast = ladder.compile(model)
    found = fast(torch.tensor([2.0, 3.0, 4.0, 5.0]))
    assert found.tolist() == [-value for value in [*first, 3.0, 4.0]]
    assert "onnx.Pad" not in fast.plan()


@pytest.mark.parametrize("operator", MIRRORED)
def test_axes_that_kernels_read_backward(operator: str) -> None:
    model = onnx.parser.parse_model(MIRRORED[operator])
    x = torch.randn(3, 7, 5)
    x[0, 1, 2] = float("nan")
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    fast = ladder.compile(model)
    torch.testing.assert_close(fast(x), torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True)
    assert operator not in fast.plan()


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("ttype", ["int8", "int32", "int64", "float"])
def test_extremes_of_nothing(ttype: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the least and the greatest number of the type, or infinities."""
    if not kernels:
        monkeypatch.setattr(build, "build_kernels", without_kernels)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]> g ({ttype}[n, 3] x) => (a, b) {{
        zero = Constant <value_ints = [0]> ()  a = ReduceMax <keepdims = 0> (x, zero)
        b = ReduceMin <keepdims = 0> (x, zero) }}"""
    )
    dtype = np.dtype("float32" if ttype == "float" else ttype)
    ends = (-np.inf, np.inf) if ttype == "float" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    fast = ladder.compile(model)
    for found, end in zip(fast(torch.from_numpy(np.zeros((0, 3), dtype))), ends, strict=True):
        np.testing.assert_array_equal(found.numpy(), np.full(3, end, dtype))


DEFAULTS = """
<ir_version: 8, opset_import: ["" : 18]>
graph (float[n, 4] x, float[4] shift, float[4, 3] w) => (float[n, 3] y)
<float[4] shift = {0.0, 1.0, 2.0, 3.0}, float[4, 3] w = {1., 0., 2., 1., 0., 2., 1., 0., 2., 1., 0., 2.}> {
  moved = Add(x, shift)
  y = MatMul(moved, w)
}
"""


@pytest.mark.parametrize("named", [(), ("shift",), ("w",), ("w", "shift")])
def test_calls_may_give_initializers_that_are_inputs(named: tuple[str, ...], tmp_path: Any) -> None:
    """As onnxruntime has it: what a call does not give has the file's value."""
    model = onnx.parser.parse_model(DEFAULTS)
    onnx.save(model, tmp_path / "m.onnx")
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    own = {"shift": torch.full((4,), 5.0), "w": torch.arange(12.0).reshape(4, 3)}
    given = {name: own[name] for name in named}
    inputs = {name: value.numpy() for name, value in {"x": x, **given}.items()}
    (wanted,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    for fast in (ladder.compile(model), ladder.compile(str(tmp_path / "m.onnx"))):
        for found in (fast(x, **given), fast(x=x, **given), fast(x, **given)):
            torch.testing.assert_close(found, torch.from_numpy(wanted))
    with pytest.raises(ShapeError, match="x is given twice"):
        fast(x, x=x, **(given or own))
    with pytest.raises(ShapeError, match=r"must have shape \[4\]"):
        fast(x, shift=torch.zeros(3))
