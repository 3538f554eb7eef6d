"""The passes that take a kernel from TIRx to what TVM's code generators read: TVM's, and some of ours.

`tirx.LowerTIRx` makes every index flat; TVM's `FlattenBuffer`, which comes after it, puts indices into the
normal form of iterator maps. Under a condition on the same iterator that form is wrong: where
``v % 10 >= 1`` holds, ``v // 10 * 80 + (v % 10 - 1) // 2 * 16`` becomes ``(v + 1) // 2 * 16 - 96``. Only what
else it does is done here: offsets of views go into their indices (`offsets_in_indices`).

Imports nothing of Ladder but where a pass for CUDA runs: the process that compiles for AMD GPUs reads it too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

PIPELINE = "ladder"
"""Name under which TVM finds the passes."""

LOWERING = ("LowerTIRx", "UnifyThreadBinding", "StmtSimplify", "LowerTIRxOpaque")
"""Up to flat indices."""

NARROWING = ("BF16ComputeLegalize", "NarrowDataType", "VectorizeLoop", "UnrollLoop", "StmtSimplify")
"""Up to loops as they run."""

SPLITTING = (
    "CommonSubexprElim", "FP8ComputeLegalize", "VerifyMemory", "AnnotateEntryFunc", "SplitHostDevice",
    "StmtSimplify",
)  # fmt: skip
"""Up to functions of the host and of the device.

Nothing is simplified after them: ``FP8StorageLegalize`` removes what keeps TVM from simplifying floats
(`ladder.ir.scalars.opaque`) for targets whose C or assembly has no fp8.
"""

PACKING = ("LowerIket", "MakePackedAPI", "FP8StorageLegalize", "BF16StorageLegalize")
"""Up to functions that take and return what TVM's runtime hands over."""

HOST, DEVICE = ("LowerTVMBuiltin",), ("LowerWarpMemory", "LowerIntrin")
"""After that, on each side; then come `open_quotients`, ``LowerIntrin``, `known_bits` and `whole_doubles`."""

LEFT_TO_LLVM = ("CommonSubexprElim",)
"""Pass whose work LLVM does itself: it takes a third of a build for CPUs."""

ARGUMENTS = {"NarrowDataType": (32,), "VectorizeLoop": (True,)}


def pipeline() -> str:
    """Make the passes known to TVM; returns what `tvm.compile` takes as ``tir_pipeline``."""
    import tvm

    tvm.tirx.compilation_pipeline.register_tir_pipeline(PIPELINE, _stages)
    return PIPELINE


def as_it_runs(function: Any, target: Any) -> Any:
    """Return a PrimFunc with flat indices, loops in vectors or unrolled, simplified; host and device in one.

    target: What TVM compiles it for, as `TileDevice.tvm_target` has it.
    """
    import tvm
    from tvm.target import Target

    wanted = Target(target)
    whole = wanted if wanted.kind.name == "llvm" else wanted.with_host(Target("llvm"))
    with wanted, context(wanted):
        module = tvm.tirx.transform.BindTarget(whole)(tvm.IRModule({"kernel": function}))
        return _running(module)["kernel"]


