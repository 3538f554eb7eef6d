"""Arguments, parameters, buffers and globals that share memory in some calls and in others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from capture_world import World, calls, normal, programs
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


def _base(count: int = 12) -> torch.Tensor:
    return torch.arange(float(count)) + 1


def _apart() -> Pair:
    return _base(6), _base(6) * 2


def _same() -> Pair:
    base = _base(6)
    return base, base


def _viewed() -> Pair:
    base = _base(6)
    return base, base.view(6)


def _overlapping() -> Pair:
    base = _base()
    return base[:6], base[2:8]


def _neighbours() -> Pair:
    base = _base()
    return base[:6], base[6:]


def _interleaved() -> Pair:
    base = _base()
    return base[::2], base[1::2]


def _numpy() -> Pair:
    array = np.arange(12, dtype=np.float32)
    return torch.from_numpy(array[:6]), torch.from_numpy(array[3:9])


def _detached() -> Pair:
    base = _base(6)
    return base, base.detach()


def _data() -> Pair:
    base = _base(6)
    return base.data, base


def _reversed() -> Pair:
    first, second = _overlapping()
    return second, first


PAIRS: tuple[Callable[[], Pair], ...] = (
    *(_apart, _apart, _apart, _same, _viewed, _overlapping, _neighbours, _numpy, _detached),
)
OTHERS: tuple[Callable[[], Pair], ...] = (
    *(_same, _interleaved, _reversed, _apart, _data, _apart, _numpy, _overlapping, _viewed),
)


def _add_first(x: Any, y: Any) -> Any:
    x.add_(1)
    return y * 2


def _both_added(x: Any, y: Any) -> Any:
    x.mul_(2)
    return x + y


def _second_into_first(x: Any, y: Any) -> Any:
    x.copy_(y * 3)
    return x - y


def _both_written(x: Any, y: Any) -> Any:
    x.add_(1)
    y.mul_(3)
    return x, y, x * y


def _item_set(x: Any, y: Any) -> Any:
    x[0] = y[1] * 5
    return x * y


def _halves_exchanged(x: Any, y: Any) -> Any:
    x[:3], y[3:] = y[3:].clone(), x[:3].clone()
    return x + y


def _read_before_and_after(x: Any, y: Any) -> Any:
    before = y + 1
    x.add_(1)
    return before, y + 1


def _through_a_view(x: Any, y: Any) -> Any:
    view = x[1:]
    view.mul_(10)
    return (y * 2).sum(), view


def _out_argument(x: Any, y: Any) -> Any:
    torch.mul(x, 3.0, out=x)
    return torch.relu(y - 2)


def _views_returned(x: Any, y: Any) -> Any:
    y.sub_(1)
    return x[1:3], y[2:], x + 0


def _masked(x: Any, y: Any) -> Any:
    x.masked_fill_(y > 3, 0.0)
    return torch.exp(-y)


def _kept_view_read_late(x: Any, y: Any) -> Any:
    view = y[2:4]
    x.add_(100)
    return view * 1, y.sum()


def _exchanged(x: Any, y: Any) -> Any:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return x - y


def _kept_as_it_was(x: Any, y: Any) -> Any:
    before, also = x + 0, y.reshape(2, 3).clone()
    x.add_(y)
    y.zero_()
    return before, also


WRITERS = (
    *(_exchanged, _kept_as_it_was),
    *(_add_first, _both_added, _second_into_first, _both_written, _item_set, _halves_exchanged),
    *(_read_before_and_after, _through_a_view, _out_argument, _views_returned, _masked, _kept_view_read_late),
)
for _writer in WRITERS:
    for _label, _pairs in (("first_apart", PAIRS), ("first_shared", OTHERS)):
        programs(
            **{
                f"sharing{_writer.__name__}_{_label}": (
                    lambda writer=_writer, pairs=_pairs: calls(writer, *pairs)  # type: ignore[misc]
                )
            }
        )


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", _base(6))
        self.weight = nn.Parameter(_base(6) / 4, requires_grad=False)

    def forward(self, x: Any) -> Any:
        self.state.add_(1)
        return x * self.weight


class _WritesArgument(_Buffered):
    def forward(self, x: Any) -> Any:
        x.mul_(2)
        return self.state + self.weight


def _with_module(kind: type[_Buffered]) -> World:
    module = kind()
    fresh: Any = lambda: (_base(6),)  # noqa: E731
    return calls(
        module,
        *(fresh, fresh, fresh, lambda: (module.state,), lambda: (module.weight[:],), fresh),
        *(lambda: (module.state.view(2, 3).view(6),), lambda: (module.weight,), lambda: (module.state[:6],)),
        observe=lambda: (module.state.clone(), module.weight.clone()),
    )


def _fed_back() -> World:
    last = [_base(4)]

    def step(x: Any) -> Any:
        y = x * 2
        x.add_(1)
        last[0] = y
        return y, x

    return calls(step, *[lambda: (last[0],)] * 6, observe=lambda: last[0].clone())


def _lists_of_tensors() -> World:
    def scaled(items: Any) -> Any:
        for at, item in enumerate(items):
            item.mul_(at + 2)
        return torch.stack(list(items)).sum(0)

    def overlapping() -> Any:
        base = _base()
        return ([base[:4], base[2:6], base[4:8]],)

    def twice() -> Any:
        one, other = _base(4), _base(4)
        return ([one, other, one],)

    def apart() -> Any:
        return ([_base(4), _base(4) * 2, _base(4) * 3],)

    return calls(scaled, apart, apart, apart, twice, overlapping, apart, overlapping, twice)


def _dictionaries_of_tensors() -> World:
    def updated(state: Any) -> Any:
        state["k"][1:3] = state["q"][:2] * 2
        return state["q"] + state["k"]

    def apart() -> Any:
        return ({"q": _base(4), "k": _base(4) * 3},)

    def shared() -> Any:
        base = _base(6)
        return ({"q": base[:4], "k": base[2:]},)

    return calls(updated, apart, apart, apart, shared, shared, apart, shared)


def _keyword_default_shared() -> World:
    kept = _base(4)

    def added(x: Any, y: Any = kept) -> Any:
        x.add_(1)
        return y * 2

    return calls(
        added,
        *[lambda: (_base(4),)] * 3,
        *(lambda: (kept,), lambda: (kept[:],), lambda: (_base(4), kept), lambda: (kept, kept)),
        observe=kept.clone,
    )


def _closure_shared() -> World:
    kept = _base(8)

    def read(x: Any) -> Any:
        x.mul_(2)
        return kept + 1

    return calls(
        read,
        *[lambda: (_base(4),)] * 3,
        *(lambda: (kept[:4],), lambda: (kept[2:6],), lambda: (_base(4),), lambda: (kept[4:],)),
    )


def _closure_written() -> World:
    kept = _base(8)

    def write(x: Any) -> Any:
        kept.add_(1)
        return x * 3

    return calls(
        write,
        *[lambda: (_base(4),)] * 3,
        *(lambda: (kept[:4],), lambda: (kept[3:7],), lambda: (_base(4),), lambda: (kept.view(2, 4)[1],)),
        observe=kept.clone,
    )


def _three_arguments() -> World:
    def mixed(x: Any, y: Any, z: Any) -> Any:
        y.add_(x)
        return x * 2, z * 2

    def some(a: int, b: int, c: int) -> Any:
        def make() -> Any:
            bases = [_base(8), _base(8) * 10, _base(8) * 100]
            return tuple(bases[which][at : at + 4] for at, which in enumerate((a, b, c)))

        return make

    return calls(
        mixed, some(0, 1, 2), some(0, 1, 2), some(0, 1, 2), some(0, 1, 0), some(0, 1, 1), some(1, 1, 1)
    )


def _other_types_share() -> World:
    def bits(x: Any, y: Any) -> Any:
        x.mul_(2)
        return y + 1

    def apart() -> Any:
        return _base(4), _base(4).view(torch.int32)

    def shared() -> Any:
        base = _base(4)
        return base, base.view(torch.int32)

    return calls(bits, apart, apart, apart, shared, apart, shared, shared)


def _cache_rows() -> World:
    cache = torch.zeros(4, 3)

    def put(x: Any, at: int) -> Any:
        cache[at] = x * 2
        return cache.sum(0) + x

    return calls(
        put,
        *[lambda at=at: (torch.ones(3), at) for at in range(3)],
        *(lambda: (cache[0], 3), lambda: (cache[3], 0), lambda: (torch.ones(3), 1), lambda: (cache[1], 1)),
        observe=cache.clone,
    )


def _results_of_results() -> World:
    seen: list[torch.Tensor] = []

    def grown(x: Any) -> Any:
        seen.append(x[1:])
        x.add_(1)
        return seen[-1] * 2

    def again() -> Any:
        return (seen[-1],) if seen and seen[-1].numel() > 2 else (_base(8),)

    return calls(grown, *[again] * 7, observe=lambda: [item.clone() for item in seen])


def _expanded_arguments() -> World:
    def read(x: Any, y: Any) -> Any:
        y.add_(1)
        return x * 2

    def apart() -> Any:
        return torch.ones(1).expand(4), _base(4)

    def shared() -> Any:
        base = _base(4)
        return base[:1].expand(4), base

    return calls(read, apart, apart, apart, shared, shared, apart)


def _flattened_parameters() -> World:
    flat = _base(12)
    module = nn.Linear(2, 2).requires_grad_(False)
    module.weight.data = flat[:4].view(2, 2)
    module.bias.data = flat[4:6]

    def trained(x: Any) -> Any:
        y = module(x)
        module.bias.sub_(y.mean(0))
        return module(x)

    return calls(
        trained,
        *[lambda: (normal(3, 2),)] * 3,
        *(lambda: (flat[4:6].view(1, 2),), lambda: (flat[:4].view(2, 2),), lambda: (normal(3, 2),)),
        observe=flat.clone,
    )


programs(
    sharing_buffer_written=lambda: _with_module(_Buffered),
    sharing_argument_written=lambda: _with_module(_WritesArgument),
    sharing_fed_back=_fed_back,
    sharing_lists=_lists_of_tensors,
    sharing_dictionaries=_dictionaries_of_tensors,
    sharing_default=_keyword_default_shared,
    sharing_closure_read=_closure_shared,
    sharing_closure_written=_closure_written,
    sharing_three=_three_arguments,
    sharing_other_types=_other_types_share,
    sharing_cache_rows=_cache_rows,
    sharing_results=_results_of_results,
    sharing_expanded=_expanded_arguments,
    sharing_flat_parameters=_flattened_parameters,
)
