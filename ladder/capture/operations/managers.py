"""Context managers of torch that are known: inference mode, labels of the profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.profiler import record_function

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.interpreter import Call, Interpreter
from ladder.capture.operations.attribute_stores import store_attr
from ladder.capture.operations.attributes import load_attr
from ladder.capture.operations.objects import perform, pinned_part
from ladder.capture.operations.tensor_operators import tensor_operator

with record_function("") as _label:
    _ENDED: Any = _label.record
    """What `record_function` holds of a label; this one has ended."""


def enter_inference(vm: Interpreter, mode: bool) -> Any:
    """Do ``_InferenceMode(mode)``, which enters the mode or leaves it.

    The graph is told of the recording of gradients only; emission says in which mode it runs as a whole.
    """
    if vm.aside:
        raise CaptureError("inference mode on a side of a branch")
    vm.trace.inference = vm.trace.inference or vm.here()
    made = perform(vm, _inference, (vm.plain(mode), torch.is_grad_enabled()), {}, [])
    tensor_operator(vm, torch._C._set_grad_enabled, (torch.is_grad_enabled(),), {})
    return made


def _inference(mode: bool, grad: bool) -> Any:
    """Enter inference mode or leave it, so that gradients are recorded behind it if `grad` says so."""
    torch._C._set_grad_enabled(grad)
    return torch._C._InferenceMode(mode)


def leave_inference(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do ``_InferenceMode.__exit__``, to which an error is nothing."""
    vm.trace.inference = vm.trace.inference or vm.here()
    perform(vm, function, (args[0], None, None, None), {}, [vm.heap.node(args[0])])
    tensor_operator(vm, torch._C._set_grad_enabled, (torch.is_grad_enabled(),), {})


def _entered(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do ``_InferenceMode.__enter__``: the mode has been entered already."""


def enter_label(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do ``record_function.__enter__``: where no profiler runs, it holds a label that has ended."""
    if vm.call(torch._C._autograd._profiler_enabled, (), {}):
        raise CaptureError("a label for a profiler that runs")
    store_attr(vm, args[0], "record", pinned_part(vm, _ENDED))
    return args[0]


def leave_label(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do ``record_function.__exit__``: a label that has ended need not end."""
    if load_attr(vm, args[0], "record") is not _ENDED:
        raise CaptureError("a label for a profiler that ran")


_INFERENCE = vars(torch._C._InferenceMode)
FUNCTIONS: dict[Any, Call] = {
    record_function.__enter__: enter_label,
    record_function.__exit__: leave_label,
    _INFERENCE["__enter__"].__func__: _entered,
    _INFERENCE["__exit__"].__func__: leave_inference,
}
"""What managers do where a block begins and ends -> ``call(vm, function, args, kwargs)``."""
