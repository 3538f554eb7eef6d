"""Element-wise lowerings compiled for the CPU agree with the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
from ir_examples import BITS

from ladder.ir.ops import OPERATORS

tvm = pytest.importorskip("tvm")

WHOLE = ("quotient", "of_bits", *BITS)
ELEMENTWISE = [name for name, row in OPERATORS.items() if row.elementwise and name not in WHOLE]
"""Rows of real functions; whole quotients jump where float32 rounds: tests/property has those of integers."""
POSITIVE = ("sqrt", "rsqrt", "div", "log", "log10", "log1p", "pow")
TRUTHS = {"both": (0, 1), "either": (0, 1), "negation": (0,), "select": (0,)}
"""Operator -> operands that are truth values; here, whether a number is positive."""
POINTS = np.concatenate([np.linspace(-12, 12, 4001), [-100.0, 100.0, -1e-6, 1e-6, 0.0, -0.04999, 0.05001]])
SIZE = len(POINTS)


@pytest.fixture(scope="module")
def compiled():
    """Compile one function per operator into one library."""
    from ladder.lower import builder as b

    def result(name, values):
        values = [x > 0 if at in TRUTHS.get(name, ()) else x for at, x in enumerate(values)]
        return tvm.tirx.Cast("float32", OPERATORS[name].lower(*values))

    functions = {}
    for name in ELEMENTWISE:
        with b.function(name) as emitted:
            inputs = [b.tensor(f"x{i}", (SIZE,), "float32") for i in range(OPERATORS[name].arity[0])]
            out = b.tensor("out", (SIZE,), "float32")
            with b.loop(SIZE) as i:
                b.store(out, result(name, [x[i] for x in inputs]), i)
        functions[name] = emitted.func
    return tvm.compile(tvm.IRModule(functions), target="llvm")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_lowering(compiled, name):
    row = OPERATORS[name]
    first = POINTS.astype(np.float32)
    if name in POSITIVE:
        first = np.abs(first) + np.float32(0.1)
    inputs = [first, np.roll(first, 77), np.roll(first, 300)][: row.arity[0]]
    out = tvm.runtime.empty((SIZE,), "float32")
    compiled[name](*(tvm.runtime.tensor(x) for x in inputs), out)
    exact = [x > 0 if at in TRUTHS.get(name, ()) else x.astype(np.float64) for at, x in enumerate(inputs)]
    expected = row.reference(exact, {}).astype(np.float64)
    with np.errstate(over="ignore"):
        limited = expected.astype(np.float32)
    finite = np.isfinite(limited)
    # An argument rounded to float32 shifts an exponential by |x| in relative terms; erf's
    # polynomial is good to 1.5e-7, gelu's to 1.5e-7 of |x|.
    size = np.abs(inputs[0][finite])
    scales = {"gelu": size + 1e-3, "erf": 1.0, "logaddexp": size + 1.0}
    if name == "fused":
        scales[name] = (np.abs(inputs[0] * inputs[1]) + np.abs(inputs[2]))[finite] + 1e-30
    scale = scales.get(name, np.abs(expected[finite]) * np.maximum(size, 1) + 1e-30)
    error = np.abs(out.numpy()[finite] - expected[finite]) / scale
    assert error.max() < 2e-6, f"x = {inputs[0][finite][error.argmax()]}"


SPECIAL = {"relu": lambda x, y: np.maximum(x, 0), "maximum": np.maximum, "minimum": np.minimum}


@pytest.mark.parametrize("name", SPECIAL)
def test_extremes_keep_what_is_no_number(compiled, name):
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -1.0, 2.0], np.float32)
    pairs = np.resize(np.stack(np.meshgrid(values, values), -1).reshape(-1, 2), (SIZE, 2))
    inputs = [np.ascontiguousarray(pairs[:, at]) for at in range(OPERATORS[name].arity[0])]
    out = tvm.runtime.empty((SIZE,), "float32")
    compiled[name](*(tvm.runtime.tensor(x) for x in inputs), out)
    assert np.array_equal(out.numpy(), SPECIAL[name](pairs[:, 0], pairs[:, 1]), equal_nan=True)


LIMITS = {
    "maximum": lambda x, limit: OPERATORS["maximum"].lower(x, limit),
    "maximum of a number": lambda x, limit: OPERATORS["maximum"].lower(limit, x),
    "minimum": lambda x, limit: OPERATORS["minimum"].lower(x, limit),
    "minimum of a number": lambda x, limit: OPERATORS["minimum"].lower(limit, x),
}


def test_limits_keep_what_is_no_number():
    """Numbers that are known are not NaN; what they are compared with may be."""
    from ladder.lower import builder as b

    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -1.0, 2.0], np.float32)
    with b.function("limits") as emitted:
        x = b.tensor("x", values.shape, "float32")
        out = b.tensor("out", (len(LIMITS), len(values)), "float32")
        with b.loop(len(values)) as at:
            for row, make in enumerate(LIMITS.values()):
                b.store(out, make(x[at], tvm.tirx.const(0.5, "float32")), row, at)
    found = tvm.runtime.empty((len(LIMITS), len(values)), "float32")
    tvm.compile(tvm.IRModule({"limits": emitted.func}), target="llvm")["limits"](
        tvm.runtime.tensor(values), found
    )
    want = [(np.maximum if name.startswith("maximum") else np.minimum)(values, 0.5) for name in LIMITS]
    assert np.array_equal(found.numpy(), np.float32(want), equal_nan=True)