def as_generated(function: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """Return what the code generator for GPUs gets of a PrimFunc, but for the passing of arguments.

    target: What TVM compiles it for, as `TileDevice.tvm_target` has it.
    Returns: ``(host, kernels)``: the function that takes the arguments and launches kernels, and these by
        name.
    """
    import tvm
    from tvm.target import Target

    name, wanted = str(function.attrs["global_symbol"]), Target(target)
    with wanted:
        whole = wanted.with_host(Target("llvm"))
        module = tvm.tirx.transform.BindTarget(whole)(tvm.IRModule({name: function}))
        split = _sequence(SPLITTING)(_running(module))
    parts = {str(variable.name_hint): part for variable, part in split.functions.items()}
    return parts.pop(name), parts


def context(target: Any) -> Any:
    """Return the context to compile in for a target: it says which passes are left out."""
    import tvm

    left_out = LEFT_TO_LLVM if target.kind.name == "llvm" else ()
    return tvm.transform.PassContext(disabled_pass=[f"tirx.{name}" for name in left_out])


def _running(module: Any) -> Any:
    whole = _sequence(LOWERING, offsets_in_indices(), registers_per_lane(), bfloat16_in_bindings())(module)
    return _sequence(NARROWING, spread_bfloat16())(whole)


def _stages() -> tuple[Any, Any, Any]:
    """Return the passes on all functions, then on those of the host, then on those of the device."""
    import tvm

    def passes(module: Any, context: Any) -> Any:
        return _sequence((*SPLITTING, *PACKING))(_running(module))

    whole = tvm.transform.module_pass(passes, opt_level=0, name="ladder.Passes")
    host = (open_quotients(), _pass("LowerIntrin"), known_bits())
    return whole, lambda: _sequence(HOST, *host), lambda: _sequence(DEVICE, known_bits(), whole_doubles())


def _sequence(names: tuple[str, ...], *more: Any) -> Any:
    import tvm

    return tvm.transform.Sequential([*map(_pass, names), *more])


def _pass(name: str) -> Any:
    """Return one of TVM's passes by its name."""
    import tvm
    from tvm.backend.cuda import transforms

    places = (tvm.tirx.transform, tvm.s_tir.transform, transforms)
    make = next(getattr(place, name) for place in places if hasattr(place, name))
    return make(*ARGUMENTS.get(name, ()))


def _own_pass(name: str, rewritten: Callable[[Any], Any]) -> Any:
    """Return a pass of ours, which gives a function the body that ``rewritten(function)`` returns."""
    import tvm

    def changed(function: Any, module: Any, context: Any) -> Any:
        return function.with_body(rewritten(function))

    return tvm.tirx.transform.prim_func_pass(changed, opt_level=0, name=f"ladder.{name}")


def offsets_in_indices() -> Any:
    """Return the pass that lets all buffers begin where their memory does: offsets go into their indices."""
    return _own_pass("OffsetsInIndices", lambda function: _Offsets().rewritten(function.body))


def registers_per_lane() -> Any:
    """Return the pass that gives each lane of a vectorised loop its own of what the loop's body allocates.

    TVM's `VectorizeLoop` would let all lanes share it.
    """
    from tvm import tirx
    from tvm_ffi import structural_map

    change = (tirx.For, _with_registers)
    return _own_pass("RegistersPerLane", lambda function: structural_map(function.body, change))


def _with_registers(loop: Any) -> Any:
    """Return a loop with what its body allocates outside of it, if it is one over lanes."""
    from tvm import ir, tirx
    from tvm_ffi import structural_map, structural_walk

    found: list[Any] = []
    if int(loop.kind) == tirx.ForKind.VECTORIZED:
        structural_walk(loop.body, (tirx.AllocBuffer, found.append))
    if not found:
        return loop
    lanes = {s.buffer: _allocated(s.buffer, s.buffer.ty.shape[0] * loop.extent) for s in found}

    def place(indices: Any) -> list[Any]:
        (index,) = indices
        return [loop.loop_var if _is_zero(index) else index * loop.extent + loop.loop_var]

    def stored(s: Any) -> Any:
        return tirx.BufferStore(lanes[s.buffer], s.value, place(s.indices)) if s.buffer in lanes else s

    def loaded(e: Any) -> Any:
        return lanes[e.source].vload(place(e.indices)) if e.source in lanes else e

    def dropped(s: Any) -> Any:
        return tirx.Evaluate(tirx.IntImm("int32", 0))

    changes = [(tirx.AllocBuffer, dropped), (tirx.BufferStore, stored), (ir.expr.TensorLoad, loaded)]
    body = structural_map(loop.body, changes)
    outside = [tirx.AllocBuffer(lanes[s.buffer], s.annotations) for s in found]
    whole = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations)
    return tirx.SeqStmt([*outside, whole])


def open_quotients() -> Any:
    """Return the pass that spells out floor division by what is no constant, without conditions.

    TVM's `LowerIntrin` makes a choice of it whose conditions it simplifies with everything in place that
    variables are bound to: of a few quotients of quotients that takes many seconds.
    """
    from tvm import tirx
    from tvm_ffi import structural_map

    changes = [(tirx.FloorDiv, _floor_quotient), (tirx.FloorMod, _floor_remainder)]
    return _own_pass("OpenQuotients", lambda function: structural_map(function.body, changes))


