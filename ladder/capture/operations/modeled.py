"""Calls that are not followed but known: which state they read or write, or what operator they are.

The state of an object that has no Python attributes is a key of its `Node`: reads are guards, writes steps.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import importlib.util
import logging
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop

from ladder.capture.heap.nodes import CaptureError, MockStep, dynamic_parts
from ladder.capture.interpreter.evaluate import run
from ladder.capture.interpreter.graph_arguments import value_of
from ladder.capture.interpreter.interpreter import IMPORT, Call, Interpreter
from ladder.capture.operations import collectives, managers
from ladder.capture.operations.attributes import load_attr
from ladder.capture.operations.function_modes import enter_device, leave_device, pop_mode, push_mode
from ladder.capture.operations.functions import new_frame
from ladder.capture.operations.objects import identify, perform, pinned_part, says_its_arguments
from ladder.capture.operations.replay import is_hidden
from ladder.capture.operations.symbolic import settle_extents
from ladder.capture.operations.tensor_operators import tensor_operator
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.python.prescan import frame_names, only_computes
from ladder.capture.values import tensors
from ladder.capture.values.kinds import is_a, is_constant, is_plain

_APPLY = vars(torch.autograd.Function)["apply"]
"""Python's before torch 2.14, native since."""
_UNSET = object()
_VALUE = "value"


def _current(vm: Interpreter, variable: contextvars.ContextVar[Any]) -> Any:
    """Return the value of `variable` in this context, guarded; `NULL` if it has none and no default."""
    heap, value = vm.heap, variable.get(_UNSET)
    node = heap.node(variable)
    path = f"{variable.name}.get()"
    if value is _UNSET:
        text = f"{node.var}.get({heap.constant(_UNSET)}) is {heap.constant(_UNSET)}"
        heap.absent(node, _VALUE, text, path)
        return NULL
    return heap.load(node, _VALUE, value, f"{node.var}.get()", path)


def get_variable(vm: Interpreter, variable: contextvars.ContextVar[Any], *default: Any) -> Any:
    """``ContextVar.get``."""
    found = _current(vm, variable)
    if found is not NULL:
        return found
    return variable.get(*default)  # the variable's own default, or LookupError, if none is given


def set_variable(vm: Interpreter, variable: contextvars.ContextVar[Any], value: Any) -> Any:
    """``ContextVar.set``: the value before is guarded, since `reset` brings it back."""
    _current(vm, variable)
    node = vm.heap.node(variable)
    token = perform(vm, contextvars.ContextVar.set, (variable, value), {}, [node])
    node.wrote(_VALUE)
    return token


def reset_variable(vm: Interpreter, variable: contextvars.ContextVar[Any], token: Any) -> None:
    """``ContextVar.reset`` with a token of this segment."""
    heap = vm.heap
    changes = [heap.node(variable), heap.node(token)]
    if changes[1].external:
        raise CaptureError("a context variable is reset by a token from before")
    perform(vm, contextvars.ContextVar.reset, (variable, token), {}, changes)


def step_generator(vm: Interpreter, generator: Any, *args: Any, name: str) -> Any:
    """Go on with a generator of this segment, whose frame is interpreted."""
    if not is_hidden(vm, generator):
        raise CaptureError("a generator from outside")
    with vm.barrier():
        return getattr(generator, name)(*args)


METHODS: dict[tuple[type, str], Callable[..., Any]] = {
    (types.ModuleType, "__getattribute__"): load_attr,
    **{
        (types.GeneratorType, name): partial(step_generator, name=name) for name in ("send", "throw", "close")
    },
    (torch.device, "__enter__"): enter_device,
    (torch.device, "__exit__"): leave_device,
    (contextvars.ContextVar, "get"): get_variable,
    (contextvars.ContextVar, "set"): set_variable,
    (contextvars.ContextVar, "reset"): reset_variable,
}
"""(type of the receiver, method name) -> what carries it out and records it."""


