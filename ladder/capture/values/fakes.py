"""Operators run on fake tensors, which have no elements: what does not depend on values shows there too."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ladder.capture.values.aliasing import storage_of
from ladder.capture.values.kinds import is_a
from ladder.interrupts import pass_on


def fake_in(mode: Any, tensor: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return a fake of a tensor; of a view in another type, and of one whose data were set, it is no view.

    given: For `mode`, a ``FakeTensorMode``, which would make a view of that one's fake.
    """
    base = tensor._base
    if base is not None and (tensor.dtype is not base.dtype or not _shows(tensor, base)):
        tensor = tensor.data.requires_grad_(tensor.requires_grad)
    fake: torch.Tensor = mode.from_tensor(tensor, **given)
    return fake


def quick_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a fake as `fake_in` makes it where extents are numbers, in an eighth of the time.

    It shares memory with no other, and `mode` does not know it.
    Returns: None for a tensor of which more counts than how it lies: a view, one of no axes, whose number
        fakes may know, one with a gradient.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not _is_simple(tensor):
        return None
    with torch._C._DisableTorchDispatch():
        elements = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if elements.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
        elements.requires_grad_(tensor.requires_grad)
        fake: Any = FakeTensor(mode, elements, tensor.device)
    if type(tensor) is torch.nn.Parameter:
        fake._is_param = True
    found: torch.Tensor = fake
    return found


def _is_simple(tensor: torch.Tensor) -> bool:
    """Tell whether nothing counts of a tensor but its type, where it is and how it lies."""
    alone = tensor.is_leaf and not tensor._is_view() and not tensor.storage_offset()
    alone = alone and tensor.dim() > 0 and not (tensor.requires_grad and tensor.grad is not None)
    kind = tensor.is_complex() or tensor.is_quantized or tensor.is_nested or tensor.is_inference()
    return alone and not (kind or tensor.is_neg()) and not vars(tensor)


def _shows(view: torch.Tensor, base: Any) -> bool:
    """Tell whether two tensors lie in one memory; of what has none it is not known."""
    strided = view.layout is torch.strided and base.layout is torch.strided
    return not strided or storage_of(view) == storage_of(base)


def fake_call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what an operator gives for fakes of its tensors; extents that depend on values are symbols.

    Raises Exception: Whatever it raises then.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(value: Any) -> Any:
        return fake_in(mode, value, static_shapes=True) if is_a(value, torch.Tensor) else value

    given, named = tree_map(fake, (args, kwargs))
    with mode, warnings.catch_warnings(action="ignore"):
        return function(*given, **named)


def shapes_of_fakes(function: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Size] | None:
    """Return the shapes of what an operator gives for fakes; None if it takes none."""
    try:
        found = fake_call(function, args, kwargs)
    except Exception as error:  # what it raises then is not documented
        pass_on(error)
        return None
    return [item.shape for item in tree_leaves(found) if is_a(item, torch.Tensor)]


def fails_without_values(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Say whether an operator raises an error of CPython's for fakes too: it is one of shapes and types."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    off, log.disabled = log.disabled, True
    try:
        fake_call(function, args, kwargs)
    except Exception as error:  # torch's own say what fakes cannot do
        pass_on(error)
        return type(error).__module__ == "builtins" and type(error) is not NotImplementedError
    finally:
        log.disabled = off
    return False
