"""torch.fx graphs traced into ATen's core operators, with fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
import torch._dispatch.python
import torch.fx
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ladder.frontend.aten_layouts import laid_as_by_kernels
from ladder.frontend.aten_stores import with_stores
from ladder.frontend.aten_writes import (
    refuse_overlaps,
    refuse_real_writes,
    refuse_resized,
    refuse_shared_results,
    without_local_writes,
    written_by,
)
from ladder.frontend.fx_facts import autocast_facts
from ladder.frontend.selection import MARGIN_LOSSES, argmax, topk
from ladder.frontend.untraceable import untraceable
from ladder.frontend.upsampling import upsampling
from ladder.interrupts import pass_on
from ladder.runtime.dispatch import dispatch_kept
from ladder.runtime.failing import checks, may_raise
from ladder.runtime.functional import apart, functional_form, has_form, memory_of, named, own_results
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.quick_fakes import quick_fakes
from ladder.runtime.recurrent_operator import WHOLE

KEPT = (
    "silu",
    "gelu",
    "hardtanh",
    "mish",
    "frac",
    "embedding",
    "arange",
    "eye",
    "im2col",
    "unfold_backward",
    "col2im",
    "std",
    "std_mean",
    "index_add",
    "index_copy",
    "select_scatter",
    "binary_cross_entropy",
    "roll",
    "linalg_cross",
    "linspace",
    "multilabel_margin_loss_forward",
    *(f"{border}_pad{axes}d" for border in ("reflection", "replication") for axes in (1, 2, 3)),
)
"""Operators that torch would take apart and that are rows of ours, faster in one piece (in parts,
`unfold_backward` is an addition for each element of a window), or, as linspace of integers between fractions
and margins of NaN, other numbers in parts."""

STATEFUL = ("set_", "manual_seed", "seed", "_enter", "_exit")
"""How the names of functions begin that change torch's global state; those of autocast are traced."""


