"""Strides, offsets and versions of results: what they are without capture, whatever lies how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from capture_world import World, calls, normal, programs
from torch import nn

SHAPE = (2, 4, 4, 3)


def _plain() -> Any:
    return (normal(*SHAPE),)


def _channels_last() -> Any:
    return (normal(*SHAPE).to(memory_format=torch.channels_last),)


def _transposed() -> Any:
    return (normal(2, 4, 3, 4).transpose(2, 3),)


def _reversed() -> Any:
    return (normal(3, 4, 4, 2).permute(3, 2, 1, 0),)


def _strided() -> Any:
    return (normal(2, 4, 8, 3)[:, :, ::2],)


def _expanded() -> Any:
    return (normal(2, 1, 4, 3).expand(SHAPE),)


def _offset() -> Any:
    return (normal(3, 4, 4, 3)[1:],)


LAYOUTS = (_plain, _transposed, _transposed, _channels_last, _channels_last, _reversed, _strided, _expanded)
LATER = (_reversed, _reversed, _plain, _plain, _offset, _expanded, _strided, _channels_last, _transposed)


def _attempted(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def tried(x: Any) -> Any:
        try:
            return make(x)
        except RuntimeError as error:
            return x.exp(), str(error)[:20]

    return tried


def _written_then_reshaped(x: Any) -> Any:
    y = x * 2
    flat = y.reshape(-1)
    flat.add_(1)
    return y, flat


def _versions(x: Any) -> Any:
    y = x * 2
    y.add_(1).mul_(3)
    return y, y.view_as(y)


_conv = nn.Conv2d(4, 5, 3, padding=1).requires_grad_(False).eval()
_norm = nn.BatchNorm2d(4).requires_grad_(False).eval()

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "product": lambda x: x * 2,
    "chain": lambda x: torch.relu(x).exp() + x,
    "sum_with_other": lambda x: x + torch.ones(SHAPE),
    "sum_with_vector": lambda x: x * torch.arange(3.0) + 1,
    "as_strided": lambda x: torch.as_strided(x * 2, (12,), (1,)),
    "as_strided_method": lambda x: (x + 1).as_strided((4, 3), (3, 1), 2) * 2,
    "as_strided_late": lambda x: torch.relu(x.exp() + 1).neg().as_strided((7,), (2,)).sum(),
    "view": _attempted(lambda x: (x * 2).view(-1)),
    "view_of_argument": _attempted(lambda x: x.view(2, -1)),
    "reshape_written": _written_then_reshaped,
    "versions": _versions,
    "contiguous": lambda x: (x.contiguous(), (x * 3).contiguous()),
    "clone": lambda x: (x.clone(), x.clone(memory_format=torch.contiguous_format)),
    "likes": lambda x: (torch.zeros_like(x), torch.ones_like(x) * x, torch.full_like(x, 2.0)),
    "random_like": lambda x: (torch.rand_like(x), torch.randn_like(x * 2) * x),
    "dropout": lambda x: functional.dropout(x * 2, 0.5),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) * x,
    "filled_randomly": lambda x: torch.empty_like(x * 2).uniform_() + x,
    "new_random": lambda x: (x * 2).normal_(),
    "types": lambda x: (x.to(torch.float64), x.half(), (x > 0), x.long()),
    "where": lambda x: torch.where(x > 0, x, -x),
    "softmax": lambda x: torch.softmax(x, 1),
    "sums": lambda x: (x.sum(1), x.mean(-1), x.amax((1, 2)), x.sum(1, keepdim=True)),
    "matmul": lambda x: (x @ x.transpose(-1, -2), x.flatten(0, 1).sum(0)),
    "layer_norm": lambda x: functional.layer_norm(x, (3,)) * 2,
    "convolution": lambda x: torch.relu(_conv(x)),
    "normalised": lambda x: torch.relu(_norm(x)),
    "pooled": lambda x: functional.max_pool2d(torch.relu(x), 2) + 1,
    "cat": lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, x + 1], 1)),
    "permuted": lambda x: ((x * 2).permute(0, 2, 3, 1), (x + 1).transpose(1, 2).exp()),
    "sliced": lambda x: ((x * 2)[:, 1:3], (x * 2)[:, :, ::2], (x - 1)[..., 0]),
    "accumulated": lambda x: (x.cumsum(1), x.flip(2), x.roll(1, 1)),
    "sorted": lambda x: (x.sort(1).values, x.topk(2, 1).values),
    "gathered": lambda x: (x.index_select(1, torch.tensor([2, 0])), x[:, [0, 2]]),
    "interpolated": lambda x: functional.interpolate(x, scale_factor=2) * 2,
    "padded": lambda x: functional.pad(x, (1, 1)) + 1,
    "written": lambda x: torch.empty(SHAPE).copy_(x).add_(1),
    "asked": lambda x: (x * 2 if (x * 2).is_contiguous() else x.exp(), (x * 2).stride()),
    "complexes": lambda x: torch.view_as_real(torch.complex(x, x * 2)),
    "unfolded": lambda x: (x * 2).unfold(1, 2, 1),
    "expanded": lambda x: ((x * 2)[:, :1].expand(SHAPE), x.exp().sum(1, keepdim=True).expand(SHAPE)),
    "storage": lambda x: (x.exp() * 2).untyped_storage().nbytes(),
    "diagonal": lambda x: ((x + 1).diagonal(0, 1, 2), (x + 1).movedim(1, 3)),
}


def _resized(x: Any, y: Any) -> Any:
    z = x * 2
    x.resize_(2)
    return z, x + 1, y.sum()


def _sum_resizes(x: Any, y: Any) -> Any:
    torch.sum(y, 0, out=x)
    return y * 2, x + 1


def _extremes_resize(x: Any, y: Any) -> Any:
    torch.max(y, 0, out=(x, torch.empty(0, dtype=torch.int64)))
    return x * 2


def _seen_otherwise(x: Any, y: Any) -> Any:
    z = x + y
    x.as_strided_((2,), (1,))
    return z.mul_(2), x


def _turned(x: Any, y: Any) -> Any:
    x.mul_(2).transpose_(0, 1).add_(1)
    return x @ y


def _two_of_one(x: Any, y: Any) -> Any:
    part = x[1:]
    part.resize_(1)
    return x * 2, part + y.sum()


def _expanded_written(x: Any, y: Any) -> Any:
    x.expand(2, *x.shape).fill_(7)
    y.expand_as(y).add_(1e-9)
    y[:, :1].expand_as(y).split(1)[0].zero_()
    return x + y


def _unfolded_written(x: Any, y: Any) -> Any:
    x.unfold(1, 2, 2).mul_(2)
    y.unfold(0, 2, 3)[..., 0].fill_(7)
    return x * 2, y + 1


def _conjugated(x: Any) -> Any:
    y = torch.complex(x, x + 1).conj()
    y.add_(1j)
    z = torch.complex(x[..., :2], x[..., 1:3]).adjoint()
    return y, y.is_conj(), z, (z.sum() * y).conj(), torch.complex(x, x + 2).conj().imag


MOVED = (_resized, _sum_resizes, _extremes_resize, _seen_otherwise, _turned, _two_of_one)
"""Programs that give a tensor from outside another shape or other strides."""


def _world(function: Callable[[Any], Any], makers: Any) -> World:
    return calls(function, *makers)


for _name, _function in FUNCTIONS.items():
    programs(
        **{
            f"layout_{_name}": lambda function=_function: _world(function, LAYOUTS),  # type: ignore[misc]
        }
    )
WRITTEN_THROUGH = (_expanded_written, _unfolded_written)
"""Programs that write through views of which an element lies in several places, or not every one in any."""


for _function in (*MOVED, *WRITTEN_THROUGH):
    programs(
        **{
            f"layout_moved{_function.__name__}": lambda function=_function: calls(
                function, *[lambda n=n: (normal(n, 3), normal(n, 3, seed=1)) for n in (3, 3, 4, 5, 3)]
            )
        }
    )
programs(
    layout_product_later=lambda: _world(FUNCTIONS["product"], LATER),
    layout_chain_later=lambda: _world(FUNCTIONS["chain"], LATER),
    layout_as_strided_later=lambda: _world(FUNCTIONS["as_strided"], LATER),
    layout_written_later=lambda: _world(_written_then_reshaped, LATER),
    layout_conjugated=lambda: calls(
        _conjugated, *[lambda n=n: (normal(n, 4),) for n in (2, 2, 3, 4, 5, 6, 2)]
    ),
    layout_open=lambda: calls(
        lambda x: (x.t() * 2, x * 3), *[lambda n=n: (normal(n, 4),) for n in (2, 3, 4, 5, 6, 7)]
    ),
    layout_open_transposed=lambda: calls(
        lambda x: x * 3, *[lambda n=n: (normal(4, n).t(),) for n in (2, 3, 4, 5, 6, 7)]
    ),
    layout_open_parts=lambda: calls(
        lambda x: ((x * 2)[1:], (x.t() + 1)[:, ::2], x.exp()[:1].expand(x.shape[0], 4), (x * 3)[:, 1]),
        *[lambda n=n: (normal(n, 4),) for n in (2, 3, 4, 5, 6, 7, 3)],
    ),
    layout_open_as_strided=lambda: calls(
        lambda x: torch.as_strided(x.t() * 2, (6,), (1,)),
        *[lambda n=n: (normal(4, n),) for n in (2, 3, 4, 5, 6, 7)],
    ),
)
