"""The machine: what single instructions ask for beyond attributes, containers and operators."""

from __future__ import annotations

import abc
import builtins
import importlib.util
import sys
import types
from collections import deque
from typing import Any

import torch

from ladder.capture import natives, polyfills
from ladder.capture.containers import BY_IDENTITY, STOP, taken
from ladder.capture.frames import NULL, Frame
from ladder.capture.interpreter import Interpreter
from ladder.capture.kinds import by_identity, is_a, is_constant, is_plain
from ladder.capture.nodes import CaptureError, Dynamic
from ladder.capture.shapes import DynamicSize
from ladder.capture.tensors import is_plain_tensor

_HOOK = "__subclasshook__"
_HOOK_OWNERS = frozenset({"collections.abc", "abc", "contextlib", "os", "importlib.abc", "numbers"})
_MATCH_SELF = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)


def make_set(*items: Any) -> set[Any]:
    """Return the set of `items`."""
    return set(items)


def make_dict(*items: Any) -> dict[Any, Any]:
    """Return the dictionary of the first half of `items` to the second."""
    half = len(items) // 2
    return dict(zip(items[:half], items[half:], strict=True))


def formatted(value: Any, conversion: int, spec: str) -> str:
    """Return a replacement field of an f-string; `conversion` as in FORMAT_VALUE."""
    convert = (None, str, repr, ascii)[conversion]
    return format(value if convert is None else convert(value), spec)


