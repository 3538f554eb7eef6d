"""Python equivalents of builtins that call back: interpreted, so that the callback is seen too.

Each behaves as the builtin it stands for does with arguments that the builtin accepts.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import enum
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

_MISSING = object()


def sum_(items: Iterable[Any], /, start: Any = 0) -> Any:
    """Stand for `sum`."""
    total = start
    for item in items:
        total = total + item
    return total


def added(total: Any, item: Any, /) -> Any:
    """Return what `itertools.accumulate` adds up."""
    return total + item


def any_(items: Iterable[Any], /) -> bool:
    """Stand for `any`."""
    for item in items:  # noqa: SIM110 this is what the builtin does
        if item:
            return True
    return False


def all_(items: Iterable[Any], /) -> bool:
    """Stand for `all`."""
    for item in items:  # noqa: SIM110
        if not item:
            return False
    return True


def identity(value: Any) -> int:
    """Return ``id(value)``; the interpreter guards which objects are the same one."""
    return id(value)


def capability_of(index: int) -> tuple[int, int]:
    """Return the compute capability of the GPU with a number, which stays what it is."""
    return torch.cuda.get_device_capability(index)


def start_gpus() -> None:
    """Do what asking for any GPU does first: raises where there are none."""
    torch.cuda.init()  # type: ignore[no-untyped-call]


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Stand for `torch.cuda.get_device_capability`: which GPU is meant may depend on the current one."""
    start_gpus()
    return capability_of(_get_device_index(device, optional=True))


