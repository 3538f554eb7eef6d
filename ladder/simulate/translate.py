"""From a TIRx PrimFunc to a program: every expression and statement becomes a Python closure once.

Extents are known when a launch is simulated, so host arithmetic folds to constants. What a call
does is looked up in the tables of the machine family (`ladder.simulate.nvidia`); a call that no
table names raises `UnknownCallError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort
from ladder.simulate.memory import Pointer, Region, to_bytes
from ladder.simulate.operators import BINARY, UNARY_CALLS, binary, select
from ladder.simulate.program import If, Loop, Node, Plain, Read, Sequence_, Step, Waiting
from ladder.simulate.values import NUMPY, Value, cast, constant, is_array, reinterpret, spread
from tile_types.errors import LadderError


class UnknownCallError(LadderError):
    """The simulator has no semantics for a call of the TIR."""


@dataclass(frozen=True)
class Registers:
    """A buffer in registers: slots ``first ..`` of an element type."""

    first: int
    count: int
    dtype: str


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer in shared memory."""

    region: Region
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GlobalBuffer:
    """A tensor argument."""

    tensor: Any
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CallView:
    """A call as the tables see it.

    Parameters
    ----------
    name
        Operator, or the helper's name.
    operands
        Arguments that are no strings.
    modifiers
        Non-empty string arguments: the parts of a PTX spelling.
    statement
        Number of the statement that it is part of.
    dtype
        Type of the result.
    """

    name: str
    operands: tuple[Any, ...]
    modifiers: tuple[str, ...]
    statement: int
    dtype: str


@dataclass
class Calls:
    """What calls do, by operator: return a value, have an effect, or may wait.

    Each entry makes a closure from the translator and a `CallView`.
    """

    reads: Mapping[str, Callable[[Translator, CallView], Any]]
    steps: Mapping[str, Callable[[Translator, CallView], Step]]
    stops: Mapping[str, Callable[[Translator, CallView], Any]]
    helpers: Callable[[Translator, CallView, str], Any]


class HostPlace:
    """Memory on the host's stack that nothing has filled yet."""


@dataclass
class Launch:
    """What a function says about its launch.

    Parameters
    ----------
    grid, cluster, threads
        Extents: of the grid, blocks of a cluster, threads of a block.
    shared_bytes
        Shared memory of a block.
    narrowest
        Bytes of the narrowest store to shared memory.
    unit
        Warps that collective instructions need together.
    together
        Whether blocks of different clusters wait for each other.
    block_slots, rank_slots, thread_slot
        Registers in which threads find their numbers.
    """

    grid: list[int] = field(default_factory=list)
    cluster: int = 1
    threads: int = 0
    shared_bytes: int = 0
    narrowest: int = 4
    unit: int = 1
    together: bool = False
    block_slots: list[int] = field(default_factory=list)
    rank_slots: list[int] = field(default_factory=list)
    thread_slot: int = -1


