"""From a TIRx PrimFunc to a program: every expression and statement becomes a Python closure once.

Extents are known when a launch is simulated, so host arithmetic folds to constants. What a call
does is looked up in the tables of the machine family (`ladder.simulate.nvidia`, `ladder.simulate.amd`);
a call that no table names raises `UnknownCallError`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort
from ladder.simulate.expressions import (
    Calls,
    CallView,
    Expressions,
    GlobalBuffer,
    Registers,
    SharedBuffer,
    UnknownCallError,
    access_width,
    consecutive,
    vector,
)
from ladder.simulate.memory import Region, to_bytes
from ladder.simulate.operators import binary
from ladder.simulate.program import If, Loop, Node, Plain, Read, Sequence_, Step, Waiting
from ladder.simulate.values import NUMPY, whole

__all__ = ["CallView", "Calls", "Translator", "UnknownCallError"]

EVERYTHING = 1 << 30
"""Elements of a view of shared memory whose extent is not known."""

DYNAMIC = "tirx.use_dyn_shared_memory"
"""Says that the last number of a launch is the bytes of shared memory."""

STATIC_ALIGNMENT = 16
"""Bytes to which static buffers in shared memory are aligned."""


class Translator(Expressions):
    """Translates one PrimFunc for one launch; see `Expressions`."""

    def node(self) -> Node:
        return self.statement(self.function.body)

    # ---- statements ------------------------------------------------------------------------------
    def statement(self, s: Any) -> Node:
        kind = type(s).__name__
        if kind == "SeqStmt":
            nodes = [self.statement(part) for part in s.seq]
            nodes = [node for node in nodes if not (isinstance(node, Plain) and node.action is None)]
            return Sequence_(any(node.waits for node in nodes), nodes)
        handler = getattr(self, f"_do_{kind.lower()}", None)
        if handler is None:
            raise UnknownCallError(f"the simulator has no statement {kind}: {s}")
        self.statements.append(s)
        self.now = len(self.statements) - 1
        return handler(s)  # type: ignore[no-any-return]

    def _do_attrstmt(self, s: Any) -> Node:
        if str(s.attr_key) == "tirx.dyn_smem_bytes":
            self.launch.shared_bytes = self.number(s.value)
            return Plain()
        if str(s.attr_key) == "thread_extent":
            self._launch_thread(s.node, self.number(s.value))
        return self.statement(s.body)

    def _launch_thread(self, variable: Any, extent: int) -> None:
        """Note one axis of the grid, or the threads of a block."""
        slot, tag = self.slot(), str(variable.thread_tag)
        self.names[variable.var] = Registers(slot, 1, "int32")
        if tag == "threadIdx.x":
            self.launch.threads, self.launch.thread_slot = extent, slot
        elif tag == "clusterCtaIdx.x":
            self.launch.cluster, self.launch.rank_slots = extent, [slot]
        elif tag.startswith("blockIdx."):
            self.launch.axes["xyz".index(tag[-1])] = extent, slot
            axes = [self.launch.axes[axis] for axis in sorted(self.launch.axes)]
            self.launch.grid = [size for size, _ in axes]
            self.launch.block_slots = [place for _, place in axes]
        elif tag == "clusterCtaIdx.x":
            self.launch.cluster, self.launch.rank_slots = extent, [slot]
        else:
            raise UnknownCallError(f"the simulator does not know threads along {tag}")

    def _do_scopeiddefstmt(self, s: Any) -> Node:
        definition = getattr(s, "def")
        text = str(definition)
        extents = [self.number(extent) for extent in definition.extents]
        slots = []
        for variable in definition.def_ids:
            slots.append(self.slot())
            self.names[variable] = Registers(slots[-1], 1, "int32")
        if '"cta", "thread"' in text:
            self.launch.threads, self.launch.thread_slot = extents[0], slots[0]
        elif '"cluster", "cta"' in text:
            self.launch.cluster, self.launch.rank_slots = int(np.prod(extents)), slots
        elif '"kernel", "cta"' in text:
            self.launch.grid, self.launch.block_slots = extents, slots
        else:
            raise UnknownCallError(f"the simulator does not know {text}")
        return Plain()

    def _do_bind(self, s: Any) -> Node:
        value = self.expression(s.value)
        if not callable(value):
            self.names[s.var] = value
            return Plain()
        slot = self.slot()
        self.names[s.var] = Registers(slot, 1, str(s.var.ty))

        def action(c: Cohort) -> None:
            c.slots[slot] = whole(value(c), c.count)

        return Plain(action=action)

    def _do_allocbuffer(self, s: Any) -> Node:
        buffer = s.buffer
        if str(buffer.scope()) == "shared":
            return self._static_shared(buffer)
        if str(buffer.scope()).startswith("shared"):
            self.names[buffer] = SharedBuffer(Region("all", 0, 0), (0,), str(buffer.dtype))
            return Plain()
        count = int(np.prod([self.number(extent) for extent in buffer.shape], dtype=np.int64))
        first = self.slot(count)
        self.names[buffer] = Registers(first, count, str(buffer.dtype))
        fresh: list[None] = [None] * count

        def action(c: Cohort) -> None:
            if c.mask is None:
                c.slots[first : first + count] = fresh

        return Plain(action=action)

    def _static_shared(self, buffer: Any) -> Node:
        """Give a buffer of static size the next bytes of shared memory."""
        dtype, shape = str(buffer.dtype), tuple(self.number(extent) for extent in buffer.shape)
        start = -(-self.launch.shared_bytes // STATIC_ALIGNMENT) * STATIC_ALIGNMENT
        stop = start + int(np.prod(shape, dtype=np.int64)) * NUMPY[dtype].itemsize
        self.launch.shared_bytes = stop
        self.names[buffer] = SharedBuffer(Region(f"{buffer.name}{shape}", start, stop), shape, dtype)
        return Plain()

    def _do_declbuffer(self, s: Any) -> Node:
        buffer, dtype = s.buffer, str(s.buffer.dtype)
        viewed = self.viewed(s.data)
        if isinstance(viewed, GlobalBuffer) and self.kernels:  # extents are not among a kernel's arguments
            count = int(viewed.tensor.array.nbytes) // NUMPY[dtype].itemsize
            self.names[buffer] = replace(viewed, shape=(count,), dtype=dtype)
            return Plain()
        if viewed is None and self.kernels:  # passes have put offsets into the indices
            self.names[buffer] = SharedBuffer(Region("all", 0, EVERYTHING), (EVERYTHING,), dtype)
            return Plain()
        shape = tuple(self.number(extent) for extent in buffer.shape)
        if viewed is not None:
            held = replace(viewed, shape=shape, dtype=dtype) if isinstance(viewed, GlobalBuffer) else viewed
            self.names[buffer] = held
            return Plain()
        start = self.number(buffer.elem_offset) * NUMPY[dtype].itemsize
        stop = start + int(np.prod(shape, dtype=np.int64)) * NUMPY[dtype].itemsize
        self.names[buffer] = SharedBuffer(Region(f"{buffer.name}{shape}", start, stop), shape, dtype)
        return Plain()

    def viewed(self, data: Any) -> GlobalBuffer | Registers | None:
        """Return the argument or the registers that a declared buffer is a flat view of, if any."""
        while type(data).__name__ == "Call" and len(data.args):
            data = data.args[0]
        held = self.names.get(data) if type(data).__name__ == "Var" else None
        return held if isinstance(held, GlobalBuffer | Registers) else None

    def _do_bufferstore(self, s: Any) -> Node:
        held, value = self.names[s.buffer], self.read(s.value)
        indices, lanes = consecutive(s.indices)
        if lanes > 1 and isinstance(held, Registers):
            return Plain(
                action=self.wide_load(held.first + self.number(indices[0]), held.dtype, value, lanes)
            )
        return Plain(action=self.store(held, indices, value, lanes))

    def store(self, held: Any, indices: Any, value: Read, lanes: int = 1) -> Step:
        """Return a closure that stores an element (or ``lanes`` of them)."""
        statement, kind = self.now, NUMPY[held.dtype]
        if isinstance(held, Registers):
            slot = held.first + (self.number(indices[0]) if len(indices) else 0)
            return lambda c: c.store(slot, value(c), statement, kind)
        pointer = self.pointer(self.address(held, indices))
        shared = isinstance(held, SharedBuffer)
        if shared:
            self.launch.narrowest = min(self.launch.narrowest, access_width(held.dtype, lanes))

        def action(c: Cohort) -> None:
            found = value(c)
            elements = c.spread(found, kind)[:, :, None] if lanes == 1 else vector(c, found, kind, lanes)
            at = pointer(c)
            if shared:
                c.machine.memory.store_shared(c, at.offset, to_bytes(elements), at.target, statement)
            else:
                c.machine.memory.store_global(c, at, to_bytes(elements), statement)

        return action

    def _do_ifthenelse(self, s: Any) -> Node:
        condition = self.expression(s.condition)
        if not callable(condition):
            chosen = s.then_case if condition else s.else_case
            return Plain() if chosen is None else self.statement(chosen)
        then = _filled(self.statement(s.then_case))
        otherwise = None if s.else_case is None else _filled(self.statement(s.else_case))
        waits = then.waits or (otherwise is not None and otherwise.waits)
        return If(waits, condition, then, otherwise)

    def _do_while(self, s: Any) -> Node:
        condition, body = self.read(s.condition), self.statement(s.body)
        return Loop(body.waits, condition=condition, body=body)

    def _do_for(self, s: Any) -> Node:
        if str(s.kind).endswith(("VECTORIZED", "UNROLLED")) or int(s.kind) in (2, 3):
            return self._expanded(s)
        slot = self.slot()
        self.names[s.loop_var] = Registers(slot, 1, "int32")
        start, extent = self.read(s.min), self.expression(s.extent)
        stop = binary("Add", self.expression(s.min), extent, "int32")
        condition = binary("LT", lambda c: c.slots[slot], stop, "int32")

        def advance(c: Cohort) -> None:
            c.slots[slot] = c.slots[slot] + 1

        body = self.statement(s.body)
        return Loop(body.waits, slot, start, condition, advance, body)

    def _expanded(self, s: Any) -> Node:
        """Translate a loop whose turns are unrolled; a vector copy becomes one wide access."""
        extent = self.number(s.extent)
        slot = self.slot()
        self.names[s.loop_var] = Registers(slot, 1, "int32")
        if int(s.kind) == 2 and extent > 1 and type(s.body).__name__ == "BufferStore":
            wide = self._vector_copy(s, slot, extent)
            if wide is not None:
                return wide
        nodes = []
        for turn in range(extent):
            self.fixed[slot] = turn
            nodes.append(self.statement(s.body))
        del self.fixed[slot]
        return Sequence_(any(node.waits for node in nodes), nodes)

    def _vector_copy(self, s: Any, slot: int, extent: int) -> Node | None:
        """Return one wide load, store or both, or None if the loop is no copy from or to memory."""
        store = s.body
        target = self.names[store.buffer]
        source = self.names.get(store.value.source) if type(store.value).__name__ == "TensorLoad" else None
        self.statements.append(store)
        self.now = len(self.statements) - 1
        if source is None or (isinstance(target, Registers) and isinstance(source, Registers)):
            return None
        self.fixed[slot] = 0
        if not isinstance(target, Registers) and not isinstance(source, Registers):
            value = self.load(source, store.value.indices, extent)
            action = self.store(target, store.indices, value, extent)
            del self.fixed[slot]
            return Plain(action=action)
        registers, indices = (
            (target, store.indices) if isinstance(target, Registers) else (source, store.value.indices)
        )
        first = registers.first + self.number(indices[0])
        if isinstance(target, Registers):
            action = self.wide_load(
                first, target.dtype, self.load(source, store.value.indices, extent), extent
            )
        else:
            action = self.store(target, store.indices, self.wide_read(first, source.dtype, extent), extent)
        del self.fixed[slot]
        return Plain(action=action)

    def wide_load(self, first: int, dtype: str, value: Read, extent: int) -> Step:
        """Return a closure that puts elements ``[warps, 32, extent]`` into registers."""
        statement, kind = self.now, NUMPY[dtype]

        def action(c: Cohort) -> None:
            elements = vector(c, value(c), kind, extent)
            for lane in range(extent):
                c.store(first + lane, np.ascontiguousarray(elements[:, :, lane]), statement, kind)

        return action

    def _do_evaluate(self, s: Any) -> Node:
        if type(s.value).__name__ != "Call":
            return Plain()
        call = self.view(s.value)
        if call.name == "tirx.call_ffi_kernel":
            name, *arguments = s.value.args
            return self._launch(self.kernels[str(name.value)], arguments)
        if call.name == "tirx.tvm_call_packed":
            return Plain(action=self.calls.steps[call.name](self, self._packed(s.value)))
        if call.name == "tirx.cuda.func_call":
            done = self._helper(s.value, call)
            return done if isinstance(done, Node) else Plain(action=done)
        if call.name in self.calls.stops:
            return Waiting(True, self.calls.stops[call.name](self, call))
        if call.name not in self.calls.steps:
            raise UnknownCallError(f"the simulator does not know what {call.name} does: {s}")
        return Plain(action=self.calls.steps[call.name](self, call))

    def _launch(self, kernel: Any, arguments: Any) -> Node:
        """Translate a kernel where the host launches it; grid and block follow its arguments."""
        for parameter, argument in zip(kernel.params, arguments, strict=False):
            if "handle" in str(parameter.ty):
                self.names[parameter] = self.viewed(argument)
            else:
                self.names[parameter] = self.expression(argument)
        if DYNAMIC in [str(what) for what in kernel.attrs["tirx.kernel_launch_params"]]:
            self.launch.shared_bytes = self.number(arguments[-1])
        self.function = kernel
        return self.statement(kernel.body)


def _filled(node: Node) -> Node:
    """Return a node that does something, for branches that were translated away."""
    return Sequence_(False, []) if isinstance(node, Plain) and node.action is None else node
