"""State of torch that decides what operators mean: set outside, set inside, left otherwise than it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from capture_world import World, calls, normal, normals, programs, steps
from torch import nn


def _leaf() -> tuple[Any, ...]:
    return (normal(3, 4).requires_grad_(True),)


def _mixed() -> list[Callable[[], tuple[Any, ...]]]:
    return [normals(), _leaf, normals(), _leaf, lambda: (_leaf()[0] * 1,), normals(), _leaf]


def _no_grad_nested(x: Any) -> Any:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3 + y
        w = z + 1
    return y, z, w, x + w, torch.is_grad_enabled()


@torch.no_grad()
def _decorated(x: Any) -> Any:
    return (x * 2).relu()


@torch.inference_mode()
def _inference(x: Any) -> Any:
    return (x * 2).relu()


def _gradient(x: Any) -> Any:
    x = x.detach().requires_grad_(True)
    y = (x**3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return (g.norm() - 1) ** 2, g.detach() * 2


def _backward(x: Any) -> Any:
    x = x.detach().clone().requires_grad_(True)
    (x.tanh() * 2).sum().backward()
    return x.grad + 1


def _penalty() -> World:
    layer = nn.Linear(4, 1)

    def function(x: Any) -> Any:
        x = x.detach().requires_grad_(True)
        (g,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        loss = (g.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        return loss.detach()

    def seen() -> Any:
        return None if layer.weight.grad is None else layer.weight.grad.clone()

    return steps(function, *(None,) * 4, lambda: layer.zero_grad(), None, observe=seen)


def _average() -> World:
    """Gradients gather while the number of batches, which is read before, is not what it was."""
    layer = nn.BatchNorm1d(4, momentum=None)

    def step(x: Any) -> Any:
        y = layer(x)
        (y**3).sum().backward()
        return y.detach()

    def seen() -> Any:
        return layer.weight.grad.clone(), layer.running_mean.clone()

    return steps(step, *(None,) * 5, observe=seen)


def _trained() -> World:
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(normal(2, 4)), layer.bias.zero_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(layer(x), torch.ones(3, 2))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return steps(step, *[None] * 5, observe=lambda: layer.weight.detach().clone())


def _leaves_gradients_off(x: Any) -> Any:
    y = x * 2
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return y, x + 1


def _restored(function: Callable[..., Any]) -> World:
    """The program leaves the recording of gradients otherwise: each call starts from what the last left."""
    world = calls(function, *_mixed())
    world.observe = torch.is_grad_enabled
    return world


def _autocast(x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            z = x @ x.t()
        w = torch.softmax(y, -1) + z
    return y, z, w, x @ x.t()


def _autocast_outside() -> World:
    stack: list[Any] = []

    def enter() -> None:
        stack.append(torch.autocast("cpu", torch.bfloat16))
        stack[-1].__enter__()

    def leave() -> None:
        stack.pop().__exit__(None, None, None)

    return steps(
        lambda x: (x @ x.t()).exp(),
        None,
        None,
        enter,
        None,
        leave,
        None,
        enter,
        leave,
        observe=lambda: torch.is_autocast_enabled("cpu"),
    )


def _default_dtype(dtype: Any) -> Callable[[], None]:
    return lambda: torch.set_default_dtype(dtype)


def _dtype_inside(x: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        y = torch.ones(2) * x.sum().item()
    finally:
        torch.set_default_dtype(before)
    return y, torch.zeros(2)


def _device_context(x: Any) -> Any:
    with torch.device("cpu"):
        y = torch.ones(4)
    with torch.device("meta"):
        z = torch.ones(4)
    return x + y, z.shape, z.device.type


def _default_device() -> World:
    return steps(
        lambda x: (x * 2, torch.ones(2).device.type),
        *(
            None,
            None,
            lambda: torch.set_default_device("meta"),
            None,
            lambda: torch.set_default_device(None),
            None,
        ),
    )


def _flags() -> World:
    def switch(holds: bool) -> Callable[[], None]:
        return lambda: torch.use_deterministic_algorithms(holds)

    return steps(
        lambda x: (x.cumsum(0), torch.are_deterministic_algorithms_enabled()),
        *(None, None, switch(True), None, switch(False), None),
    )


def _printing() -> World:
    def set_to(n: int) -> Callable[[], None]:
        return lambda: torch.set_printoptions(precision=n)

    return steps(lambda x: (x + 1, str(x)), None, None, set_to(2), None, set_to(4), None)


def _inference_outside() -> World:
    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(x: Any, mode: int) -> Any:
            return function(x, mode)

        return run

    @inside
    def function(x: Any, mode: int) -> Any:
        with (
            torch.inference_mode()
            if mode == 1
            else torch.no_grad()
            if mode == 2
            else contextlib.nullcontext()
        ):
            y = x * 2
        return y + 1, y.is_inference()

    return calls(function, *[lambda m=m: (normal(3), m) for m in (0, 1, 2, 0, 1, 2, 1)])


def _requires_grad_inside(x: Any) -> Any:
    y = x.detach().requires_grad_(True)
    return y * 2, y.is_leaf, (y * 2).requires_grad


def _argument_asked() -> World:
    def function(x: Any) -> Any:
        x.requires_grad_(True)
        return x * 2

    return calls(function, *[normals()] * 4)


def _custom_function() -> World:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * 3 * ctx.saved_tensors[0]

    return calls(lambda x: Square.apply(x) + 1, *_mixed())


def _checkpointed(x: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda v: (v * 2).relu(), x, use_reentrant=False) + 1


def _transforms(x: Any) -> Any:
    slope = torch.func.grad(lambda v: (v**2).sum())(x)
    return slope, torch.func.vmap(lambda row: row * row.sum())(x)


def _jacobian(x: Any) -> Any:
    return torch.autograd.functional.jacobian(lambda v: v.sin() * 2, x[0])


def _detached(x: Any) -> Any:
    y = (x * 2).detach()
    y.add_(1)
    return y, (x + y).requires_grad, x.data * 2


def _saved_hooks(x: Any) -> Any:
    seen: list[Any] = []

    def pack(value: Any) -> Any:
        seen.append(tuple(value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = (x.detach().requires_grad_(True).exp() * 2).sum()
    return y.detach(), len(seen)


def _module_modes() -> World:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
    return World(
        module,
        [
            (set_up, make)
            for set_up, make in zip(
                (None, None, module.eval, None, lambda: module.requires_grad_(False), module.train, None),
                _mixed(),
            )
        ],
        lambda: module[1].running_mean.clone(),
    )


def _mode_stack() -> World:
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            return found * 2 if function is torch.relu else found

    def function(x: Any, inside: bool) -> Any:
        with Doubles() if inside else contextlib.nullcontext():
            return torch.relu(x) + 1

    return calls(function, *[lambda i=i: (normal(3), i) for i in (False, False, True, False, True)])


def _versions() -> World:
    kept = torch.zeros(3)

    def function(x: Any) -> Any:
        kept.add_(1)
        kept.mul_(2)
        y = x * 2
        y[0] = 1
        return y, kept._version, y._version, x._version

    return calls(function, *[normals(3)] * 5, observe=lambda: (kept.clone(), kept._version))


def _written_leaf() -> World:
    def function(x: Any) -> Any:
        try:
            x.add_(1)
        except RuntimeError as error:
            return x * 2, str(error)[:30]
        return x * 3

    return calls(function, *_mixed())


def _sizes_0_and_1(x: Any) -> Any:
    return (x * 2).sum(0), x.reshape(-1) + 1, torch.cat([x, x]), x.T @ x


def _dtypes(x: Any) -> Any:
    return x * 2, x.sum(), x / 2, x.to(torch.float32) + 1, torch.result_type(x, 1.0)


_kinds = (torch.float32, torch.float64, torch.int64, torch.float16, torch.bool, torch.float32, torch.int32)

programs(
    mode_no_grad_nested=lambda: calls(_no_grad_nested, *_mixed()),
    mode_decorated=lambda: calls(_decorated, *_mixed()),
    mode_inference=lambda: calls(_inference, *_mixed()),
    mode_gradient=lambda: calls(_gradient, *_mixed()),
    mode_backward=lambda: calls(_backward, *_mixed()),
    mode_penalty=_penalty,
    mode_trained=_trained,
    mode_average=_average,
    mode_leaves_gradients_off=lambda: _restored(_leaves_gradients_off),
    mode_autocast=lambda: calls(_autocast, *_mixed()),
    mode_autocast_outside=_autocast_outside,
    mode_default_dtype=lambda: steps(
        lambda x: (x * 2, torch.ones(2) * 0.5, torch.tensor(1.5)),
        *(None, None, _default_dtype(torch.float64), None, _default_dtype(torch.float32), None),
        *(_default_dtype(torch.float16), _default_dtype(torch.float32)),
    ),
    mode_dtype_inside=lambda: calls(_dtype_inside, *[normals()] * 4),
    mode_device_context=lambda: calls(_device_context, *[normals()] * 4),
    mode_default_device=_default_device,
    mode_flags=_flags,
    mode_printing=_printing,
    mode_inference_outside=_inference_outside,
    mode_requires_grad_inside=lambda: calls(_requires_grad_inside, *_mixed()),
    mode_argument_asked=_argument_asked,
    mode_custom_function=_custom_function,
    mode_checkpointed=lambda: calls(_checkpointed, *_mixed()),
    mode_transforms=lambda: calls(_transforms, *[normals()] * 4),
    mode_jacobian=lambda: calls(_jacobian, *[normals()] * 4),
    mode_detached=lambda: calls(_detached, *_mixed()),
    mode_saved_hooks=lambda: calls(_saved_hooks, *[normals()] * 4),
    mode_module_modes=_module_modes,
    mode_mode_stack=_mode_stack,
    mode_versions=_versions,
    mode_written_leaf=_written_leaf,
    mode_sizes=lambda: calls(_sizes_0_and_1, *[normals(n, 2) for n in (3, 3, 4, 5, 1, 0, 6, 1, 0)]),
    mode_dtypes=lambda: calls(_dtypes, *[lambda k=k: (normal(3).to(k),) for k in _kinds]),
)