class Machine(Interpreter):
    """Interprets and records; one machine serves one run."""

    # variables --------------------------------------------------------------------------------
    def load_global(self, frame: Frame, name: str) -> Any:
        """Return a global or builtin."""
        names = frame.names
        if name not in names and name not in frame.builtins:
            raise NameError(f"name '{name}' is not defined", name=name)
        if not self.recording:
            return names[name] if name in names else frame.builtins[name]
        node = self.heap.pin(names)
        home = names.get("__name__", "globals")
        if name in names:
            return self.heap.load(node, name, names[name], f"{node.var}[{name!r}]", f"{home}.{name}")
        self.heap.absent(node, name, f"{name!r} not in {node.var}", f"{home}.{name}")
        inside = self.heap.pin(frame.builtins)
        value = frame.builtins[name]
        return self.heap.load(inside, name, value, f"{inside.var}[{name!r}]", f"builtins.{name}")

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        """Assign a global."""
        value = self.settled(value, keep=True)
        if self.recording:
            try:
                node = self.heap.pin(frame.names)
                if name not in frame.names:
                    self.heap.absent(node, name, f"{name!r} not in {node.var}", name)
                uses: set[str] = set()
                text = f"{node.var}[{name!r}] = {self.heap.reference(value, uses)}"
                node.wrote(name, value)
                self.heap.change(text, [node], uses)
            except CaptureError as error:
                self.stop(str(error), self.here())
        frame.names[name] = self.unlifted(value)

    def made_cell(self, cell: types.CellType) -> None:
        """Register a new cell."""
        if self.recording:
            uses: set[str] = set()
            kind = self.heap.constant(types.CellType)
            try:
                inside = self.heap.reference(cell.cell_contents, uses)
            except ValueError:
                inside = ""
            except CaptureError:
                self.heap.hidden(cell, self.here())
                return
            self.heap.fresh(cell, f"{kind}({inside})", uses)

    def load_cell(self, frame: Frame, name: str) -> Any:
        """Return the contents of a cell."""
        cell = frame.slots[name]
        try:
            value = cell.cell_contents
        except ValueError:
            free = name in frame.code.co_freevars
            where = f"cannot access free variable '{name}' where it is not associated with a value in"
            if free:
                raise NameError(f"{where} enclosing scope", name=name) from None
            raise UnboundLocalError(
                f"cannot access local variable '{name}' where it is not associated with a value"
            ) from None
        if not self.recording:
            return value
        try:
            node = self.heap.node(cell)
        except CaptureError as error:
            self.stop(str(error), self.here())
            return value
        path = f"{self.heap.guard.path(node.var)}"
        return self.heap.load(node, "contents", value, f"{node.var}.cell_contents", path)

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        """Assign a cell."""
        value = self.settled(value, keep=True)
        if self.recording:
            try:
                node = self.heap.node(cell)
                uses: set[str] = set()
                text = f"{node.var}.cell_contents = {self.heap.reference(value, uses)}"
                node.wrote("contents", value)
                self.heap.change(text, [node], uses)
            except CaptureError as error:
                self.stop(str(error), self.here())
        cell.cell_contents = self.unlifted(value)

    def delete_cell(self, cell: types.CellType) -> None:
        """Empty a cell."""
        if self.recording:
            try:
                node = self.heap.node(cell)
                node.wrote("contents")
                self.heap.change(f"del {node.var}.cell_contents", [node], set())
            except CaptureError as error:
                self.stop(str(error), self.here())
        del cell.cell_contents

    # strings ----------------------------------------------------------------------------------
    def join(self, parts: list[Any]) -> Any:
        """Concatenate the parts of an f-string."""
        if any(type(part) is Dynamic for part in parts):
            total: Any = ""
            for part in parts:
                total = self.binary("+", total, part)
            return total
        return "".join(parts)

    def formatted(self, value: Any, conversion: int, spec: Any) -> Any:
        """Return a replacement field of an f-string."""
        if not self.recording:
            return self.natively(formatted, value, conversion, spec)
        if type(value) is str and spec == "" and conversion == 0:
            return value
        given = (value, conversion, spec)
        return self.recorded(self._formatted, given, (formatted, given))

    def _formatted(self, value: Any, conversion: int, spec: Any) -> Any:
        if type(value) is not Dynamic and not is_plain(value):
            raise CaptureError(f"format of {type(value).__qualname__}")
        return self.replay(formatted, (value, conversion, spec), {}, looking=True)

    # building ---------------------------------------------------------------------------------
    def add_to(self, target: Any, method: Any, args: tuple[Any, ...]) -> None:
        """Add to a container that a comprehension is building."""
        args = tuple(map(self.settled, args))
        if self.recording and method is not list.append and not self.hashed_natively(args[:1]):
            self.opaque(method, (target, *args), {}, "push", "a key that is not a constant")
            return
        if self.recording:
            try:
                node = self.heap.node(target)
                uses: set[str] = set()
                texts = [node.var, *(self.heap.reference(item, uses) for item in args)]
                text = f"{self.heap.constant(method)}({', '.join(texts)})"
                self.heap.change(text, [node], uses)
            except CaptureError as error:
                self.hide(target, getattr(error, "origin", None))
        method(target, *map(self.plain, args))

    def hashed_natively(self, keys: Any) -> bool:
        """Say whether no code of the user's runs where `keys` are hashed and compared."""
        return not self.recording or all(
            is_constant(key) or is_plain_tensor(key) or (type(key).__hash__, type(key).__eq__) == BY_IDENTITY
            for key in keys
        )

    def build_set(self, items: list[Any]) -> Any:
        """Make a set of items on the stack."""
        items = [self.settled(item) for item in items]
        if not self.hashed_natively(items):
            return self.opaque(make_set, tuple(items), {}, "push", "a set of hashable objects")
        return self.new(set(items))

    def build_dict(self, keys: list[Any], values: list[Any]) -> Any:
        """Make a dictionary of items on the stack."""
        keys, values = [self.settled(key) for key in keys], [self.settled(item) for item in values]
        if not self.hashed_natively(keys):
            given = (*keys, *values)
            return self.opaque(make_dict, given, {}, "push", "a dictionary keyed by hashable objects")
        return self.new(dict(zip(keys, values, strict=True)))

    def hide(self, target: Any, origin: Any) -> None:
        """Note that a fresh container holds what no step can make."""
        node = self.heap.find(target)
        if node is None or node.external:
            self.stop("a container of unknown origin", self.here())
            return
        node.recordable = False
        node.origin = node.origin or origin or self.here()

    def extend(self, target: Any, method: Any, value: Any) -> None:
        """Extend a container that a display is building."""
        if not self.recording:
            self.natively(method, target, value)
            return
        value = self.iterated(value, list if method is list.extend else set)
        if not self._extendable(value):
            raise CaptureError("extended by an unknown iterable")
        self._admit_iterable(value)
        items = self.drained(value) if self._is_hidden(value) else value
        if not self.hashed_natively(items if method is set.update else ()):
            self.stop("a set of hashable objects", self.here())
            method(target, items)
            return
        self.heap.touch(items, 1)
        try:
            self.perform(method, (target, items), {}, [self.heap.node(target)])
        except CaptureError as error:
            self.hide(target, getattr(error, "origin", None))
            method(target, items)

    def _extendable(self, value: Any) -> bool:
        known = type(value) in natives.METHODS or type(value) in natives.VIEWS or is_constant(value)
        return known or type(value) in natives.ITERATORS or self._is_hidden(value)

    def unpacked(self, value: Any, first: int | None = None, rest: bool = True) -> Any:
        """Return the items of a sequence to unpack; None if a tuple of them was pushed instead.

        `first` items are taken one by one (all, if it is None), then all others if `rest`, else one more.
        """
        if type(value) in (tuple, DynamicSize):
            if self.recording:
                self.heap.touch(value, 1)
            return value
        value = self.plain(value)
        if not self.recording:
            return self.natively(taken, value, first, rest)
        if is_a(value, str | bytes | range | torch.Size):
            return tuple(value)
        if type(value) is list or is_a(value, tuple):
            self.heap.touch(value, 1)
            return tuple(value)
        if type(value) in natives.METHODS or self._is_hidden(value) or type(value) in natives.ITERATORS:
            with self.barrier():
                return self.drained(self.iterate(value), None if rest or first is None else first + 1)
        if is_a(value, torch.Tensor) and is_plain_tensor(value) and value.dim():
            with self.barrier():
                return tuple(self.call(torch.unbind, (value,), {}))
        self.frames[-1].stack.append(
            self.opaque(taken, (value, first, rest), {}, "redo", "an unknown iterable is unpacked")
        )
        return None

    # calls ------------------------------------------------------------------------------------
    def call_spread(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call with ``*args, **kwargs``."""
        if self.recording:
            if type(args) is not tuple:
                with self.barrier():
                    args = self.drained(self.iterate(self.iterated(args, tuple)))
            try:
                self.heap.touch(args, 1)
                self.heap.touch(kwargs, 1)
            except CaptureError as error:
                self.stop(str(error), self.here())
        args = tuple(args)
        if function is super and not args:
            args = self.super_arguments(self.frames[-1])
        return self.call(function, args, dict(kwargs))

    def super_arguments(self, frame: Frame) -> tuple[Any, Any]:
        """Return what ``super()`` without arguments means in `frame`."""
        first = frame.slots[frame.code.co_varnames[0]]
        if is_a(first, types.CellType):
            first = self.load_cell(frame, frame.code.co_varnames[0])
        return self.load_cell(frame, "__class__"), first

    def special_method(self, value: Any, name: str) -> Any:
        """Return the bound special method `name`, looked up on the type."""
        kind = type(value)
        if not self.recording:
            return types.MethodType(getattr(kind, name), value)
        found = self.heap.class_attribute(kind, name)
        if found is NULL:
            raise TypeError(
                f"'{kind.__name__}' object does not support the context manager protocol"
                + (f" (missed {name} method)" if hasattr(kind, "__enter__") else "")
            )
        if is_a(found, types.FunctionType):
            return types.MethodType(found, value)
        return found.__get__(value, kind)

    def make_function(self, frame: Frame, code: types.CodeType, parts: dict[str, Any]) -> Any:
        """Make a function, as ``def`` and ``lambda`` do."""
        parts = {name: self.plain(value) for name, value in parts.items()}
        defaults, closure = parts.get("defaults"), parts.get("closure")
        function = types.FunctionType(code, frame.names, code.co_name, defaults, closure)
        _complete(function, parts)
        if self.recording:
            heap = self.heap
            uses: set[str] = set()
            try:
                texts = [
                    heap.constant(code),
                    heap.constant(frame.names),
                    repr(code.co_name),
                    heap.reference(defaults, uses),
                    heap.reference(closure, uses),
                ]
                node = heap.fresh(function, f"{heap.constant(types.FunctionType)}({', '.join(texts)})", uses)
                for name in ("kwdefaults", "annotations"):
                    if name in parts:
                        self._set_part(node, function, name, parts[name])
                qualified = f"{node.var}.__qualname__ = {code.co_qualname!r}"
                heap.change(qualified, [node], set())
            except CaptureError as error:
                heap.hidden(function, getattr(error, "origin", None) or self.here())
        return function

    def _set_part(self, node: Any, function: Any, name: str, value: Any) -> None:
        uses: set[str] = set()
        if name == "annotations":
            value = function.__annotations__
            if id(value) not in self.heap.nodes and not is_constant(value):
                self.heap.fresh(value, self._dict_text(value, uses), uses)
        text = f"{node.var}.__{name}__ = {self.heap.reference(value, uses)}"
        self.heap.change(text, [node], uses)

    def _dict_text(self, value: dict[str, Any], uses: set[str]) -> str:
        refer = self.heap.reference
        return "{" + ", ".join(f"{key!r}: {refer(item, uses)}" for key, item in value.items()) + "}"

    def advance_or_raise(self, iterator: Any) -> Any:
        """Return ``next(iterator)``."""
        if is_a(iterator, types.GeneratorType):
            with self.barrier():
                return next(iterator)
        with self.barrier():
            item = self.advance(iterator)
        if item is STOP:
            raise StopIteration
        return item

    def match_class(self, subject: Any, kind: Any, names: tuple[str, ...], count: int) -> Any:
        """Return the attributes that a class pattern takes, or None if it does not match."""
        if not self.call(isinstance, (subject, kind), {}):
            return None
        if count and kind in _MATCH_SELF:
            positional = [subject]
            matched: list[str] = []
        else:
            matched = list(self.load_attr(kind, "__match_args__"))[:count] if count else []
            positional = []
        if count > len(matched) + len(positional):
            raise TypeError(
                f"{kind.__name__}() accepts {len(matched)} positional sub-patterns ({count} given)"
            )
        values = list(positional)
        for name in (*matched, *names):
            if not self.call(hasattr, (subject, name), {}):
                return None
            values.append(self.load_attr(subject, name))
        return tuple(values)

    def import_module(self, frame: Frame, name: str, names: Any, level: int) -> Any:
        """Import; a module already imported is found in `sys.modules`, which is guarded."""
        whole = importlib.util.resolve_name("." * level + name, frame.names.get("__package__"))
        top = whole if names or level else name.partition(".")[0]
        if self.recording and (names or not level) and whole in sys.modules and top in sys.modules:
            node = self.heap.pin(sys.modules)
            for key in {whole, top}:
                text = f"{node.var}[{key!r}]"
                self.heap.read(node, key, sys.modules[key], text, f"sys.modules[{key!r}]")
            return sys.modules[top]
        arguments: tuple[Any, ...] = (name, frame.names, {}, names, level)
        return self.opaque(frame.builtins["__import__"], arguments, {}, "push", "an import")

    # builtins ---------------------------------------------------------------------------------
    def specials(self) -> dict[Any, Any]:
        """Return the builtins that the machine itself implements."""
        if not hasattr(self, "_specials"):
            self._specials = {
                builtins.getattr: self._getattr,
                builtins.hasattr: self._hasattr,
                builtins.setattr: self._setattr,
                builtins.delattr: self._delattr,
                builtins.isinstance: self._isinstance,
                builtins.issubclass: self._issubclass,
                builtins.len: self._len,
                builtins.iter: self._iter,
                builtins.next: self._next,
                builtins.callable: self._callable,
                builtins.super: self._super,
                builtins.bool: self._bool,
                builtins.globals: self._globals,
                builtins.locals: self._frames_needed,
                builtins.eval: self._frames_needed,
                builtins.exec: self._frames_needed,
                builtins.vars: self._vars,
                builtins.dir: self._frames_needed,
                sys.exc_info: self._exc_info,
                polyfills.identity: self._identity,
                polyfills.is_plain_object: self._is_plain_object,
            }
        return self._specials

    def _identity(self, value: Any) -> int:
        """Return ``id(value)`` for looking it up: which objects are distinct is guarded, not the number."""
        self.heap.node(value)
        self.heap.distinct.add(type(value))
        return id(value)

    def _is_plain_object(self, kind: type) -> bool:
        """Say whether `copy.deepcopy` copies instances by their dictionaries."""
        for name in (*polyfills.OF_OBJECTS, *polyfills.OF_PICKLING):
            self.heap.class_attribute(kind, name)
        return polyfills.is_plain_object(kind)

    def _frames_needed(self, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError("a builtin that looks at the frame of its caller")

    def _globals(self) -> dict[str, Any]:
        self.heap.pin(self.frames[-1].names)
        return self.frames[-1].names

    def _vars(self, *args: Any) -> Any:
        if len(args) != 1 or is_a(args[0], type | types.ModuleType):
            raise CaptureError("vars()")
        return self.load_attr(args[0], "__dict__")

    def _exc_info(self) -> Any:
        error = next((f.handled[-1] for f in reversed(self.frames) if f.handled and f.handled[-1]), None)
        return (None, None, None) if error is None else (type(error), error, error.__traceback__)

    def _getattr(self, value: Any, name: Any, *default: Any) -> Any:
        if not default:
            return self.load_attr(value, self.plain(name))
        try:
            with self.barrier():
                return self.load_attr(value, self.plain(name))
        except AttributeError:
            return default[0]

    def _hasattr(self, value: Any, name: Any) -> bool:
        try:
            with self.barrier():
                self.load_attr(value, self.plain(name))
        except AttributeError:
            return False
        return True

    def _setattr(self, value: Any, name: Any, item: Any) -> None:
        with self.barrier():
            self.store_attr(value, self.plain(name), item)

    def _delattr(self, value: Any, name: Any) -> None:
        with self.barrier():
            self.delete_attr(value, self.plain(name))

    def _isinstance(self, value: Any, kinds: Any) -> Any:
        kinds = self.plain(kinds)
        if type(kinds) is tuple:
            self.heap.touch(kinds)
            return any(self._isinstance(value, kind) for kind in kinds)
        if is_a(kinds, type):
            check = self.heap.class_attribute(type(kinds), "__instancecheck__")
            if is_a(kinds, abc.ABCMeta):
                self._meet_abstract(type(value), kinds)
            elif is_a(check, types.FunctionType):
                with self.barrier():
                    return self.decided(self.call_function(check, (kinds, value), {}))
        elif not by_identity(kinds):
            raise CaptureError("isinstance of an unknown kind")
        value = value.value if type(value) is Dynamic else value
        return isinstance(torch.Size(()) if type(value) is DynamicSize else value, kinds)

    def _issubclass(self, value: Any, kinds: Any) -> Any:
        if not is_constant(kinds) or not is_constant(value):
            raise CaptureError("issubclass of unknown kinds")
        for kind in kinds if type(kinds) is tuple else (kinds,):
            if is_a(kind, abc.ABCMeta):
                self._meet_abstract(value, kind)
            elif self.heap.class_attribute(type(kind), "__subclasscheck__") is not type.__subclasscheck__:
                raise CaptureError("issubclass of a kind with its own metaclass")
        return issubclass(value, kinds)

    def _meet_abstract(self, kind: Any, abstract: Any) -> None:
        """Guard what classes are registered with abstract ones; protocols look at the object itself."""
        hook = next(vars(home)[_HOOK] for home in abstract.__mro__ if _HOOK in vars(home))
        own = _HOOK_OWNERS.isdisjoint((abstract.__module__,)) and hook is not vars(object)[_HOOK]
        if own or type(abstract).__module__ not in ("abc", "typing", "enum"):
            raise CaptureError("an abstract class that decides itself what its instances are")
        if abstract not in getattr(kind, "__mro__", ()):
            if getattr(abstract, "_is_protocol", False):
                raise CaptureError("a protocol")
            token = self.heap.constant(abc.get_cache_token)
            self.heap.guard.check(
                f"{token}() == {abc.get_cache_token()}", "no class was registered as abstract"
            )

    def _len(self, value: Any) -> Any:
        if type(value) is DynamicSize:
            return len(value)
        value = self.plain(value)
        kind = type(value)
        if is_constant(value) and self.heap.find(value) is None:
            return len(value)
        if is_a(value, torch.Tensor):
            node = self.heap.node(value)
            if self.trace.is_dynamic(node.var) or not is_plain_tensor(value):
                raise CaptureError("a length that depends on values")
            return self.open_metadata(value, "__len__", ()) if self.is_open(value) else len(value)
        if is_a(value, list | tuple | dict | set | frozenset | deque):
            method = self.heap.class_attribute(kind, "__len__")
            if not is_a(method, types.FunctionType):
                self.heap.node(value) if not is_a(value, tuple | frozenset) else None
                self.heap.touch(value, 1)
                return len(value)
        if kind is types.MappingProxyType and self.heap.node(value).stable:
            return len(value)
        method = self.heap.class_attribute(kind, "__len__")
        if is_a(method, types.FunctionType):
            with self.barrier():
                return self.length_as(self.call_function(method, (value,), {}))
        raise CaptureError(f"the length of {kind.__qualname__}")

    def _iter(self, value: Any, *sentinel: Any) -> Any:
        if sentinel:
            raise CaptureError("iter() with a sentinel")
        return self.iterate(value)

    def _next(self, iterator: Any, *default: Any) -> Any:
        iterator = self.plain(iterator)
        hidden = self._is_hidden(iterator)
        node = self.heap.find(iterator)
        known = type(iterator) in natives.ITERATORS and node is not None
        if known and not hidden:
            self._known_iterator(iterator)
        if not hidden and not known:
            method = self.heap.class_attribute(type(iterator), "__next__")
            if is_a(method, types.FunctionType) and not default:
                return self.call_function(method, (iterator,), {})
            raise CaptureError(f"{type(iterator).__qualname__} is advanced")
        item = self.advance(iterator)
        if item is not STOP:
            return item
        if default:
            return default[0]
        raise StopIteration

    def _callable(self, value: Any) -> bool:
        value = self.plain(value)
        self.heap.class_attribute(type(value), "__call__")
        return callable(value)

    def _super(self, *args: Any) -> Any:
        if len(args) != 2:
            raise CaptureError("super() with one argument")
        made = super(*args)
        self.heap.guard.keep.append(made)
        return made

    def _bool(self, *args: Any) -> Any:
        if not args:
            return False
        holds = self.truth(args[0])
        if holds is NULL:
            raise CaptureError(f"the truth of {type(args[0]).__qualname__}")
        return holds


def _complete(function: Any, parts: dict[str, Any]) -> None:
    if "kwdefaults" in parts:
        function.__kwdefaults__ = parts["kwdefaults"]
    if "annotations" in parts:
        given = parts["annotations"]
        flat = given if is_a(given, dict) else dict(zip(given[::2], given[1::2], strict=True))
        function.__annotations__ = flat