def to_aten(module: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
    """Return the graph in ATen's core operators, with shapes, free of changes in place but of inputs."""
    _refuse_state(module)
    prepared = _with_whole_operators(module)

    try:
        with dispatch_kept():
            traced = _functional(prepared, examples)
        if with_stores(traced):
            drop_unused(traced.graph)
    except ImportRefused:
        raise
    except Exception as error:  # whatever tracing cannot do, the program itself still can
        pass_on(error)
        raise ImportRefused(untraceable(error)) from error
    return traced


RUN = "run"
"""Key of what nodes hold that are run though nothing uses them: they may raise."""

Layout = Callable[[torch.Tensor], Any]


def _shape(tensor: torch.Tensor) -> Any:
    return tensor.shape


def _place(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _unmoved(module: torch.fx.GraphModule, layout: Layout) -> Callable[..., Any]:
    """Return the module as a function that refuses to give arguments another layout, and to switch autocast.

    Plans leave both as they are.
    """

    def run(*arguments: Any) -> Any:
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        before, autocast = [*map(layout, tensors)], autocast_facts()
        results = module(*arguments)
        if [*map(layout, tensors)] != before:
            raise ImportRefused("an argument gets another shape or other strides")
        if autocast_facts() != autocast:
            raise ImportRefused("autocast is switched and stays so")
        return results

    return run


def _functional(module: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
    """Trace; a graph that changes tensors in place, or is not traced as it is, is first made functional.

    Functional tensors that were written lie contiguously, whatever the arguments do.
    """
    run = _unmoved(module, _shape)
    try:
        traced = _traced(_unmoved(module, _place), examples)
    except DynamicOutputShapeException:
        raise
    except RuntimeError:
        if any(_name_of(node) in LOSSY_NAMES or node.target in LOSSY_NAMES for node in module.graph.nodes):
            raise  # a functional graph might write through them
        traced = None
    if traced is not None:
        writes = [node for node in traced.graph.nodes if _changes_in_place(node)]
        if not writes:
            return traced
        _refuse_lossy_views(writes)
        if without_local_writes(traced, decompositions()):
            return traced
    traced = _traced(torch.func.functionalize(traced or run, remove="mutations"), examples)
    if any(_changes_in_place(node) and not _stores(node) for node in traced.graph.nodes):
        # decompositions changed something of their own, or operators below functional tensors did
        traced = _traced(torch.func.functionalize(traced, remove="mutations"), examples)
    return traced


LOSSY = ("aten.expand.default", "aten.unfold.default")
"""Views through which functional graphs write wrongly: torch adds up what lies in several places of them."""

LOSSY_NAMES = ("expand", "expand_as", "broadcast_to", "broadcast_tensors", "unfold")


def _refuse_lossy_views(writes: Sequence[torch.fx.Node]) -> None:
    """Raise ImportRefused if something is written through a view of `LOSSY`."""
    for write in writes:
        given = zip(write.args, write.target._schema.arguments, strict=False)  # type: ignore[union-attr]
        changed = [value for value, argument in given if argument.alias_info is not None]
        for value in [*changed, *write.kwargs.values()]:
            while isinstance(value, torch.fx.Node) and _shares_memory(value):
                if str(value.target) in LOSSY:
                    raise ImportRefused(f"{write.target} writes through {value.target}")
                value = value.args[0]


def _shares_memory(node: torch.fx.Node) -> bool:
    """Tell whether a traced operator gives a view of its first operand, or that operand."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return any(result.alias_info is not None for result in target._schema.returns)


def _traced(run: Callable[..., Any], examples: Sequence[Any]) -> torch.fx.GraphModule:
    """Trace with fake tensors: those of the examples if they are fake, with their symbolic sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = (value for value in examples if isinstance(value, torch._subclasses.FakeTensor))
    mode = next((value.fake_mode for value in fakes), None)
    way: Literal["fake", "real"] = "fake" if mode is None else "real"
    trace = make_fx(_with_failing(run), decomposition_table=dict(decompositions()), tracing_mode=way)
    with torch.no_grad(), quick_fakes():
        if mode is None:
            with torch._guards.tracing(None):  # torch.compile's own would leave sizes open
                return _without_failing(trace(*examples))
        before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        try:
            with (
                mode,
                torch._dispatch.python.enable_python_dispatcher(),
            ):  # what is made of no tensor is fake too
                return _without_failing(trace(*examples))
        finally:
            mode.allow_non_fake_inputs = before


class _Failing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the results of operators that may raise: tracing drops what nothing uses.

    Operators of others that write arguments become their functional forms, and copies into what is written.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[torch.Tensor] = []
        self.wholes: dict[int, torch.Tensor] = {}
        """Memory -> the first tensor that showed it; later ones are its views."""
        self._note(arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        refuse_real_writes(func, written)
        check = checks().get(func)
        if check is not None:
            self.results.append(check(*args, *kwargs.values()))
            return None
        if has_form(func):
            return self._without_writes(func, named(func, args, kwargs))
        refuse_shared_results(func, args, written)
        refuse_overlaps([args, kwargs], written)
        before = [(value, value.shape) for value in written]
        found = laid_as_by_kernels(func, args, func(*args, **kwargs))
        refuse_resized(func, before)
        _refuse_unknown_sizes(func, found)
        self._note(found)
        if may_raise(func, args):
            several = found if isinstance(found, list | tuple) else (found,)
            self.results += [value for value in several[:1] if isinstance(value, torch.Tensor)]
        return found

    def _note(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self.wholes.setdefault(memory_of(value), value)

    def _without_writes(self, func: Any, given: dict[str, Any]) -> Any:
        """Call an operator's functional form, copy into what is written, and return its own results."""
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        bases, places, rest = apart(func, given, self._whole)
        with disable_proxy_modes_tracing():
            stated = func(**given)
        made = functional_form(func)(bases, places, [], **rest)
        for base, new in zip(bases, made[len(made) - len(bases) :], strict=True):
            torch.ops.aten.copy_.default(base, new)
        self._note(made)
        return own_results(func, given, stated, made)

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        whole = self.wholes.setdefault(memory_of(value), value)
        if whole.dtype is not value.dtype:
            raise ImportRefused("an operator writes through a view of another type")
        return whole


def _refuse_unknown_sizes(function: Any, found: Any) -> None:
    """Raise ImportRefused where the sizes of a result depend on values: what follows need not be traced."""
    if torch.Tag.dynamic_output_shape in function.tags and free_unbacked_symbols(found):
        raise ImportRefused(f"the sizes of what {function} gives depend on values")


def _with_failing(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also gives what operators that may raise gave."""

    def watched(*arguments: Any) -> Any:
        with _Failing(arguments) as failing:
            results = run(*arguments)
        return results, failing.results

    return watched


def _without_failing(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a graph of `_with_failing` with its own results, and `RUN` of what it has to run besides."""
    output = traced.graph.output_node()
    given: Any = output.args[0]
    results, failing = given
    output.args = (results,)
    for node in failing:
        if isinstance(node, torch.fx.Node) and not node.users:
            run = node.args[0] if node.target is operator.getitem else node
            run.meta[RUN] = node.meta[RUN] = True  # type: ignore[union-attr]
    drop_unused(traced.graph)
    traced.recompile()
    return traced


def drop_unused(graph: torch.fx.Graph) -> None:
    """Remove unused nodes, except random draws: later draws depend on them; and those that are `RUN`."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(node.meta.get(RUN)))


def _changes_in_place(node: torch.fx.Node) -> bool:
    """Tell whether a traced operator changes an argument."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _stores(node: torch.fx.Node) -> bool:
    """Tell whether a traced operator copies into an argument of the graph."""
    return node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return torch's decompositions into core operators, without those of `KEPT`, and ours.

    Operators that draw random numbers stay whole too: their parts would draw others; and those that write
    arguments: their functional forms are decomposed.
    """
    from torch._decomp import core_aten_decompositions

    table: Any = core_aten_decompositions()
    random = torch.Tag.nondeterministic_seeded
    kept = {
        op: row
        for op, row in table.items()
        if str(op).split(".")[1] not in KEPT
        and not (isinstance(op, torch._ops.OpOverload) and (random in op.tags or op._schema.is_mutable))
    }
    norms = {op: partial(declared_batch_norm, op, more) for op, more in BATCH_NORMS.items()}
    return {**kept, **norms, **CHOICES}


def sgn(x: Any) -> Any:
    """Return ``torch.sgn``: complex numbers keep their operator, whose parts give other infinities."""
    return NotImplemented if x.is_complex() else torch.sign(x)


CHOICES = {
    torch.ops.aten.topk.default: topk,
    torch.ops.aten.argmax.default: argmax,
    torch.ops.aten.sgn.default: sgn,
}
"""Operators -> what they consist of, where torch has no decomposition or one of other values."""

BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten.miopen_batch_norm.default: 0,
    torch.ops.aten.cudnn_batch_norm.default: 1,
}
"""Operators that change running statistics in training, of which their schemas do not tell.

Each with the number of its results beside the three of every one: what backward reserves."""


def declared_batch_norm(
    op: Any, more: int, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
    momentum: float, epsilon: float,
) -> Any:  # fmt: skip
    """Return what `BATCH_NORMS` give; in training, statistics are results of an operator and then stored.

    Else a graph that reads what is written, as that of instance norm, would read what was there before.
    Those of libraries become torch's own: they take only x that lies as it did for the fake tensors.
    """
    given = (x, weight, bias, mean, variance, training, momentum, epsilon)
    if not training or mean is None or variance is None:
        native = torch.ops.aten.native_batch_norm.default
        results = None if op is native else native(*given)
    else:
        *results, new_mean, new_variance = torch.ops.aten._native_batch_norm_legit_functional(*given)
        mean.copy_(new_mean)
        variance.copy_(new_variance)
    if results is None:
        return NotImplemented
    return (*results, *(x.new_empty(0, dtype=torch.uint8) for _ in range(more)))


def _refuse_state(module: torch.fx.GraphModule) -> None:
    for node in module.graph.nodes:
        name = _name_of(node)
        if name.startswith(STATEFUL) and "autocast" not in name:
            raise ImportRefused(f"{name} changes the state of torch")


def _name_of(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _may_cast(graph: torch.fx.Graph) -> bool:
    """Tell whether autocast may be on within a graph."""
    return torch._C._is_any_autocast_enabled() or any("autocast" in _name_of(node) for node in graph.nodes)


def cast_attention(*tensors: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: Any) -> Any:
    """Return attention of what autocast, if it is on, makes of its operands: no row of its lists is ours."""
    kind, given = tensors[0].device.type, [*tensors, mask]
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        given = [_lowered(tensor, low) for tensor in given]
    *operands, mask = given
    return torch.ops.ladder.attention(*operands, mask=mask, causal=causal, scale=scale)


def _lowered(tensor: torch.Tensor | None, low: torch.dtype) -> torch.Tensor | None:
    """Return a tensor as autocast gives it to operators of low precision: float64 stays."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(low)


def matrix_linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Return ``torch.nn.functional.linear`` by the rows of one matrix, however the input lies."""
    count = 1
    for extent in input.shape[:-1]:
        count = count * extent
    rows = input.reshape(count, input.shape[-1])
    result = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return result.reshape(*input.shape[:-1], weight.shape[0])


def contiguous_bernoulli(x: Any, p: float, **options: Any) -> Any:
    """Return ``torch.bernoulli(x, p)`` as it draws: in the order of the axes, however x lies."""
    return x.new_empty(x.shape).bernoulli_(p, **options)


def drawn_dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Return ``torch.nn.functional.dropout``, which draws in the order in which x lies on a CPU.

    For p = 1 it draws nothing, but torch's decomposition for open extents does.
    """
    if training and p == 1:
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        return x.mul_(zero) if inplace else x * zero
    if not training or p == 0 or x.is_contiguous() or x.device.type != "cpu":
        return torch.nn.functional.dropout(x, p, training, inplace)
    noise = torch.ops.ladder.bernoulli(x, torch.empty_like(x).stride(), 1 - p).div_(1 - p)
    return x.mul_(noise) if inplace else x * noise


def _drawn(input: Any, p: float, train: bool) -> Any:
    return drawn_dropout(input, p, train)


REPLACED = {
    torch.nn.functional.dropout: drawn_dropout,
    torch.dropout: _drawn,
    torch.dropout_: lambda input, p, train: drawn_dropout(input, p, train, inplace=True),
    torch.ops.aten.dropout: _drawn,
    torch.ops.aten.dropout.default: _drawn,
    **MARGIN_LOSSES,
}
"""What is called -> what draws, or ends at infinities, as that does."""


_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear, torch.ops.aten.linear.default)
_ATTENTION = (torch.nn.functional.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


def _with_whole_operators(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the graph with attention as one operator, and linear layers as products of two matrices.

    Tracing would take attention apart, and make products of tensors of some linear layers. Autocast does not
    know our whole operators: where it may be on, those that it lists stay torch's. It keeps no converted
    weights: those of another trace would become constants of this one.
    """
    graph = torch.fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    may_cast = _may_cast(graph)
    for node in graph.nodes:
        if _name_of(node) == "_enter_autocast":
            node.args = (*node.args[:3], False)
        if _name_of(node) == "set_autocast_cache_enabled":
            node.args = (False,)
        aten = node.target is torch.ops.aten.scaled_dot_product_attention.default
        if node.op == "call_function" and (node.target in _ATTENTION or aten):
            _name_attention(node)
        if node.op == "call_function" and node.target in _LINEAR:
            node.target = matrix_linear
        if node.op == "call_function" and not may_cast:
            node.target = upsampling(node.target) or WHOLE.get(node.target, node.target)
        if node.op == "call_function":
            node.target = REPLACED.get(node.target, node.target)
        if node.op == "call_function" and node.target is torch.bernoulli and len(node.args) > 1:
            node.target = contiguous_bernoulli
    return torch.fx.GraphModule(module, graph)


def _name_attention(node: torch.fx.Node) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.pop("dropout_p", 0.0):
        return
    given.pop("enable_gqa", None)
    node.target = cast_attention
    node.args = tuple(given.pop(name) for name in ("query", "key", "value"))
    node.kwargs = {
        "mask": given.get("attn_mask"),
        "causal": bool(given.get("is_causal", False)),
        "scale": given.get("scale"),
    }