def _floor_quotient(e: Any) -> Any:
    """Return ``a // b`` as the quotient that is rounded to zero, less 1 where that is above it."""
    from tvm import tirx

    return tirx.truncdiv(e.a, e.b) + _below(e) if _is_open(e) else e


def _floor_remainder(e: Any) -> Any:
    """Return ``a % b`` as the rest that has the sign of ``a``, plus ``b`` where that has the other sign."""
    from tvm import tirx

    return tirx.truncmod(e.a, e.b) + (e.b & _below(e)) if _is_open(e) else e


def _is_open(e: Any) -> bool:
    """Tell whether a division of signed integers is by what is no constant."""
    from tvm import tirx

    return str(e.ty.dtype).startswith("int") and not isinstance(getattr(e.b, "value", e.b), tirx.IntImm)


def _below(e: Any) -> Any:
    """Return -1 where signs of ``a`` and ``b`` differ and the division leaves a rest, else 0.

    No variable is bound to the rest: the same division may stand in several places.
    """
    from tvm import tirx

    kind = str(e.ty.dtype)
    rest, sign = tirx.truncmod(e.a, e.b), tirx.const(int(kind[3:].partition("x")[0]) - 1, kind)
    return ((e.a ^ e.b) & (rest | -rest)) >> sign


def known_bits() -> Any:
    """Return the pass that computes the bits of known numbers.

    CUDA C++ takes no address of them; LLVM has constants of any bits, but TVM takes a known 0 for a pointer.
    """
    from tvm import ir
    from tvm_ffi import structural_map

    def rewritten(function: Any) -> Any:
        every = function.attrs["target"].kind.name == "cuda"
        return structural_map(function.body, (ir.Call, partial(_bits_if_known, every=every)))

    return _own_pass("KnownBits", rewritten)


def _bits_if_known(call: Any, *, every: bool) -> Any:
    """Return the bits of a number in another type where it is known (``every``, or 0); others as they are."""
    from tvm import ir, tirx

    from ladder.ir.scalars import reinterpreted

    if getattr(call.op, "name", "") != "tirx.reinterpret" or isinstance(call.ty, ir.PointerType):
        return call
    value, dtype = call.args[0], str(call.ty.dtype)
    wide = isinstance(value, tirx.Broadcast)
    known = value.value if wide else value
    if not isinstance(known, tirx.IntImm | tirx.FloatImm) or (known.value and not every):
        return call
    bits = reinterpreted(dtype.rpartition("x")[0] if wide else dtype, known)
    return tirx.Broadcast(bits, value.lanes) if wide else bits


def whole_doubles() -> Any:
    """Return the pass that gives CUDA C++ known float64 by their bits.

    TVM writes 15 decimals of them: 1e-20 would be 0.
    """
    from tvm import tirx
    from tvm_ffi import structural_map

    def rewritten(function: Any) -> Any:
        if function.attrs["target"].kind.name != "cuda":
            return function.body
        return structural_map(function.body, (tirx.FloatImm, _by_bits))

    return _own_pass("WholeDoubles", rewritten)


def _by_bits(number: Any) -> Any:
    """Return a float64 of which 15 decimals are not all; other numbers as they are."""
    from tvm.script import tirx as T

    value = number.value
    if str(number.ty.dtype) != "float64" or not math.isfinite(value) or float(f"{value:.15f}") == value:
        return number
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return T.call_pure_extern("float64", "__longlong_as_double", T.int64(bits))


def bfloat16_in_bindings() -> Any:
    """Return the pass that spells out conversions of bfloat16 in what variables are bound to.

    TVM's `BF16ComputeLegalize` leaves them out, so that LLVM would convert the bits as an integer.
    """
    from tvm import tirx
    from tvm_ffi import structural_map

    def spelled(statement: Any) -> Any:
        value = structural_map(statement.value, (tirx.Cast, _spelled_out))
        return tirx.Bind(statement.var, value)

    def rewritten(function: Any) -> Any:
        if function.attrs["target"].kind.name == "cuda":  # it has the type
            return function.body
        return structural_map(function.body, (tirx.Bind, spelled))

    return _own_pass("BFloat16InBindings", rewritten)