def construct(new: Any, kind: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Stand for `type.__call__` where ``__new__`` is a Python function, which may choose another class."""
    made = new(kind, *args, **kwargs)
    own = type(made)
    if kind in own.__mro__ and own.__init__ is not object.__init__:
        returned = own.__init__(made, *args, **kwargs)
        if returned is not None:
            raise TypeError(f"__init__() should return None, not '{type(returned).__name__}'")
    return made


OF_OBJECTS = ("__reduce__", "__reduce_ex__", "__getstate__", "__new__")
OF_PICKLING = ("__setstate__", "__getnewargs__", "__getnewargs_ex__")


def is_plain_object(kind: type) -> bool:
    """Say whether `copy.copy` and `copy.deepcopy` copy instances of `kind` by their dictionaries.

    It does where the methods that it asks are those of `object`.
    """
    same = all(getattr(kind, name, None) is getattr(object, name, None) for name in OF_OBJECTS)
    own = any(hasattr(kind, name) for name in OF_PICKLING) or kind in copyreg.dispatch_table
    return same and not own and kind.__dictoffset__ != 0


_ATOMIC: frozenset[type] = frozenset(
    {
        type(None),
        int,
        float,
        bool,
        complex,
        bytes,
        str,
        type(...),
        type(NotImplemented),
        types.CodeType,
        range,
    }
    | {type, types.FunctionType, types.BuiltinFunctionType, property, weakref.ref, slice}
    | {torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout}
)
"""Types whose instances `copy.deepcopy` gives back as they are, or makes again equal and unchangeable."""
_CLASSES = (type, enum.Enum)


def copy_(value: Any) -> Any:
    """Stand for `copy.copy`, of containers and of objects that are no more than their dictionaries."""
    kind = type(value)
    if kind in _ATOMIC or kind is tuple or kind is frozenset or issubclass(kind, _CLASSES):
        return value
    if kind is list or kind is dict or kind is set:
        return value.copy()
    copier = getattr(kind, "__copy__", None)
    if copier is not None:
        return copier(value)
    if not is_plain_object(kind):
        return _reconstructed(value, None, value.__reduce_ex__(4))
    made = object.__new__(kind)
    for name, item in value.__dict__.items():
        made.__dict__[name] = item
    return made


def _reconstructed(value: Any, memo: Any, how: Any) -> Any:
    """Return what ``__reduce_ex__`` says makes an object again: a name says that it is itself."""
    if isinstance(how, str):
        return value
    return copy._reconstruct(value, memo, *how)  # type: ignore[attr-defined]


def deepcopy_(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Stand for `copy.deepcopy`, of containers and of objects that are no more than their dictionaries."""
    kind = type(value)
    if (kind in _ATOMIC and kind is not slice) or issubclass(kind, _CLASSES):
        return value
    memo = {} if memo is None else memo
    key = identity(value)
    if key in memo:
        return memo[key]
    made: Any
    if kind is tuple:
        made = tuple([deepcopy_(item, memo) for item in value])
        if key in memo:  # the tuple is in what it holds
            return memo[key]
        if all([new is old for new, old in zip(made, value)]):  # noqa: B905, C419
            made = value
        memo[key] = made
    elif kind is list:
        made = memo[key] = []
        for item in value:
            made.append(deepcopy_(item, memo))
    elif kind is dict:
        made = memo[key] = {}
        for name, item in value.items():
            made[deepcopy_(name, memo)] = deepcopy_(item, memo)
    else:
        made = _deepcopy_object(value, kind, memo, key)
    return made


def _deepcopy_object(value: Any, kind: Any, memo: dict[int, Any], key: int) -> Any:
    made: Any
    if kind is slice:
        made = memo[key] = slice(*[deepcopy_(item, memo) for item in (value.start, value.stop, value.step)])
        return made
    if kind is set or kind is frozenset:
        made = memo[key] = kind([deepcopy_(item, memo) for item in value])
        return made
    if kind is OrderedDict and not value.__dict__:
        made = memo[key] = OrderedDict()
        for name, item in value.items():
            made[deepcopy_(name, memo)] = deepcopy_(item, memo)
        return made
    copier = getattr(value, "__deepcopy__", None)
    if copier is not None:
        made = memo[key] = copier(memo)
        return made
    if not is_plain_object(kind):
        return _reconstructed(value, memo, value.__reduce_ex__(4))
    made = memo[key] = object.__new__(kind)
    for name, item in value.__dict__.items():
        made.__dict__[name] = deepcopy_(item, memo)
    return made


class FunctionContext:
    """What a `torch.autograd.Function` gets as ``ctx`` where nothing is recorded for a backward pass."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()
    dirty_tensors: tuple[Any, ...] = ()

    def mark_dirty(self, *tensors: Any) -> None:
        """Note what is changed in place: it is returned as it is."""
        self.dirty_tensors = tensors

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Do nothing: no result is differentiable here."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: there are no gradients."""


def apply_function(kind: Any, *args: Any) -> Any:
    """Stand for ``kind.apply``, for a `torch.autograd.Function` of which no gradient is asked."""
    context = FunctionContext()
    context.needs_input_grad = (False,) * len(args)
    if kind.setup_context is torch.autograd.Function.setup_context:
        result = kind.forward(context, *args)
    else:
        result = kind.forward(*args)
        kind.setup_context(context, args, result)
    dirty = context.dirty_tensors
    if dirty:
        note_dirty(dirty, result if type(result) is tuple else (result,))
    if type(result) is tuple:
        return tuple([_own(item, args, dirty) for item in result])
    return _own(result, args, dirty)


DIRTY = "Some elements marked as dirty during the forward method were not returned as output. "
DIRTY += "The inputs that are modified inplace must all be outputs of the Function."


def note_dirty(dirty: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """Count the change of what a function marked as dirty and returns."""
    for item in dirty:
        for result in results:
            if result is item:
                break
        else:
            raise RuntimeError(DIRTY)
    torch.autograd.graph.increment_version(dirty)


def _own(result: Any, args: tuple[Any, ...], dirty: tuple[Any, ...]) -> Any:
    """Return `result`, which is given as a view of itself where it is an argument that did not change."""
    for item in dirty:
        if item is result:
            return result
    for item in args:
        if item is result and isinstance(item, torch.Tensor):
            return item.view_as(item)
    return result


def apply_function_without_gradients(kind: Any, *args: Any) -> Any:
    """Do as `apply_function` where gradients of other tensors are recorded."""
    with torch.no_grad():
        return apply_function(kind, *args)


class Recomputed(torch.autograd.Function):
    """What a reentrant checkpoint does where no gradient is recorded."""

    @staticmethod
    def forward(ctx: Any, function: Any, *args: Any) -> Any:
        return function(*args)


def checkpoint(
    function: Any, *args: Any, use_reentrant: Any = None, preserve_rng_state: Any = True, **kwargs: Any
) -> Any:
    """Stand for the function of `torch.utils.checkpoint` where no gradient is recorded."""
    if use_reentrant is None or use_reentrant:
        return apply_function(Recomputed, function, *args)
    return function(*args, **kwargs)


def update_flat_weights(rnn: Any) -> None:
    """Stand for the method by which `torch.nn.RNNBase` finds that its weights were replaced.

    It looks through weak references, also to what its last call computed for weights (`weight_norm`), which
    nothing else may hold. Such weights are taken to be others in each call; the references are left dead,
    so that what runs without capture does so too.
    """
    names = rnn._flat_weights_names
    computed = [name for name in names if name not in rnn._parameters]
    if not computed or rnn._flat_weights[0].is_cuda:
        if rnn._weights_have_changed():
            rnn._init_flat_weights()
        return
    # torch looks at each weight up to the first that was replaced, and what computes one is called each time.
    for name in names:
        if hasattr(rnn, name) and getattr(rnn, name) is not None and name in computed:
            break
    rnn._flat_weights = [getattr(rnn, name) if hasattr(rnn, name) else None for name in names]
    rnn._flat_weight_refs = [_DEAD if weight is not None else None for weight in rnn._flat_weights]


_DEAD: weakref.ref[set[Any]] = weakref.ref(set())
"""A reference to what is gone."""


def cond_(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Stand for `torch.cond`."""
    if pred:
        return true_fn(*operands)
    return false_fn(*operands)


def call(function: Any, *args: Any) -> Any:
    """Stand for what compiles a function of a higher-order operator of torch and calls it."""
    return function(*args)


def eager_environment() -> Any:
    """Stand for what gives the backend by which torch compiles such functions in eager programs."""
    return contextlib.nullcontext("eager")


def laid_out_like(out: torch.Tensor, strides: Any) -> torch.Tensor:
    """Stand for what lays out the result of ``flex_attention`` as its query is, the last axis innermost."""
    last = len(strides) - 1
    outer = [*reversed(sorted(range(last), key=lambda axis: strides[axis])), last]  # noqa: C413 ties turn too
    return torch.empty_permuted(out.shape, outer, dtype=out.dtype, device=out.device).copy_(out)


def while_loop_(cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    """Stand for ``while_loop`` of torch."""
    if not cond_fn(*carried_inputs):
        return torch.utils._pytree.tree_map(torch.clone, tuple(carried_inputs))
    carried = body_fn(*carried_inputs)
    while cond_fn(*carried):
        carried = body_fn(*carried)
    return carried


def rows(array: Any, /) -> Iterator[Any]:
    """Yield what an array holds along its first axis, or the items of a tuple."""
    for index in range(len(array)):
        yield array[index]


def tensor_by_type(dtype: torch.dtype, device: torch.device, *given: Any) -> torch.Tensor:
    """Stand for ``torch.FloatTensor(...)`` and ``Tensor.new(...)``: of extents, a shape or nested lists."""
    if len(given) == 1 and not isinstance(given[0], int):
        if not isinstance(given[0], torch.Size):
            return torch.tensor(given[0], dtype=dtype, device=device)
        given = given[0]
    return torch.empty(given or (0,), dtype=dtype, device=device)


def variable(data: Any = None, requires_grad: bool = False, volatile: bool = False) -> torch.Tensor:
    """Stand for `torch.autograd.Variable`, which gives a tensor of the same memory."""
    if volatile:
        told = "volatile was removed and now has no effect. Use `with torch.no_grad():` instead."
        warnings.warn(told, UserWarning, stacklevel=2)
    if data is None:
        data = torch.empty(0)
    elif not isinstance(data, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(data).__name__}")
    made: torch.Tensor = data.detach()
    return made.requires_grad_() if requires_grad else made


def numel_(size: Iterable[int], /) -> int:
    """Stand for `torch.Size.numel`."""
    count = 1
    for extent in size:
        count = count * extent
    return count


def stream(iterator: Iterator[Any], /) -> Iterator[Any]:
    """Yield what an iterator gives, without a call of its ``__iter__``."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def item_by_item(method: Any, owner: Any, /, *sources: Iterable[Any], **named: Any) -> None:
    """Stand for a method that changes its owner while it takes items: what gives them sees each change."""
    for source in sources:
        for item in source:
            method(owner, (item,))
    if named:
        method(owner, **named)


def reversed_(sequence: Any, /) -> Iterator[Any]:
    """Stand for `reversed` of an object with ``__len__`` and ``__getitem__``."""
    return _backwards(sequence, len(sequence))


def _backwards(sequence: Any, end: int) -> Iterator[Any]:
    for index in range(end - 1, -1, -1):
        try:
            item = sequence[index]
        except (IndexError, StopIteration):
            return
        yield item


def reduce_(function: Any, items: Iterable[Any], /, *initial: Any) -> Any:
    """Stand for `functools.reduce`."""
    stream: Any = None
    try:  # noqa: SIM105 interpreted: it is to be short
        stream = iter(items)
    except TypeError:
        pass
    if stream is None:
        raise TypeError("reduce() arg 2 must support iteration")
    if initial:
        total = initial[0]
    else:
        total = next(stream, _MISSING)
        if total is _MISSING:
            raise TypeError("reduce() of empty iterable with no initial value")
    for item in stream:
        total = function(total, item)
    return total


def order(keys: list[Any], reverse: bool) -> list[int]:
    """Return the indices of `keys` in sorted order; not interpreted, so `keys` must be plain data."""
    return sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)


def sorted_(items: Iterable[Any], /, *, key: Any = None, reverse: bool = False) -> list[Any]:
    """Stand for `sorted` with a key."""
    values = list(items)
    keys = [value if key is None else key(value) for value in values]
    return [values[index] for index in order(keys, reverse)]


def first_of(items: Any) -> Any:
    """Return the first item of a tuple."""
    return items[0]


def min_(*items: Any, key: Any = None, **default: Any) -> Any:
    """Stand for `min` with a key, or of tensors."""
    best = best_key = _MISSING
    for item in items if len(items) > 1 else items[0]:
        now = item if key is None else key(item)
        if best_key is _MISSING or now < best_key:
            best, best_key = item, now
    if best is _MISSING:
        return min((), **default)
    return best


def max_(*items: Any, key: Any = None, **default: Any) -> Any:
    """Stand for `max` with a key, or of tensors."""
    best = best_key = _MISSING
    for item in items if len(items) > 1 else items[0]:
        now = item if key is None else key(item)
        if best_key is _MISSING or now > best_key:
            best, best_key = item, now
    if best is _MISSING:
        return max((), **default)
    return best