def ask_about_program(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask what a part of the program is; the answer holds wherever that part is the same."""
    for item in (*args, *kwargs.values()):
        while is_a(item, types.MethodType):
            item = item.__func__
        if is_constant(item):
            continue
        node = vm.heap.node(item)
        if is_a(item, types.FunctionType) and node.external:
            identify(vm, item)
        elif not node.stable:
            raise CaptureError(f"{function.__qualname__} of a {type(item).__qualname__}")
    return pinned_part(vm, function(*map(vm.plain, args), **kwargs))


def scan(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``associative_scan``: one operator, if the function it combines by is nothing but its code."""
    combine, *rest = args
    if type(combine) is not types.FunctionType or combine.__closure__ or combine.__defaults__:
        raise CaptureError("a scan by a function that refers to more than its arguments")
    names = frame_names(combine.__code__) | set(combine.__code__.co_names) & combine.__globals__.keys()
    if names - {"torch"}:
        raise CaptureError(f"a scan by a function that reads {', '.join(sorted(names))}")
    settle_extents(vm, torch.utils._pytree.tree_leaves((rest, kwargs)))
    return tensor_operator(vm, tensors.scanning(function, combine), tuple(rest), kwargs)


def one_operator(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what ``torch.compiler.allow_in_graph`` was given: one operator, of tensors of these extents."""
    settle_extents(vm, torch.utils._pytree.tree_leaves((args, kwargs)))
    return tensor_operator(vm, function, args, kwargs)


def outlives(vm: Interpreter, target: Any) -> bool:
    """Say whether `target` lives longer than this segment: records hold classes that they name."""
    node = vm.heap.find(target)
    if id(target) in vm.heap.arguments or (is_a(target, type) and (node is None or node.stable)):
        return True
    return node is not None and node.external and not may_have_died(vm)


def may_have_died(vm: Interpreter) -> bool:
    """Say whether something from outside may have lost its last reference in this segment."""
    taken_up = vm.point is not None and bool(vm.point.layouts)
    return taken_up or any(step.keep for step in vm.heap.steps)


def refer_weakly(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what makes or looks at weak references: the graph breaks where the object lives in any case."""
    if not args or not outlives(vm, args[0]):
        raise vm.leave("a weak reference to what may die meanwhile")
    raise CaptureError("a weak reference")


_FLEX = "torch._higher_order_ops.flex_attention"


def find_packed(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what looks in positions for packed sequences: there are none where they count up.

    transformers takes sequences to be packed where it may not look, and PaliGemma's positions, which begin
    with 1, then give another mask.
    """
    positions = vm.recording and not kwargs and is_a(args[0], torch.Tensor) and value_of(vm, args[0]).fx
    if positions and _counts_up(positions, {node for node, *_ in vm.trace.placeholders}):
        return None
    return run(vm, new_frame(vm, function, args, kwargs))


def _counts_up(node: Any, given: set[torch.fx.Node]) -> bool:
    """Tell whether a tensor is an ``arange``, plus numbers, with axes before it."""
    name, (first, *rest) = getattr(node.target, "__name__", node.target), node.args or (None,)
    if name == "arange":
        return len(rest) < 2 and not {"step", "dtype", "out"} & node.kwargs.keys()
    kept = (name == "unsqueeze" and rest == [0]) or (name == "expand" and rest[-1:] == [-1])
    kept = kept or (name == "add" and is_a(rest[0], int) and not node.kwargs)
    return bool(kept) and node not in given and _counts_up(first, given)


def is_loaded(*names: str) -> bool:
    """Tell whether modules are loaded; those of torch are, which change nothing that a program sees."""
    for name in names:
        if name.startswith("torch.") and name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    return all(sys.modules.get(name) is not None for name in names)


def loaded(vm: Interpreter, name: str, given: str) -> types.ModuleType:
    """Return the module `given` of an import of `name`, both loaded; that they are is guarded."""
    node = vm.heap.pin(sys.modules)
    for key in {name, given}:
        text = f"{node.var}[{key!r}]"
        vm.heap.read(node, key, sys.modules[key], text, f"sys.modules[{key!r}]")
    return sys.modules[given]


def import_by_name(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``importlib.import_module``."""
    args, kwargs = vm.plain_given(args, kwargs)
    given = {**dict(zip(("name", "package"), args, strict=False)), **kwargs}
    name, package = given["name"], given.get("package")
    whole = name if name[:1] != "." else importlib.util.resolve_name(name, package) if package else ""
    if not is_loaded(whole):
        vm.meet_import()
        raise CaptureError(IMPORT)
    return loaded(vm, whole, whole)


def follow_dense(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a higher-order operator of torch: what it does with plain tensors is Python, and is followed."""
    operator, *given = args
    kernels = operator.py_kernels
    kernel = kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")) and any(
        key.name.startswith("Autocast") for key in kernels
    )
    if type(kernel) is not types.FunctionType or autocast:
        raise CaptureError(f"the operator {operator} of functions")
    return vm.call_function(pinned_part(vm, kernel), tuple(given), kwargs)


def compile_eagerly(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``torch.compile``: by its backend "eager" a function computes what it computes without."""
    if len(args) != 1 or vm.plain(kwargs.get("backend")) != "eager":
        raise CaptureError("torch.compile")
    return args[0]


def map_rows(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Follow what calls the function of a ``torch.vmap``: all rows at once, of these extents."""
    settle_extents(vm, torch.utils._pytree.tree_leaves((args, kwargs)))
    args, kwargs = vm.plain_given(args, kwargs)
    with vm.barrier():
        return run(vm, new_frame(vm, function, args, kwargs))


def load_rules(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have torch load its rules for ``torch.vmap``, as it does once in a process."""
    function()


def has_rows(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether ``torch.vmap`` holds a tensor."""
    vm.heap.node(args[0])
    return bool(function(*args))


FOLLOWED = frozenset({"einops"})
"""Packages that torch itself gives to ``allow_in_graph`` in some releases: their Python is followed."""


def is_allowed_in_graph(function: Any) -> bool:
    """Tell whether a user gave a function to ``torch.compiler.allow_in_graph``."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    followed = str(function.__module__).partition(".")[0] in FOLLOWED
    return not followed and rules is not None and rules.is_callable_allowed(function)


def check(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do what ``torch._check`` does where the condition holds; where it does not, it raises by itself."""
    if len(args) != 3 or kwargs or vm.plain(args[1]) is not True:
        raise CaptureError("a check that fails")


def note_generation(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call what torch.compile notes of a module when it is made: it is kept beside it, and as long as it."""
    perform(vm, function, args, kwargs, [vm.heap.node(args[-1])])


def apply_function(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a `torch.autograd.Function`: its ``forward``, where no gradient is asked of it."""
    recorded = torch.is_grad_enabled()
    asked = any(is_a(item, torch.Tensor) and item.requires_grad for item in args)
    if kwargs or (recorded and asked):
        raise CaptureError("a gradient of a torch.autograd.Function is recorded")
    chosen = polyfills.apply_function_without_gradients if recorded else polyfills.apply_function
    return vm.call_function(pinned_part(vm, chosen), args, {})


def call_cached(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function behind `functools.cache`; guards call it again and compare what it gives."""
    heap, uses = vm.heap, set[str]()
    node = heap.node(function)
    if vm.store.counts_cached_calls:
        raise CaptureError("a cached function whose calls are counted")
    if (
        node.stable
        and any(map(dynamic_parts, (*args, *kwargs.values())))
        and _is_followed(vm, function, args, kwargs)
    ):
        return vm.call_function(pinned_part(vm, function.__wrapped__), args, kwargs)
    heap.guard.calls_cached = True
    args, kwargs = vm.plain_given(args, kwargs)
    given = (*args, *kwargs.values())
    if not node.stable or not all(is_constant(item) or heap.node(item).pinned for item in given):
        raise CaptureError("a cached function of objects that come and go")
    for item in given:
        heap.touch(item) if is_constant(item) else None
    result = function(*args, **kwargs)
    text = heap.call_text(node.var, args, kwargs, uses)
    # An object that the cache keeps is the same one in every run, so that others may be looked up by it.
    keeps = function.cache_parameters()["maxsize"] != 0
    stays = keeps and not is_plain(result) and not is_a(result, torch.Tensor)
    return heap.meet(result, heap.guard.bind(text, text), text, stable=stays)


def _is_followed(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a cached function of open numbers may be interpreted, which makes its result anew.

    It may where it only computes what nobody can change, or where those who ask are known not to.
    """
    wrapped = function.__wrapped__
    if type(wrapped) is not types.FunctionType:
        return False
    if (wrapped.__module__, wrapped.__qualname__) in ONLY_READ:
        return True
    given = [vm.unlifted(item) for item in args]
    named = {key: vm.unlifted(item) for key, item in kwargs.items()}
    computes = is_constant((*given, *named.values())) and only_computes(wrapped)
    return computes and is_constant(function(*given, **named))


def say(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a function that prints, warns or logs plain data; a matched run does so in the same place."""
    heap, uses = vm.heap, set[str]()
    args, kwargs = vm.plain_given(args, kwargs)
    if function is print:
        args = tuple(str(item) if says_its_arguments(vm, item) else item for item in args)
    for item in (*args, *kwargs.values()):
        owned = is_a(item, logging.Logger) or item is sys.stdout or item is sys.stderr
        if not owned and not is_plain(item):
            raise CaptureError(f"{function.__qualname__} of what is no plain data")
        if not owned:
            heap.touch(item)
    if function is warnings.warn:
        filters = heap.constant(list(warnings.filters))
        heap.guard.check(f"{heap.constant(warnings)}.filters == {filters}", "what is done with warnings")
    call = vm.through(function)
    text = heap.call_text(heap.constant(call), args, kwargs, uses)
    call(*args, **kwargs)
    heap.steps.append(MockStep(text, None, uses, set(), True))


def make_tuple_class(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``collections.namedtuple``; a matched run makes a class of its own where an instance lives on."""
    heap, uses = vm.heap, set[str]()
    args, kwargs = vm.plain_given(args, kwargs)
    for item in (*args, *kwargs.values()):
        if not is_plain(item):
            raise CaptureError(f"{function.__qualname__} of what is no plain data")
        heap.touch(item)
    named = {"module": vm.frames[-1].names.get("__name__"), **kwargs}
    text = heap.call_text(heap.constant(function), args, named, uses)
    made = function(*args, **named)
    heap.fresh(made, text, uses)
    return made


def in_python(written: Callable[..., Any]) -> Call:
    """Return how a function of torch is called that does what `written` does."""

    def follow(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return vm.call_function(pinned_part(vm, written), args, kwargs)

    return follow


def call_checkpoint(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``checkpoint`` where it recomputes nothing; advice on how to train is not repeated."""
    options = {"use_reentrant", "preserve_rng_state"}
    followed = kwargs.keys() <= options or vm.plain(kwargs.get("use_reentrant")) is False
    if torch.is_grad_enabled() or not followed or kwargs.keys() & OF_RECOMPUTING:
        raise CaptureError("a checkpoint for gradients")
    return vm.call_function(pinned_part(vm, polyfills.checkpoint), args, kwargs)


OF_RECOMPUTING = {"context_fn", "determinism_check", "debug", "early_stop"}
"""Options of ``checkpoint`` that say how it recomputes."""


FUNCTIONS: dict[Any, Call] = {
    **dict.fromkeys(natives.ABOUT_PROGRAMS, ask_about_program),
    **dict.fromkeys(natives.SAYING, say),
    associative_scan: scan,
    collections.namedtuple: make_tuple_class,
    torch._check_with: check,
    torch.cond: in_python(polyfills.cond_),
    torch.compile: compile_eagerly,
    **dict.fromkeys((weakref.proxy, weakref.getweakrefs, weakref.getweakrefcount), refer_weakly),
    importlib.import_module: import_by_name,
    torch._ops.HigherOrderOperator.__call__: follow_dense,
    while_loop: in_python(polyfills.while_loop_),
    getattr(_APPLY, "__func__", _APPLY): apply_function,
    torch._C._functorch.is_batchedtensor: has_rows,
    **managers.FUNCTIONS,
    torch._C._push_on_torch_function_stack: push_mode,
    torch._C._pop_torch_function_stack: pop_mode,
}
"""Functions, and native class methods as their class holds them -> ``call(vm, function, args, kwargs)``."""
ONLY_READ = {("einops.einops", "_reconstruct_from_shape_uncached")}
"""(module, qualified name) of cached functions whose results, lists among them, no caller changes."""
NAMED: dict[tuple[str, str], Call] = {
    ("torch._dynamo.mutation_guard", "GenerationTracker.tag"): note_generation,
    ("torch.utils.checkpoint", "checkpoint"): call_checkpoint,
    ("torch._functorch.vmap", "_flat_vmap"): map_rows,
    (_FLEX, "_permute_strides"): in_python(polyfills.laid_out_like),
    ("torch._higher_order_ops.utils", "_maybe_compile_and_run_fn"): in_python(polyfills.call),
    ("torch._higher_order_ops.utils", "setup_compilation_env"): in_python(polyfills.eager_environment),
    ("torch.nn.modules.rnn", "RNNBase._update_flat_weights"): in_python(polyfills.update_flat_weights),
    ("torch._functorch.predispatch", "lazy_load_decompositions"): load_rules,
    ("transformers.masking_utils", "find_packed_sequence_indices"): find_packed,
    **collectives.NAMED,
}
"""(module, qualified name) of such functions in modules that are not imported for them -> the same."""


def modeled(function: types.FunctionType) -> Call | None:
    """Return how a Python function that is not interpreted is called; None if it is."""
    known = FUNCTIONS.get(function) or NAMED.get((function.__module__, function.__qualname__))
    return one_operator if known is None and is_allowed_in_graph(function) else known
