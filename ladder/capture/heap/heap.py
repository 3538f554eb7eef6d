"""The heap model: what a segment has read, made and changed, from which guard and mock follow.

A *segment* is a stretch of a run without a call whose effect is unknown. While it is interpreted,
each heap object that it meets has a `Node`: an external object with the path by which a matched
run finds it, or a fresh one with the step that makes it. Everything external that is read becomes
a line of the `Guard`; everything that is made or changed becomes a `Step` of the mock.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ladder.capture.heap.entries import check_elements, dict_entries, sequence_entries
from ladder.capture.heap.guard import Guard
from ladder.capture.heap.nodes import (
    CaptureError,
    Dynamic,
    Itself,
    MockStep,
    Node,
    Unrecordable,
    dynamic_parts,
    hold_strings,
)
from ladder.capture.heap.single import brief, contents, is_mutable_class, is_of_capture, made_of_parts
from ladder.capture.heap.table import ABSENT, CONTENTS, FUNCTION_FIELDS, Field, Slot
from ladder.capture.heap.tensor_nodes import TensorNodes
from ladder.capture.python.frames import NULL
from ladder.capture.values.copies import Copies
from ladder.capture.values.kinds import by_identity, by_value, is_a, is_constant, is_key
from ladder.capture.values.shapes import (
    Shapes,
    extent_path,
    has_idle_axes,
    idle_layout,
    lies_in_rows,
    liftable,
    may_be_left_open,
    strides_path,
)
from ladder.capture.values.tensors import is_plain_tensor, metadata_checks, signature

Read = Callable[[Node, Any, Any, str, str], Any]


class Heap:
    """Objects of one segment.

    lifted: Paths of what the guard leaves open.
    alike: Extents of external tensors that equal one of these are left open, except at the paths `closed`.
    numbers: Whether graphs take numbers that are no extents.
    outside: Variables of objects that were there before the segment.
    tensors: Tensors that were there before; `metadata` says what the guard holds them to.
    steps: The lines of the mock, in order; `unmade`: what no step makes, by variable.
    copied: Tensors whose rows are apart in memory by any distance: the graph takes contiguous copies;
        `copies` knows what shares memory with these.
    distinct: Types whose objects are compared by identity.
    assume: Called with a number of the graph that the program must know: variable, value, where it was read.
    filled: Tensors of fractions that are left open, by variable, type and device.
    """

    def __init__(self, shapes: Shapes, lifted: set[str], *, numbers: bool = True) -> None:
        self.shapes = shapes
        self.lifted = lifted
        self.numbers = numbers
        self.guard = Guard()
        self.nodes: dict[int, Node] = {}
        self.roots: dict[int, list[tuple[str, Any]]] = {}
        self.arguments: set[int] = set()
        self.outside: set[str] = set()
        self.tensors = TensorNodes()
        self.metadata: list[tuple[Node, Any, list[tuple[str, str]], frozenset[int] | None]] = []
        self.copied, self.copies = dict[str, Node](), Copies(shapes)
        self.filled = dict[tuple[str, torch.dtype, torch.device], torch.Tensor]()
        self.steps: list[MockStep] = []
        self.unmade: dict[str, tuple[str, Any]] = {}
        self.distinct, self._classes = set[type](), set[tuple[int, str]]()
        self.unliftable, self.closed = set[str](), set[str]()
        self.alike: frozenset[int] = frozenset()
        self.uses_dynamic = self.counts = self.makes_texts = False
        self.assume: Any = None

    def settle_texts(self) -> None:
        """Replace each `Text` in an object by its string, so that programs see no class of ours."""
        if self.makes_texts:
            hold_strings([node.obj for node in self.nodes.values()])
        self.makes_texts = False

    def release(self) -> None:
        """Drop all references to objects: recording is over, and programs may see when they die."""
        self.guard.release()
        self.nodes, self.roots, self.filled = {}, {}, {}
        self.tensors, self.metadata, self.steps = TensorNodes(), [], []
        self.copies.clear()

    def constant(self, value: Any) -> str:
        """Return text that denotes `value` itself in the generated code."""
        return self.guard.constant(value)

    # reads ------------------------------------------------------------------------------------
    def load(self, parent: Node, key: Any, value: Any, expression: str, path: str) -> Any:
        """Do as `read`, for a caller that uses what is returned: a `Dynamic` where the path is lifted."""
        if parent.holds_dynamic(key):
            return parent.lifted[key]
        if path in self.lifted and liftable(value, self.numbers) and parent.first(key, path):
            parent.lift(key, self._lift(value, expression, path))
            return parent.lifted[key]
        return self.read(parent, key, value, expression, path)

    def fix(self, dynamic: Dynamic) -> None:
        """Guard that a dynamic scalar has the value of this run, or assume it where the graph computes it."""
        if dynamic.counted is not None:
            self.assume(dynamic.var, dynamic.value, dynamic.counted)
            return
        self.guard.check_value(dynamic.var, dynamic.value, dynamic.var, self.guard.paths.get(dynamic.var))
        if dynamic.symbol is not None:
            self.settle([dynamic.symbol])

    def fix_parts(self, value: Any) -> None:
        """Guard the dynamic scalars that `value` is, or a tuple of which it is."""
        for dynamic in dynamic_parts(value):
            self.fix(dynamic)

    def settle(self, extents: Iterable[Any]) -> None:
        """Let open extents be the numbers of this run; those that must be one number stay so from now on."""
        if self.shapes:
            self.shapes.settle(extents)
            self.unliftable |= {self.guard.paths[name] for name in self.shapes.settled()}

    def read(self, parent: Node, key: Any, value: Any, expression: str, path: str) -> Any:
        """Note that `value` was found at `key` of `parent`; guard it if it was there at entry."""
        if parent.holds_dynamic(key):
            self.fix_parts(parent.settle(key))
        if not parent.first(key, path):
            return value
        place = self._place(parent, key, value, path)
        if place is NULL:
            return self.meet(value, expression, path, stable=parent.stable)
        self.guard.table.add(parent.obj, place, value, path)
        if not (by_identity(value) or by_value(value)):
            self.pin(value, path)
        return value

    def _place(self, parent: Node, key: Any, value: Any, path: str) -> Any:
        """Return under which key the table compares a part of `parent`; NULL if a line of the guard does."""
        home, constant = parent.obj, path not in self.lifted
        if not parent.pinned:
            return NULL
        if is_a(home, dict):
            return key if constant else NULL
        if type(home) is types.FunctionType and key in FUNCTION_FIELDS:
            return NULL if by_value(value) else Field(key)
        if type(home) is types.CellType and constant:
            return CONTENTS
        return Slot(key) if type(key) is types.MemberDescriptorType and constant else NULL

    def meet(self, value: Any, expression: str, path: str, *, stable: bool) -> Any:
        """Guard the external `value` that a matched run finds as `expression`."""
        stable = stable and path not in self.lifted
        pinned = stable and not by_value(value)
        if by_identity(value) or pinned:
            text = f"{expression} is {self.constant(value)}"
            self.guard.check(text, f"{path} is {brief(value)}", path, id(value))
            if not by_identity(value):
                self.pin(value, path)
        elif by_value(value):
            self._meet_value(value, expression, path)
        else:
            self._meet_object(value, expression, path, stable)
        return value

    def _lift(self, value: Any, expression: str, path: str) -> Dynamic:
        var = self.guard.bind(expression, path)
        self.guard.check(f"type({var}) is {type(value).__name__}", f"type of {path}")
        self.uses_dynamic = True
        return Dynamic(value, var, None if self.numbers else self.shapes.number(value, var))

    def _meet_value(self, value: Any, expression: str, path: str) -> None:
        self.guard.check_value(self.guard.bind(expression, path), value, path, path)

    def _meet_object(self, value: Any, expression: str, path: str, stable: bool) -> None:
        known = self.find(value)  # a root that is the same object is met as such
        if known is not None:
            self.guard.check(f"{expression} is {known.var}", f"{path} is {self.guard.path(known.var)}")
            return
        if value is NULL:
            return
        node = self.add(Node(value, self.guard.bind(expression, path), external=True, stable=stable))
        self.guard.check(f"type({node.var}) is {self.constant(type(value))}", f"type of {path}")
        if is_a(value, torch.Tensor) and is_plain_tensor(value):
            self._meet_tensor(node, path)

    def _meet_tensor(self, node: Node, path: str) -> None:
        self.tensors.append(node)
        node.autograd = (node.obj.is_leaf, node.obj._is_view())
        left_open = self._left_open(node, path)
        rows = [
            (text, f"{path}{why}")
            for text, why in metadata_checks(self.constant, node.obj, node.var, left_open)
        ]
        self.metadata.append((node, signature(node.obj), rows, left_open))

    def _left_open(self, node: Node, path: str) -> frozenset[int] | None:
        """Give symbols to the lifted extents of a tensor; return which these are, None if it is all fixed."""
        extents = enumerate(node.obj.shape) if self.lifted and not node.pinned else ()
        found = [d for d, n in extents if liftable(n, False) and self._opens(extent_path(path, d), n)]
        lies_open = strides_path(path) in self.lifted and not node.pinned
        if not (found or lies_open) or not may_be_left_open(node.obj):
            return None
        names = {dim: self.guard.bind(f"{node.var}.shape[{dim}]", extent_path(path, dim)) for dim in found}
        if has_idle_axes(node.obj.shape):
            text = f"{self.constant(idle_layout)}({node.var}) == {idle_layout(node.obj)}"
            self.guard.check(text, f"{path} lies alike along axes of one element")
        if node.obj.is_contiguous():
            self.guard.check(f"{node.var}.is_contiguous()", f"{path} is contiguous")
        else:
            self.copied[node.var] = node
            self.copies.add(node.obj)
            self.guard.check(f"{self.constant(lies_in_rows)}({node.var})", f"{path} lies in rows")
        self.shapes.lift(node.var, node.obj, names)
        return frozenset(found)

    def _opens(self, path: str, extent: int) -> bool:
        return path in self.lifted or (extent in self.alike and path not in self.closed)

    def fix_shapes(self, why: str) -> None:
        """Guard that all extents which were left open are those of this run."""
        for name, value in self.shapes.values.items():
            path = self.guard.paths[name]
            self.unliftable.add(path)
            self.guard.check(f"{name} == {value}", f"{path} == {value} ({why})")
        for node, (shape, steps, *_), _, left_open in self.metadata:
            if left_open is not None and (node.var in self.copied or has_idle_axes(shape)):
                path, text = self.guard.path(node.var), f"{node.var}.stride() == {self.constant(steps)}"
                self.unliftable.add(strides_path(path))
                self.guard.check(text, f"{path} lies as it did ({why})")
        self.copied.clear()
        self.copies.clear()
        self.shapes.forget()

    def absent(self, parent: Node, key: Any, text: str, path: str) -> None:
        """Note that `key` was not in `parent` at entry."""
        if parent.first(key):
            if parent.pinned and is_a(parent.obj, dict):
                self.guard.table.add(parent.obj, key, ABSENT, path)
            else:
                self.guard.check(text, f"{path} is not there")

    def class_attribute(self, kind: type, name: str) -> Any:
        """Look `name` up along the MRO of `kind` and guard what was found; NULL where nothing is."""
        if (id(kind), name) not in self._classes:
            self._meet_class(kind, name)
        for owner in kind.__mro__:
            here = owner.__dict__
            if name in here:
                return here[name]
        return NULL

    def _meet_class(self, kind: type, name: str) -> None:
        """Guard, once, the result of looking `name` up along the MRO."""
        self._classes.add((id(kind), name))
        if (id(kind), "") not in self._classes and is_mutable_class(kind):
            self._classes.add((id(kind), ""))
            self.guard.table.add(kind, Field("__mro__"), kind.__mro__, f"bases of {kind}")
        for owner in kind.__mro__:
            if is_mutable_class(owner):
                self._guard_class(owner, name)
            if name in owner.__dict__:
                return

    def _guard_class(self, owner: type, name: str) -> None:
        if (id(owner), f"={name}") in self._classes:
            return
        self._classes.add((id(owner), f"={name}"))
        here = owner.__dict__
        self.guard.keep.append(here)
        path = f"{owner.__module__}.{owner.__qualname__}.{name}"
        value = here.get(name, ABSENT)
        if value is not ABSENT and path in self.lifted:
            proxy = self.constant(owner)
            self.meet(value, f"{proxy}.__dict__[{name!r}]", path, stable=False)
            return
        self.guard.table.add(here, name, value, path)
        if value is not ABSENT and not (by_identity(value) or by_value(value)):
            self.pin(value, path)

    def pin(self, value: Any, path: str = "") -> Node:
        """Return the node of an object that is the same in every run that matches."""
        known = None if by_identity(value) else self.find(value)
        if known is not None and not known.pinned and known.first(Itself.PINNED):
            self.guard.check(
                f"{known.var} is {self.constant(value)}", f"{self.guard.paths.get(known.var)} is {path}"
            )
        if known is None and not by_identity(value):
            node = self.add(Node(value, self.constant(value), external=True, stable=True))
            node.pinned = True
            self.guard.paths[node.var] = path or brief(value)
            if is_a(value, torch.Tensor):
                if is_plain_tensor(value):
                    self._meet_tensor(node, self.guard.paths[node.var])
            elif is_mutable_class(type(value)):
                self.guard.table.kinds[id(value)] = (value, type(value))
        return self.node(value)

    # nodes ------------------------------------------------------------------------------------
    def add(self, node: Node) -> Node:
        self.nodes[id(node.obj)] = node
        self.guard.keep.append(node.obj)
        if node.external:
            self.outside.add(node.var)
        return node

    def derive(self, node: Node, sources: Iterable[Node]) -> None:
        """Note that a change of `node` is a change of `sources`, as with iterators over iterators."""
        for source in sources:
            node.parents |= {source.var, *source.parents}

    def add_root(self, var: str, value: Any, path: str) -> Any:
        """Register a value that the segment starts with; scalars are guarded at once."""
        self.guard.paths[var] = path
        if path in self.lifted and liftable(value, self.numbers):
            return self._lift(value, var, path)
        if by_identity(value) or by_value(value):
            return self.meet(value, var, path, stable=False)
        self.roots.setdefault(id(value), []).append((var, value))
        return value

    def find(self, value: Any) -> Node | None:
        """Return the node of `value`, meeting it first if it is a root."""
        node = self.nodes.get(id(value))
        if node is None and id(value) in self.roots:
            for var, root in self.roots.pop(id(value)):
                self.meet(root, var, self.guard.paths[var], stable=False)
            node = self.nodes.get(id(value))
        return node

    def node(self, value: Any) -> Node:
        """Return the node of a heap object.

        Raises CaptureError if it is not known where the object comes from.
        """
        node = self.find(value)
        if node is not None:
            return node
        if by_identity(value) or is_of_capture(value):
            return self.add(Node(value, self.constant(value), external=True, stable=True))
        raise CaptureError(f"an object of unknown origin: {brief(value)}")

    def fresh(self, value: Any, text: str, uses: set[str]) -> Node:
        """Register an object made in this segment by the expression `text`."""
        node = self.computed(value)
        self.steps.append(MockStep(f"{node.var} = {text}", node.var, uses, set(), False))
        return node

    def computed(self, value: Any, var: str = "") -> Node:
        """Register an object that the graph, or the step that defines `var`, makes."""
        return self.add(Node(value, var or self.guard.fresh_name(), external=False))

    def hidden(self, value: Any, origin: Any) -> Node:
        """Register an object of this segment that no step can make again."""
        node = self.computed(value)
        node.recordable = False
        node.origin = origin
        return node

    def keep_entry(self, node: Node, key: Any = ABSENT) -> None:
        """Keep what a container from outside holds, before `key` of it, or it as a whole, is changed.

        What is replaced is let go of: nothing reads it any more, and when it dies may be seen.
        """
        if not node.external or node.full:
            return
        if node.entry is None:
            node.entry = contents(node.obj)
        if is_a(node.entry, dict) and is_key(key) and key in node.entry:
            node.entry[key] = None

    def change(self, text: str, targets: Iterable[Node], uses: set[str], var: str | None = None) -> None:
        """Add a step that changes `targets`."""
        changed = list(targets)
        for node in changed:
            node.mutated, node.by_identity = True, False
        names = {node.var for node in changed}.union(*(node.parents for node in changed))
        keep = bool(names & self.outside)
        self.steps.append(MockStep(text, var, uses | names, names, keep))

    def assign(self, node: Node, key: Any, target: str, value: Any) -> None:
        """Add the step that assigns `value` to the text `target`, which is `key` of `node`."""
        uses: set[str] = set()
        text = f"{target} = {self.reference(value, uses)}"
        node.wrote(key, value)
        self.change(text, [node], uses)

    # references -------------------------------------------------------------------------------
    def reference(self, value: Any, uses: set[str]) -> str:
        """Return text that denotes `value` in the mock, and add the variables it needs to `uses`."""
        if type(value) is Dynamic:
            uses.add(value.var)
            return value.var
        node = self.find(value)
        if node is None and is_constant(value):
            return self.constant(value)
        if node is None:
            node = self.node(value) if is_of_capture(value) else self._compose(value)
        if not node.recordable:
            if node.obj is not None or node.closes:  # in a container it would live as long as this segment
                raise Unrecordable(f"a live {brief(value)} cannot be made again", node.origin)
            self.unmade[node.var] = brief(value), node.origin
        uses.add(node.var)
        return node.var

    def _compose(self, value: Any) -> Node:
        """Make an immutable object from its parts, at the time of its first use."""
        uses: set[str] = set()
        text = made_of_parts(value, lambda part: self.reference(part, uses), self.constant)
        return self.fresh(value, text, uses)

    def call_text(self, function: str, args: Iterable[Any], kwargs: dict[str, Any], uses: set[str]) -> str:
        """Return the call of what `function` denotes as text."""
        texts = [self.reference(item, uses) for item in args]
        texts += [f"{key}={self.reference(item, uses)}" for key, item in kwargs.items()]
        return f"{function}({', '.join(texts)})"

    # whole contents ---------------------------------------------------------------------------
    def touch(self, value: Any, depth: int = 8) -> None:
        """Guard all that a container holds, and what its containers hold, to `depth` levels."""
        node = self.find(value) if depth else None
        if node is None:
            if depth and is_a(value, tuple | frozenset):
                for item in contents(value):
                    self.touch(item, depth - 1)
            return
        for key in [key for key in node.lifted if node.holds_dynamic(key)]:
            self.fix_parts(node.settle(key))
        self._touch_once(node, self.read)
        self._touch_inside(value, depth)

    def _touch_once(self, node: Node, read: Read) -> None:
        if not node.full:
            if node.external and node.mutated and node.entry is None:
                raise CaptureError("a container read whole after it was changed in part")
            node.full = True
            if node.external:
                moved = node.mutated and is_a(node.obj, deque)  # what it held may be elsewhere in it now
                self._touch_entries(node, self.read if moved else read)
                node.entry = None

    def items(self, value: Any) -> Any:
        """Guard all that a container holds, and return it; numbers that are left open are `Dynamic`.

        A copy where there are any.
        """
        node = self.find(value)
        if node is None:
            return value
        self._touch_once(node, self.load)
        held = {key: item for key, item in node.lifted.items() if node.holds_dynamic(key)}
        if not held:
            return value
        if is_a(value, dict):
            return {key: held.get(key, item) for key, item in dict.items(value)}
        return [held.get(index, item) for index, item in enumerate(value)]

    def _touch_inside(self, value: Any, depth: int) -> None:
        if depth > 1 and is_a(value, dict | list | tuple | set | frozenset | deque):
            for item in [*dict.values(value)] if is_a(value, dict) else contents(value):
                self.touch(item, depth - 1)

    def _touch_entries(self, node: Node, read: Read) -> None:
        """Guard what a container held when the segment began; later entries are the segment's own."""
        value, entry = node.obj, contents(node.obj) if node.entry is None else node.entry
        if node.pinned and type(value) in (tuple, frozenset):
            for item in value:  # they are as lasting as the tuple
                self.pin(item) if not is_constant(item) else None
        elif is_a(value, list | tuple | deque):
            for part in sequence_entries(self.guard, node, entry):
                read(node, *part)
        elif is_a(value, dict):
            self.constant_keys(dict.__iter__(value) if entry is None else entry)
            for part in dict_entries(self.guard, node, entry):
                read(node, *part)
        elif is_a(value, set | frozenset):
            self.constant_keys(entry)
            check_elements(self.guard, node, entry)

    def constant_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:
            if not is_key(key):
                raise CaptureError(f"a set or dict keyed by {brief(key)}")
            self.meet_key(key)

    def meet_key(self, key: Any) -> None:
        """Guard that a function which is looked up is this one."""
        if not is_constant(key):
            self.pin(key, key.__qualname__)