class Translator:
    """Translates one PrimFunc for one launch.

    Parameters
    ----------
    function
        The PrimFunc.
    values
        Extents by their variables.
    tensors
        Tensors by the variables of the buffer parameters.
    calls
        Semantics of calls.
    """

    def __init__(
        self, function: Any, values: Mapping[Any, int], tensors: Mapping[Any, Any], calls: Calls
    ) -> None:
        self.function, self.calls = function, calls
        self.names: dict[Any, Any] = dict(values)
        self.statements: list[Any] = []
        self.slots = 0
        self.launch = Launch()
        self.now = -1
        self.workspace: Any = None
        self.fixed: dict[Any, int] = {}
        for variable, tensor in tensors.items():
            shape = tuple(self.number(extent) for extent in variable.shape)
            self.names[variable] = GlobalBuffer(tensor, shape, str(variable.dtype))

    def node(self) -> Node:
        """Return the translated body."""
        return self.statement(self.function.body)

    # ---- names -----------------------------------------------------------------------------------
    def slot(self, count: int = 1) -> int:
        """Reserve registers and return the first."""
        self.slots += count
        return self.slots - count

    def number(self, expression: Any) -> int:
        """Return an expression that must be known on the host."""
        value = self.expression(expression)
        if callable(value):
            raise UnknownCallError(f"the host must know {expression}")
        return int(value)

    # ---- expressions -----------------------------------------------------------------------------
    def expression(self, e: Any) -> Any:
        """Return a number if an expression is constant, else a closure from a cohort to its value."""
        kind = type(e).__name__
        if kind in ("int", "float", "bool"):
            return e
        if kind in BINARY:
            operands = self.expression(e.a), self.expression(e.b)
            return binary(kind, *operands, str(e.a.ty))
        handler = getattr(self, f"_read_{kind.lower()}", None)
        if handler is None:
            raise UnknownCallError(f"the simulator has no expression {kind}: {e}")
        return handler(e)

    def read(self, e: Any) -> Read:
        """Return a closure for an expression, constant or not."""
        value = self.expression(e)
        return value if callable(value) else lambda c: value

    def _read_intimm(self, e: Any) -> Value:
        return constant(int(e.value), str(e.ty))

    def _read_floatimm(self, e: Any) -> Value:
        return constant(float(e.value), str(e.ty))

    def _read_var(self, e: Any) -> Any:
        held = self.names.get(e)
        if held is None:
            raise UnknownCallError(f"{e} has no value")
        if isinstance(held, Registers):
            slot = held.first
            if slot in self.fixed:
                return self.fixed[slot]
            return lambda c: c.slots[slot]
        return held

    def _read_cast(self, e: Any) -> Any:
        value, dtype = self.expression(e.value), str(e.ty)
        return (lambda c: cast(value(c), dtype)) if callable(value) else cast(value, dtype)

    def _read_not(self, e: Any) -> Any:
        value = self.expression(e.a)
        return (lambda c: np.logical_not(value(c))) if callable(value) else not value

    def _read_select(self, e: Any) -> Any:
        parts = (self.expression(e.condition), self.expression(e.true_value), self.expression(e.false_value))
        return select(*parts, str(e.ty))

    def _read_tensorload(self, e: Any) -> Any:
        return self.load(self.names[e.source], e.indices)

    def _read_call(self, e: Any) -> Any:
        call = self.view(e)
        if call.name in UNARY_CALLS:
            function, value = UNARY_CALLS[call.name], self.read(call.operands[0])
            return lambda c: function(np.asarray(value(c), np.float32))
        special = getattr(self, f"_call_{call.name.rpartition('.')[2]}", None)
        if special is not None and call.name.split(".")[0] in ("tirx", "prim") and call.name.count(".") == 1:
            return special(e, call)
        if call.name == "tirx.cuda.func_call":
            return self._helper(e, call)
        if call.name == "tirx.tvm_call_packed":
            call = self._packed(e)
        if call.name not in self.calls.reads:
            raise UnknownCallError(f"the simulator does not know what {call.name} returns: {e}")
        return self.calls.reads[call.name](self, call)

    def _helper(self, e: Any, call: CallView) -> Any:
        strings = [str(a.value) for a in e.args if type(a).__name__ == "StringImm"]
        return self.calls.helpers(self, replace(call, name=strings[0]), strings[1])

    def _call_if_then_else(self, e: Any, call: CallView) -> Any:
        condition = self.expression(call.operands[0])
        if not callable(condition):
            return self.expression(call.operands[1] if condition else call.operands[2])
        then, other = self.read(call.operands[1]), self.read(call.operands[2])
        kind = NUMPY[call.dtype]

        def value(c: Cohort) -> Value:
            chosen = condition(c)
            if not is_array(chosen):
                return then(c) if chosen else other(c)
            results, saved = [], c.mask
            for sense, branch in ((True, then), (False, other)):
                # Only the threads that take a side may read memory for it.
                mask = c.narrowed(chosen, sense)
                c.mask = mask
                results.append(branch(c) if mask.any() else 0)
                c.mask = saved
            return np.where(chosen, *results).astype(kind, copy=False)

        return value

    def _call_reinterpret(self, e: Any, call: CallView) -> Any:
        value = self.expression(call.operands[0])
        if call.dtype not in NUMPY:  # of a pointer
            return value
        source, dtype = str(call.operands[0].ty), call.dtype
        if callable(value):
            return lambda c: reinterpret(value(c), source, dtype)
        return reinterpret(value, source, dtype)

    def _call_address_of(self, e: Any, call: CallView) -> Any:
        target = call.operands[0]
        if type(target).__name__ == "Var":
            held = self.names[target]
            if not isinstance(held, (Registers, SharedBuffer, GlobalBuffer)):
                return held
            return self.address(held, [0])
        return self.address(self.names[target.source], target.indices)

    def _call_tvm_stack_alloca(self, e: Any, call: CallView) -> Any:
        """Return a place on the host's stack; what the host puts there replaces it."""
        return HostPlace()

    def view(self, e: Any) -> CallView:
        """Return a call with its strings apart."""
        operands = tuple(a for a in e.args if type(a).__name__ != "StringImm")
        strings = tuple(str(a.value) for a in e.args if type(a).__name__ == "StringImm" and a.value)
        return CallView(str(e.op.name), operands, strings, self.now, str(e.ty))

    # ---- buffers ---------------------------------------------------------------------------------
    def index(self, shape: tuple[int, ...], indices: Any) -> Any:
        """Return the row-major element index."""
        total: Any = 0
        for position, index in enumerate(indices):
            total = binary("Mul", total, shape[position] if position else 1, "int64")
            total = binary("Add", total, self.expression(index), "int64")
        return total

    def register(self, e: Any) -> tuple[int, str]:
        """Return the slot and type of a register operand."""
        held = self.names[e.source if type(e).__name__ == "TensorLoad" else e]
        index = self.number(e.indices[0]) if type(e).__name__ == "TensorLoad" and len(e.indices) else 0
        if not isinstance(held, Registers) or not 0 <= index < held.count:
            raise UnknownCallError(f"{e} is no register")
        return held.first + index, held.dtype

    def address(self, held: Any, indices: Any) -> Any:
        """Return the address of an element: a `Pointer` or a closure that returns one."""
        if isinstance(held, Registers):
            return Pointer("local", held.first + self.number(indices[0]) if len(indices) else held.first, 0)
        size = NUMPY[held.dtype].itemsize
        offset = binary("Mul", self.index(held.shape, indices), size, "int64")
        shared = isinstance(held, SharedBuffer)
        base, target = (held.region.start, held.region) if shared else (0, held.tensor)
        space = "shared" if shared else "global"
        if not callable(offset):
            return Pointer(space, target, base + offset)
        return lambda c: Pointer(space, target, base + _wide(offset(c)))

    def load(self, held: Any, indices: Any, lanes: int = 1) -> Any:
        """Return a closure that loads an element (or ``lanes`` of them, ``[warps, 32, lanes]``)."""
        statement = self.now
        if isinstance(held, Registers):
            slot, kind = held.first + (self.number(indices[0]) if len(indices) else 0), NUMPY[held.dtype]
            return lambda c: c.load(slot, statement, kind)
        pointer, dtype = self.pointer(self.address(held, indices)), held.dtype
        width = NUMPY[dtype].itemsize * lanes
        shared = isinstance(held, SharedBuffer)

        def value(c: Cohort) -> Value:
            at, memory = pointer(c), c.machine.memory
            if shared:
                data = memory.load_shared(c, at.offset, width, at.target, statement)
            else:
                data = memory.load_global(c, at, width, statement)
            elements = data.view(NUMPY[dtype])
            return elements if lanes > 1 else elements[:, :, 0]

        return value

    def pointer(self, address: Any) -> Callable[[Cohort], Pointer]:
        """Return a closure for an address, constant or not."""
        return address if callable(address) else lambda c: address

    # ---- statements ------------------------------------------------------------------------------
    def statement(self, s: Any) -> Node:
        """Translate a statement."""
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
        return self.statement(s.body)

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
            c.slots[slot] = value(c)

        return Plain(action=action)

    def _do_allocbuffer(self, s: Any) -> Node:
        buffer = s.buffer
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

    def _do_declbuffer(self, s: Any) -> Node:
        buffer, dtype = s.buffer, str(s.buffer.dtype)
        shape = tuple(self.number(extent) for extent in buffer.shape)
        start = self.number(buffer.elem_offset) * NUMPY[dtype].itemsize
        stop = start + int(np.prod(shape, dtype=np.int64)) * NUMPY[dtype].itemsize
        self.names[buffer] = SharedBuffer(Region(f"{buffer.name}{shape}", start, stop), shape, dtype)
        return Plain()

    def _do_bufferstore(self, s: Any) -> Node:
        held, value = self.names[s.buffer], self.read(s.value)
        return Plain(action=self.store(held, s.indices, value))

    def store(self, held: Any, indices: Any, value: Read, lanes: int = 1) -> Step:
        """Return a closure that stores an element (or ``lanes`` of them)."""
        statement, kind = self.now, NUMPY[held.dtype]
        if isinstance(held, Registers):
            slot = held.first + (self.number(indices[0]) if len(indices) else 0)
            return lambda c: c.store(slot, value(c), statement, kind)
        pointer = self.pointer(self.address(held, indices))
        shared = isinstance(held, SharedBuffer)
        if shared:
            self.launch.narrowest = min(self.launch.narrowest, kind.itemsize * lanes)

        def action(c: Cohort) -> None:
            found = value(c)
            elements = spread(found, c.count, kind)[:, :, None] if lanes == 1 else found
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
        if int(s.kind) == 2 and type(s.body).__name__ == "BufferStore":
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
        """Return one wide load into registers or store from them, or None if the loop is no such copy."""
        store = s.body
        target = self.names[store.buffer]
        source = self.names.get(store.value.source) if type(store.value).__name__ == "TensorLoad" else None
        self.statements.append(store)
        self.now = len(self.statements) - 1
        if source is None or isinstance(target, Registers) == isinstance(source, Registers):
            return None
        self.fixed[slot] = 0
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
            elements = value(c)
            for lane in range(extent):
                c.store(first + lane, elements[:, :, lane].astype(kind, copy=False), statement, kind)

        return action

    def wide_read(self, first: int, dtype: str, extent: int) -> Read:
        """Return a closure that collects registers into ``[warps, 32, extent]``."""
        statement, kind = self.now, NUMPY[dtype]

        def value(c: Cohort) -> Value:
            loaded = [spread(c.load(first + i, statement, kind), c.count, kind) for i in range(extent)]
            return np.stack(loaded, axis=2)

        return value

    def _do_evaluate(self, s: Any) -> Node:
        if type(s.value).__name__ != "Call":
            return Plain()
        call = self.view(s.value)
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

    def _packed(self, e: Any) -> CallView:
        """Return a call of the host's runtime: its function's name, and every argument in order."""
        return CallView(str(e.args[0].value), tuple(e.args[1:]), (), self.now, "")


def _filled(node: Node) -> Node:
    """Return a node that does something, for branches that were translated away."""
    return Sequence_(False, []) if isinstance(node, Plain) and node.action is None else node


def _wide(value: Value) -> Value:
    return value.astype(np.int64, copy=False) if is_array(value) else value
