"""Chains of float64: their functions on the simulator, and numbers in CUDA C++ to the last bit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import tvm

from ladder.ir import GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.lower.passes import as_generated, whole_doubles
from ladder.simulate import simulate_launch
from targets import get_device

DEVICE = get_device("cuda/sm_90a")
NUMBERS = (1e-20, -1 / 3, 1e-300, 0.5, -0.0, 1e300, 5e-324, 3.141592653589793)
FUNCTIONS = {"exp": np.exp, "log": np.log, "sin": np.sin, "rsqrt": lambda x: 1 / np.sqrt(x)}


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_functions(operator: str) -> None:
    g = GraphBuilder("chain")
    x = g.add("mul", g.input("x", "float64", (3, 40)), g.add("constant", value=1 / 3, type="float64"))
    function = emit_chain(g.finish(g.add(operator, x)), DEVICE, "chain")
    given, found = np.random.default_rng(0).uniform(0.5, 2, (3, 40)), np.zeros((3, 40))
    assert not simulate_launch(function, [given, found], target=DEVICE).findings
    np.testing.assert_allclose(found, FUNCTIONS[operator](given * (1 / 3)), rtol=1e-14)


def numbers_in_text(body: object) -> set[float]:
    """Return the float64 that CUDA C++ gets: TVM writes 15 decimals of those that it has itself."""
    found: set[float] = set()

    def written(number: tvm.tirx.FloatImm) -> None:
        found.add(float(f"{number.value:.15f}"))

    def by_bits(call: tvm.ir.Call) -> None:
        if call.op.name == "tirx.call_pure_extern" and call.args[0].value == "__longlong_as_double":
            found.update(struct.unpack("<d", struct.pack("<q", call.args[1].value)))

    from tvm_ffi import structural_walk

    structural_walk(body, [(tvm.tirx.FloatImm, written), (tvm.ir.Call, by_bits)])
    return found


def test_numbers_keep_all_their_bits() -> None:
    g = GraphBuilder("chain")
    value = g.input("x", "float64", (8,))
    for number in NUMBERS:
        value = g.add("maximum", value, g.add("constant", value=number, type="float64"))
    function = emit_chain(g.finish(value), DEVICE, "chain")
    _, kernels = as_generated(function, DEVICE.tvm_target)
    (kernel,) = (whole_doubles()(tvm.IRModule({"kernel": one}))["kernel"] for one in kernels.values())
    assert {abs(number) for number in NUMBERS} <= {abs(found) for found in numbers_in_text(kernel.body)}