def spread_bfloat16() -> Any:
    """Return the pass that repeats the bits of a bfloat16 in vectors of CPUs.

    TVM's `BF16StorageLegalize` takes the bits for the element, and leaves the vector's type as it was.
    """
    from tvm import tirx
    from tvm.script import tirx as T
    from tvm_ffi import structural_map

    def spread(vector: Any) -> Any:
        if str(vector.value.ty.dtype) != "bfloat16":
            return vector
        bits = tirx.Broadcast(T.reinterpret("uint16", vector.value), vector.lanes)
        return T.reinterpret(str(vector.ty.dtype), bits)

    def rewritten(function: Any) -> Any:
        if function.attrs["target"].kind.name != "llvm":
            return function.body
        return structural_map(function.body, (tirx.Broadcast, spread))

    return _own_pass("SpreadBFloat16", rewritten)


def _spelled_out(cast: Any) -> Any:
    """Return a conversion from or to bfloat16 (rounded to nearest even) in shifts; others as they are."""
    from tvm.script import tirx as T

    source, result = str(cast.value.ty.dtype), str(cast.ty.dtype)
    lanes = "x" + source.rpartition("x")[2] if "x" in source else ""
    if source.startswith("bfloat16"):
        bits = T.Cast(f"uint32{lanes}", T.reinterpret(f"uint16{lanes}", cast.value))
        return T.Cast(result, T.reinterpret(f"float32{lanes}", bits << _like(bits, 16)))
    if result.startswith("bfloat16"):
        bits = T.reinterpret(f"uint32{lanes}", T.Cast(f"float32{lanes}", cast.value))
        odd = (bits >> _like(bits, 16)) & _like(bits, 1)
        rounded = (bits + odd + _like(bits, 0x7FFF)) >> _like(bits, 16)
        return T.reinterpret(result, T.Cast(f"uint16{lanes}", rounded))
    return cast


def _like(bits: Any, number: int) -> Any:
    """Return a number in the type of some words."""
    from tvm.script import tirx as T

    kind = str(bits.ty.dtype)
    lanes = int(kind.rpartition("x")[2]) if "x" in kind else 1
    return T.uint32(number) if lanes == 1 else T.Broadcast(T.uint32(number), lanes)


def _allocated(buffer: Any, count: Any) -> Any:
    """Return a buffer like another, of other length."""
    from tvm import tirx

    kind = buffer.ty
    return tirx.decl_buffer(
        (count,), str(kind.dtype), buffer.name, scope=kind.storage_scope, data_alignment=64, layout=None
    )


class _Offsets:
    """The views of one function that begin at an offset, and what stands for them."""

    def __init__(self) -> None:
        self.views: dict[Any, Any] = {}
        self.offsets: dict[Any, Any] = {}

    def rewritten(self, body: Any) -> Any:
        """Return a body without such views."""
        from tvm import ir, tirx
        from tvm_ffi import structural_map

        def stored(s: Any) -> Any:
            where = self.moved(s.buffer, s.indices)
            return s if where is None else tirx.BufferStore(s.buffer, s.value, where)

        def loaded(e: Any) -> Any:
            where = self.moved(e.source, e.indices)
            return e if where is None else e.source.vload(where)

        changes = [(ir.Var, self.view), (tirx.BufferStore, stored), (ir.expr.TensorLoad, loaded)]
        return structural_map(body, changes)

    def view(self, variable: Any) -> Any:
        """Return what stands for a variable: for a view at an offset, one without."""
        from tvm import tirx

        if not tirx.buffer.is_buffer_var(variable) or _is_zero(variable.ty.elem_offset):
            return variable
        if variable not in self.views:
            kind = variable.ty
            view = tirx.decl_buffer(
                (kind.elem_offset + kind.shape[0],),
                str(kind.dtype),
                variable.name,
                scope=kind.storage_scope,
                data_alignment=kind.data_alignment,
                layout=None,
            )
            self.views[variable], self.offsets[view] = view, kind.elem_offset
        return self.views[variable]

    def moved(self, buffer: Any, indices: Any) -> list[Any] | None:
        """Return the indices of an access to a view that stands for another; None for other buffers."""
        if buffer not in self.offsets:
            return None
        (index,) = indices
        return [index + self.offsets[buffer]]


def _is_zero(offset: Any) -> bool:
    return offset is None or (hasattr(offset, "value") and int(offset.value) == 0)
