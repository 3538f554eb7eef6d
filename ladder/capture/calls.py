"""Calls: Python functions are interpreted, annotated natives replayed, all others split."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import operator
import re
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

from ladder.capture import natives, polyfills, tensors
from ladder.capture.attributes import CACHED, Attributes
from ladder.capture.frames import NULL, Frame, bind, make_generator
from ladder.capture.kinds import CONTAINERS, by_identity, is_a, is_constant, is_plain
from ladder.capture.modeled import FUNCTIONS, METHODS, call_cached
from ladder.capture.nodes import CaptureError, Dynamic, Node
from ladder.capture.prescan import frame_names
from ladder.runtime.operator import is_captured

MAX_DEPTH = 60
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_BUILTIN = types.BuiltinFunctionType
_NATIVE_TYPES = (
    *(_BUILTIN, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.ClassMethodDescriptorType, type(torch.jit.script), torch._ops.OpOverload),
    type(re.compile("").sub),
)
_POLYFILLS: dict[Any, types.FunctionType] = {
    map: polyfills.map_,  # type: ignore[dict-item]
    filter: polyfills.filter_,  # type: ignore[dict-item]
    itertools.starmap: polyfills.starmap_,  # type: ignore[dict-item]
    itertools.filterfalse: polyfills.filterfalse_,  # type: ignore[dict-item]
    itertools.takewhile: polyfills.takewhile_,  # type: ignore[dict-item]
    itertools.dropwhile: polyfills.dropwhile_,  # type: ignore[dict-item]
    itertools.compress: polyfills.compress_,  # type: ignore[dict-item]
    itertools.pairwise: polyfills.pairwise_,  # type: ignore[dict-item]
    functools.reduce: polyfills.reduce_,  # type: ignore[dict-item]
}
_POLYFILLS_OF_OBJECTS: dict[Any, Any] = {
    sum: polyfills.sum_,
    any: polyfills.any_,
    all: polyfills.all_,
    copy.deepcopy: polyfills.deepcopy_,
}
_POLYFILLS_WITH_KEY = {sorted: polyfills.sorted_, min: polyfills.min_, max: polyfills.max_}
_DISPATCHED: Any = getattr(functools.singledispatch(lambda value: value), "__code__", None)
_COMPILING = frozenset({is_captured, torch.compiler.is_compiling})
"""Functions by which a program asks whether a compiler traces it: models then leave out checks of values."""
_OF_CLASSES = ("__new__", "__instancecheck__", "__subclasscheck__")
_SCALARS = (int, float, bool, str, type(None))


class Calls(Attributes):
    """`call` and `call_function`."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `function`: interpret, replay or split."""
        function = self.plain(function)
        if not self.recording:
            return self.natively(function, *args, **kwargs)
        given = (function, args, kwargs)
        return self.recorded(self._call, given, given)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = type(function)
        composed = self._composed().get(kind)
        if composed is not None:
            return composed(function, args, kwargs)
        if by_identity(function):
            special = self.specials().get(function)
            if special is not None:
                return special(*args, **kwargs)
            if function in natives.DATA and not is_a(function, type) and kind not in _NATIVE_TYPES:
                return self.replay(function, args, kwargs, looking=True)
        if is_a(function, type):
            return self.instantiate(function, args, kwargs)
        if kind is np.ufunc:
            return self.replay(function, args, kwargs, looking=True)
        if kind in _NATIVE_TYPES or kind in (torch._ops.OpOverloadPacket, torch.jit.ScriptFunction):
            return self._identified(function, args, kwargs)
        found = self.heap.class_attribute(kind, "__call__")
        if is_a(found, types.FunctionType):
            return self.call_function(found, (function, *args), kwargs)
        raise CaptureError(f"a call of {kind.__module__}.{kind.__qualname__}")

    def _composed(self) -> dict[type, Any]:
        """Return how to call what is made of other callables, by type."""
        return {
            types.FunctionType: self.call_function,
            types.MethodType: self._call_method,
            functools.partial: self._call_partial,
            operator.itemgetter: self._call_getter,
            operator.attrgetter: self._call_getter,
            weakref.ReferenceType: self._call_reference,
            CACHED: lambda function, args, kwargs: call_cached(self, function, args, kwargs),
        }

    def _call_method(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self._part(function, "__self__")
        return self.call(self._part(function, "__func__"), (owner, *args), kwargs)

    def _identified(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a native; one from outside that is bound to an object is known by name and object."""
        node = self.heap.find(function)
        if node is not None and node.external and not node.stable:
            self.heap.guard.check(f"{node.var}.__name__ == {function.__name__!r}", f"name of {node.var}")
            self._part(function, "__self__")
        if type(function) is _BUILTIN:
            if function in tensors.STATE_READS:
                return self._state_read(function, args, kwargs)
            if function in tensors.NO_EFFECT:
                return None
            if function in tensors.OVERRIDE_CHECKS:
                return self._has_override(function, args)
        return self.native(function, args, kwargs)

    def _state_read(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the answer of a function that reads the state of torch, guarded."""
        given = tuple(map(self.plain, args))
        found = function(*given, **kwargs)
        if "autocast" in function.__name__:
            self.heap.guard.meet_autocast()
        if function not in tensors.STATE_GUARDED:
            if self.trace.state_written or kwargs or not is_constant((given, found)):
                raise CaptureError(f"{function.__name__} is read")
            constant = self.heap.constant
            text = f"{constant(function)}(*{constant(given)}) == {constant(found)}"
            self.heap.guard.check(text, f"{function.__name__} gives {found}")
        return found

    def _part(self, value: Any, name: str) -> Any:
        """Return a part of a bound method or partial, met if the object is external."""
        part = getattr(value, name)
        node = self.heap.find(value)
        if node is not None and node.external:
            self.heap.read(node, name, part, f"{node.var}.{name}", f"{node.var}.{name}")
        return part

    def _call_partial(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner, before = self._part(function, "func"), self._part(function, "args")
        named = self._part(function, "keywords")
        self.heap.touch(before, 1)
        self.touch_part(function, "keywords", named)
        return self.call(inner, (*before, *args), {**named, **kwargs})

    def _call_getter(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self.heap.node(function)
        keys = function.__reduce__()[1]
        if node.external:
            constant = self.heap.constant(keys)
            self.heap.guard.check(f"{node.var}.__reduce__()[1] == {constant}", f"{node.var} gets {keys}")
        if type(function) is operator.attrgetter and any("." in key for key in keys):
            raise CaptureError("a getter of nested attributes")
        get = self.load_attr if type(function) is operator.attrgetter else self.subscript
        with self.barrier():
            found = tuple(get(args[0], key) for key in keys)
        return found[0] if len(keys) == 1 else found

    def _call_reference(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node, target = self.heap.node(function), function()
        if target is not None and id(target) not in self.heap.arguments and self._may_have_died():
            raise self.leave("a weak reference to what may have died meanwhile")
        if node.external and "()" not in node.seen:
            # Never pinned: a record must not keep alive what is only weakly referred to.
            node.seen.add("()")
            self.heap.meet(target, f"{node.var}()", f"{node.var}()", stable=False)
        return target

    def _outlives(self, target: Any) -> bool:
        """Say whether `target` lives longer than this segment."""
        if id(target) in self.heap.arguments:
            return True
        node = self.heap.find(target)
        return node is not None and node.external and not self._may_have_died()

    def _may_have_died(self) -> bool:
        """Say whether something from outside may have lost its last reference in this segment."""
        taken_up = self.site is not None and bool(self.site.layouts)
        return taken_up or any(step.keep for step in self.heap.steps)

    def _has_override(self, function: Any, args: tuple[Any, ...]) -> bool:
        """``has_torch_function`` and its forms: tensors of torch's own classes have none."""
        flat = args[0] if len(args) == 1 and is_a(args[0], tuple | list) else args
        for item in flat:
            if is_a(item, torch.Tensor):
                self.heap.node(item)
                if not tensors.is_plain_tensor(item):
                    raise CaptureError("a tensor subclass")
            elif not is_constant(item):
                raise CaptureError("an object that might override operators")
        return bool(function(*args))

    def touch_part(self, owner: Any, name: str, part: Any) -> None:
        """Guard the contents of a container inside a native object."""
        node = self.heap.find(owner)
        if node is not None and node.external:
            self.heap.touch(part, 1)

    # Python functions -------------------------------------------------------------------------
    def call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a Python function: as one operator, replayed, or interpreted."""
        if not self.recording:
            return self.natively(function, *args, **kwargs)
        annotated = self._annotation(function, kwargs)
        if annotated is not None:
            self.identify(function)
            return annotated(function, args, kwargs)
        code = function.__code__
        if code.co_flags & _ASYNC or len(self.frames) >= MAX_DEPTH or not self.known(code):
            raise CaptureError(f"{function.__qualname__} is not interpreted")
        if frame_names(code):
            raise CaptureError(f"{function.__qualname__} looks at frames")
        frame = self._frame(function, args, kwargs)
        if code.co_flags & inspect.CO_GENERATOR:
            return self._generator(frame)
        return self.run(frame)

    def _annotation(self, function: Any, kwargs: dict[str, Any]) -> Any:
        """Return how to call a Python function that is in one of the tables, else None."""
        if function in self.specials():
            return lambda call, args, kwargs: self.specials()[function](*args, **kwargs)
        if function in tensors.PYTHON_OPERATORS:
            return self._python_operator
        if function in tensors.STATE_READS:
            return self._state_read
        modeled = FUNCTIONS.get(function)
        if modeled is not None:
            return lambda call, args, kwargs: modeled(self, call, args, kwargs)
        if function in _COMPILING:
            return lambda call, args, kwargs: True
        if function in natives.DATA and kwargs.get("key") is None:
            return self._annotated
        if function in natives.LEAVES:
            return self._leaf
        return self._dispatched if function.__code__ is _DISPATCHED else None

    def identify(self, function: Any) -> None:
        """Guard that a function from outside is this one: its table row holds for no other."""
        node = self.heap.find(function)
        if node is not None and node.external and not node.stable and "is" not in node.seen:
            node.seen.add("is")
            self.heap.guard.check(f"{node.var} is {self.heap.constant(function)}", f"{node.var} is unchanged")

    def _leaf(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise CaptureError(f"{function.__qualname__} runs natively")

    def _dispatched(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a `functools.singledispatch` function."""
        node, kind = self.heap.node(function), type(self.plain(args[0]))
        chosen = function.dispatch(kind)
        constant = self.heap.constant
        text = f"{node.var}.dispatch({constant(kind)}) is {constant(chosen)}"
        self.heap.guard.check(text, f"{node.var} dispatches {kind.__qualname__}")
        return self.call(self.part(chosen), args, kwargs)

    def _python_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        if name in tensors.METADATA or name.strip("_") == "len":
            return self.native(function, args, kwargs)
        return self.operator(function, args, kwargs)

    def _frame(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        heap = self.heap
        node = heap.node(function)
        if "called" not in node.seen and node.external:
            node.seen.add("called")
            self._meet_function(node)
        defaults = function.__defaults__ or ()
        named = function.__kwdefaults__ or {}
        slots = bind(function, args, kwargs, defaults, named)
        if slots is None:
            function(*map(self.plain, args), **{key: self.plain(v) for key, v in kwargs.items()})
            raise CaptureError("arguments that do not fit")
        if function.__code__.co_flags & inspect.CO_VARKEYWORDS:
            code = function.__code__
            last = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
            named = slots[code.co_varnames[last]]
            for key in named:
                named[key] = self.plain(named[key])
            self.new(named)
        return Frame(function, slots)

    def _meet_function(self, node: Node) -> None:
        heap, function, var = self.heap, node.obj, node.var
        path = getattr(function, "__qualname__", var)
        heap.read(node, "__code__", function.__code__, f"{var}.__code__", f"{path}.__code__")
        heap.read(node, "__defaults__", function.__defaults__, f"{var}.__defaults__", f"{path}.defaults")
        named = function.__kwdefaults__
        heap.read(node, "__kwdefaults__", named, f"{var}.__kwdefaults__", f"{path}.kwdefaults")
        if not node.stable:
            names = heap.constant(function.__globals__)
            heap.guard.check(f"{var}.__globals__ is {names}", f"globals of {path}")
        for part in (function.__defaults__, named):
            if part:
                heap.touch(part, 1)
        for number, cell in enumerate(function.__closure__ or ()):
            name = function.__code__.co_freevars[number]
            heap.read(node, f"={number}", cell, f"{var}.__closure__[{number}]", f"{path}<{name}>")

    def _generator(self, frame: Frame) -> Any:
        generator = make_generator(frame, self.resume)
        self.heap.hidden_generator(generator, self.here())
        return generator

    # classes ----------------------------------------------------------------------------------
    def instantiate(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a class."""
        heap = self.heap
        if kind is type and len(args) == 1 and not kwargs:
            return type(self.plain(args[0]))
        if kind in _POLYFILLS:
            return self.call_function(self.part(_POLYFILLS[kind]), args, kwargs)
        if issubclass(kind, weakref.ReferenceType):
            if kind is not weakref.ref or len(args) != 1 or not self._outlives(args[0]):
                raise self.leave("a weak reference to what may die meanwhile")
            return self.perform(kind, args, kwargs, [])
        if kind is reversed and len(args) == 1 and not kwargs and self._indexed(args[0]):
            return self.call_function(self.part(polyfills.reversed_), args, kwargs)
        if kind in natives.STRUCTURE or kind in natives.DATA:
            return self.replay(kind, args, kwargs, looking=kind in natives.DATA)
        if kind is functools.partial:
            return self.replay(kind, args, kwargs, looking=False)
        meta_call = heap.class_attribute(type(kind), "__call__")
        if is_a(meta_call, types.FunctionType):
            return self.call_function(meta_call, (kind, *args), kwargs)
        if meta_call is not type.__call__:
            raise CaptureError("a native metaclass __call__")
        return self.construct(kind, args, kwargs)

    def _indexed(self, value: Any) -> bool:
        """Say whether `reversed` indexes `value` by functions of torch's, as it does lists of modules.

        Where it is made a list, it asks for the length again: that of torch may be asked any number of times.
        """
        names = ("__reversed__", "__getitem__", "__len__")
        own, *found = (self.heap.class_attribute(type(value), name) for name in names)
        return own is NULL and all(
            is_a(item, types.FunctionType) and item.__module__.startswith("torch.") for item in found
        )

    def construct(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do ``type.__call__(kind, *args, **kwargs)``."""
        heap = self.heap
        if heap.class_attribute(kind, "__del__") is not NULL:
            raise self.leave(f"{kind.__qualname__} has a finalizer")
        if issubclass(kind, BaseException):
            return self._exception(kind, args, kwargs)
        new = heap.class_attribute(kind, "__new__")
        initialise = heap.class_attribute(kind, "__init__")
        if is_a(new, staticmethod):
            new = self.part(new.__func__)
        if is_a(new, types.FunctionType):
            if initialise is not object.__init__:
                if not is_a(initialise, types.FunctionType) or not self.known(initialise.__code__):
                    raise CaptureError("__init__ is not interpreted")
                with self.barrier():
                    made = self.call_function(new, (kind, *args), kwargs)
            else:
                return self.call_function(new, (kind, *args), kwargs)
        else:
            made = self._allocate(kind, new, args, kwargs)
        if not is_a(made, kind) or initialise is object.__init__:
            return made
        return self._initialise(made, initialise, args, kwargs)

    def _allocate(self, kind: type, new: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inherited = self.heap.class_attribute(kind, "__init__") is object.__init__
        if new is object.__new__ and inherited and (args or kwargs):
            raise CaptureError("object() takes no arguments")
        return self.allocate(getattr(new, "__self__", None), new, kind, args)

    def allocate(self, home: Any, new: Any, kind: type, args: tuple[Any, ...]) -> Any:
        """Make an instance of `kind` by `new`, the ``__new__`` of the native class `home`."""
        if kind.__flags__ & 1 << 20:
            raise CaptureError("an abstract class")
        if home is tuple and len(args) == 1:
            items = args[0]
            if not is_a(items, tuple | list):
                with self.barrier():
                    items = self.drained(self.iterate(items))
            given = (kind, tuple(map(self.plain, items)))
            return self.recorded(self._touched_tuple, (items, new, given), (new, given))
        if home not in (object, dict, list, set, OrderedDict, defaultdict, deque):
            raise CaptureError(f"instances of {kind.__qualname__} are made natively")
        made = new(kind)
        self.heap.fresh(made, f"{self.heap.constant(new)}({self.heap.constant(kind)})", set())
        return made

    def _touched_tuple(self, items: Any, new: Any, given: tuple[Any, ...]) -> Any:
        self.heap.touch(items, 1)
        return self.perform(new, given, {}, [])

    def _initialise(self, made: Any, how: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_a(how, types.FunctionType):
            with self.barrier():
                self.native(how, (made, *args), kwargs)
            return made
        if how.__code__.co_flags & inspect.CO_GENERATOR or not self.known(how.__code__):
            raise CaptureError("__init__ is not interpreted")
        frame = self._frame(how, (made, *args), kwargs)
        frame.override = made
        return self.run(frame)

    def _exception(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = tuple(map(self.plain, args))
        lookup = self.heap.class_attribute
        new, initialise = lookup(kind, "__new__"), lookup(kind, "__init__")
        if is_a(new, types.FunctionType | staticmethod):
            raise CaptureError("an exception class with its own __new__")
        if not is_a(initialise, types.FunctionType):
            made = self.perform(kind, plain, kwargs, [])
            return made
        made = new(kind, *plain, **kwargs)
        uses: set[str] = set()
        texts = [self.heap.constant(kind), *(self.heap.reference(item, uses) for item in plain)]
        texts += [f"{key}={self.heap.reference(item, uses)}" for key, item in kwargs.items()]
        self.heap.fresh(made, f"{self.heap.constant(new)}({', '.join(texts)})", uses)
        return self._initialise(made, initialise, args, kwargs)

    # natives ----------------------------------------------------------------------------------
    def native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a native function by its annotation."""
        if function in tensors.STATE_WRITES:
            return self.operator(function, args, kwargs)
        if tensors.is_torch_native(function) or self._is_tensor_method(function):
            return self._torch_native(function, args, kwargs)
        if function in natives.STRUCTURE or function in natives.DATA or function in _POLYFILLS:
            return self._annotated(function, args, kwargs)
        if function in FUNCTIONS:
            return FUNCTIONS[function](self, function, args, kwargs)
        owner, name, rest = _receiver(function, args)
        if (type(owner), name) in METHODS:
            return METHODS[type(owner), name](self, owner, *map(self.plain, rest), **kwargs)
        if owner is NULL:
            raise CaptureError(f"the native {getattr(function, '__qualname__', function)}")
        if is_a(owner, type) and name in _OF_CLASSES:
            return self._of_class(function, owner, name, args, kwargs)
        if is_a(owner, natives.SCALAR_TYPES):
            return self.replay(function, args, kwargs, looking=True)
        if owner is object or is_a(function, types.WrapperDescriptorType | types.MethodWrapperType):
            return self._wrapper(function, owner, name, rest, kwargs)
        return self.container_method(function, owner, name, rest, kwargs)

    def _of_class(self, function: Any, owner: type, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name != "__new__":
            return function(*map(self.unlifted, args), **kwargs)  # of which only the type matters
        if not args or not is_a(args[0], type):
            raise CaptureError(f"{owner.__qualname__}.__new__")
        if owner is object and len(args) > 1:
            raise CaptureError("object.__new__ with arguments")
        return self.allocate(owner, function, args[0], args[1:])

    def _is_tensor_method(self, function: Any) -> bool:
        return type(function) in (_BUILTIN, types.MethodWrapperType) and is_a(function.__self__, torch.Tensor)

    def _torch_native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(function) in (_BUILTIN, types.MethodWrapperType) and is_a(function.__self__, torch.Tensor):
            args = (function.__self__, *args)
            function = getattr(torch._C.TensorBase, function.__name__)
        name = function.__name__
        if name in tensors.METADATA and not (name == "type" and len(args) > 1):
            return self._metadata(function, args, kwargs)
        return self.operator(function, args, kwargs)

    def _metadata(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for item in args:
            if is_a(item, torch.Tensor):
                if self.trace.is_dynamic(self.heap.node(item).var) or not tensors.is_plain_tensor(item):
                    raise CaptureError("metadata that depends on values")
                self.meet_metadata(item, function.__name__)
            elif not is_plain(item):
                raise CaptureError("metadata of a structure")
        if any(map(self.is_open, args)):
            return self._open_metadata(function, args, kwargs)
        result = function(*map(self.plain, args), **kwargs)
        if not is_constant(result):
            raise CaptureError("metadata that is not a constant")
        return result

    def _open_metadata(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Metadata of tensors with open extents: those of one tensor may be open too."""
        if sum(is_a(item, torch.Tensor) for item in args) == 1 and self.is_open(args[0]):
            return self.open_metadata(args[0], function.__name__, (*args[1:], *kwargs.values()))
        self.heap.fix_shapes(f"{function.__name__} is read")
        return function(*map(self.plain, args), **kwargs)

    def _wrapper(self, function: Any, owner: Any, name: str, rest: Any, kwargs: dict[str, Any]) -> Any:
        """Slot wrappers: `object.__setattr__`, `dict.__getitem__`, `list.__init__` and the like."""
        home = getattr(function, "__objclass__", None) or type(owner)
        if (name == "__setattr__" and function in (object.__setattr__,)) or _wraps(function, object, name):
            return self._object_wrapper(owner, name, rest)
        if name == "__init__" and home is object:
            return None
        if (name == "__call__" and home is type) or (is_a(owner, type) and name == "__call__"):
            return self.construct(owner, rest, kwargs)
        return self.container_method(function, owner, name, rest, kwargs)

    def _object_wrapper(self, owner: Any, name: str, rest: tuple[Any, ...]) -> Any:
        if name == "__setattr__":
            return self.store_plain(owner, self.plain(rest[0]), rest[1])
        if name == "__getattribute__" and not is_a(owner, type | types.ModuleType):
            return self.generic_attribute(owner, type(owner), self.plain(rest[0]))
        if name == "__delattr__":
            return self.delete_plain(owner, self.plain(rest[0]))
        if name == "__init__":
            return None
        raise CaptureError(f"object.{name}")

    def _annotated(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in _POLYFILLS:
            return self.call_function(self.part(_POLYFILLS[function]), args, kwargs)
        looking = function in natives.DATA
        if function in natives.OF_TENSORS and any(is_a(item, torch.Tensor) for item in args[:2]):
            return self.operator(natives.OF_TENSORS[function], args, kwargs)
        if function in _POLYFILLS_WITH_KEY and kwargs.get("key") is not None:
            return self.call_function(self.part(_POLYFILLS_WITH_KEY[function]), args, kwargs)
        if function in _POLYFILLS_OF_OBJECTS and not is_plain(args[0]):
            return self.call_function(self.part(_POLYFILLS_OF_OBJECTS[function]), args, kwargs)
        return self.replay(function, args, kwargs, looking=looking)


def _receiver(function: Any, args: tuple[Any, ...]) -> tuple[Any, str, tuple[Any, ...]]:
    """Return (receiver, method name, other arguments) of a native method; NULL if it has none."""
    name = getattr(function, "__name__", "")
    if is_a(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        return (args[0], name, args[1:]) if args else (NULL, name, args)
    owner = getattr(function, "__self__", None)
    if owner is None or is_a(owner, types.ModuleType):
        return NULL, name, args
    return owner, name, args


def _wraps(function: Any, home: type, name: str) -> bool:
    """Say whether `function` is the slot `name` of exactly `home`."""
    if is_a(function, types.WrapperDescriptorType):
        return function.__objclass__ is home and function is home.__dict__.get(name)
    if is_a(function, types.MethodWrapperType):
        return getattr(function, "__objclass__", None) is home
    return False


__all__ = ["CONTAINERS", "NULL", "_SCALARS", "Calls", "Dynamic"]
