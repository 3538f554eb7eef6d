"""What TVM's passes make of an emitted function, for the simulator to execute instead of it.

The passes inline, move, flatten and simplify. Code generators get what they leave.
"""

from __future__ import annotations

from typing import Any

from targets import TileDevice

SPLIT = "tirx.MakePackedAPI"
"""Pass of TVM's pipeline before which kernels are apart from the host and called by name."""


class _Reached(Exception):
    """The pipeline came to a pass."""


def after_passes(function: Any, device: TileDevice) -> tuple[Any, dict[str, Any]]:
    """Run TVM's passes over a PrimFunc.

    Parameters
    ----------
    function
        A TIRx PrimFunc as the emitters build it.
    device
        The GPU that it was emitted for.

    Returns
    -------
    ``(host, kernels)``: the PrimFunc that takes the function's arguments and launches kernels, and
    these by name.
    """
    import tvm
    from tvm import tirx
    from tvm.target import Target

    reached: list[Any] = []

    @tvm.ir.instrument.pass_instrument
    class Stop:
        def run_before_pass(self, module: Any, info: Any) -> None:
            if str(info.name) == SPLIT:
                reached.append(module)
                raise _Reached

    name = str(function.attrs["global_symbol"])
    target = Target(device.tvm_target).with_host(Target("llvm"))
    module = tirx.transform.BindTarget(target)(tvm.IRModule({name: function}))
    pipeline, _, _ = tirx.get_tir_pipeline("tirx")
    try:
        with tvm.transform.PassContext(instruments=[Stop()]):
            pipeline(module)
    except Exception:
        if not reached:
            raise
    finished = tirx.transform.StmtSimplify()(reached[0])  # runs once more for devices
    parts = {str(variable.name_hint): part for variable, part in finished.functions.items()}
    return parts.pop(name), parts
