"""What lies under tensors: memory set, resized, shared; shapes changed in place, results put elsewhere."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from capture_world import World, calls, normal, normals, programs_of, steps
from torch import nn


def _set_to_another() -> World:
    def function(x: Any, y: Any, n: int) -> Any:
        before = x.view(-1)
        if n:
            x.set_(y)
        x.add_(1)
        return before * 2, x, y

    return calls(function, *[lambda n=n: (normal(2, 3), normal(2, 3, seed=1), n) for n in (0, 1, 0, 1, 1)])


def _data_assigned() -> World:
    weight = nn.Parameter(normal(3))

    def function(x: Any, n: int) -> Any:
        y = x * weight
        if n == 1:
            weight.data = x.detach().clone()
        elif n == 2:
            weight.data[0] = 7.0
        elif n == 3:
            x.data = x.data[:2] * 3
            return y.detach(), x
        return y.detach(), (x * weight).detach()

    return calls(
        function,
        *[lambda n=n: (normal(3, seed=n), n) for n in (0, 1, 0, 2, 3, 1, 0)],
        observe=lambda: (weight.detach().clone(), weight._version),
    )


def _resized() -> World:
    def function(x: Any, n: int) -> Any:
        y = x[:2]
        x.resize_(n, 2)
        x.fill_(n)
        return y + 1, x, x.untyped_storage().nbytes() // 4

    return calls(function, *[lambda n=n: (normal(3, 2), n) for n in (1, 2, 3, 2, 1)])


def _storage_written() -> World:
    def function(x: Any) -> Any:
        memory = x.untyped_storage()
        y = x * 2
        memory.fill_(0)
        z = x + y
        other = torch.empty(0).set_(memory, 1, (2,), (2,))
        other.add_(5)
        return y, z, x, other

    return calls(function, *[normals(4), normals(4), normals(6), normals(5), normals(4)])


def _buffer_of_bytes() -> World:
    memory = bytearray(16)
    array = np.zeros(4, np.float32)

    def function(x: Any, n: int) -> Any:
        seen, held = torch.frombuffer(memory, dtype=torch.float32), torch.from_numpy(array)
        y = x + seen + held
        seen.copy_(x)
        held.add_(n)
        array[0] += 1
        memory[3] ^= 0x40
        return y, held * 2, seen.clone()

    return calls(
        function,
        *[lambda n=n: (normal(4, seed=n), n) for n in (1, 2, 3, 4, 5)],
        observe=lambda: (bytes(memory), array.copy()),
    )


def _through_numpy() -> World:
    def function(x: Any) -> Any:
        array = x.numpy()
        y = x + 1
        array[0] *= 3
        np.add(array, 1, out=array)
        return y, x * 2, torch.from_numpy(array[::2]), array.sum().item()

    return calls(function, *[normals(4), normals(4), normals(6), normals(4)])


def _shapes_changed_in_place() -> World:
    def function(x: Any, n: int) -> Any:
        y = x.view(-1)
        if n == 0:
            x.t_().mul_(2)
        elif n == 1:
            x.unsqueeze_(0)
        elif n == 2:
            x.transpose_(0, 1).unsqueeze_(-1).squeeze_(-1)
        elif n == 3:
            x.as_strided_((3,), (2,), 1)
        else:
            x.squeeze_()
        return y.sum(), x.add_(1), x.shape, x.stride()

    return calls(function, *[lambda n=n: (normal(2, 3), n) for n in (4, 0, 1, 2, 3, 0, 4)])


def _held_shape_changed() -> World:
    held = [normal(2, 3)]

    def function(x: Any) -> Any:
        y = x @ held[0]
        held[0].t_()
        return y

    return calls(
        function, *[lambda n=n: (normal(2, n),) for n in (2, 3, 2, 3, 2)], observe=lambda: held[0].clone()
    )


def _written_into_expanded() -> World:
    def function(x: Any, n: int) -> Any:
        wide = x.expand(3, 4) if n < 3 else x.repeat(3, 1)
        x.add_(1)
        if n:
            wide.add_(2)
        return wide.sum(0), x

    return calls(function, *[lambda n=n: (normal(4), n) for n in (0, 1, 3, 0, 4, 1)])


def _overlapping_steps() -> World:
    def function(x: Any) -> Any:
        windows = x.as_strided((3, 3), (1, 1))
        sums = windows.sum(1)
        windows.as_strided((2, 2), (3, 1)).add_(10)
        return sums, windows, x

    return calls(function, *[normals(6), normals(6), normals(7), normals(6)])


def _written_out() -> World:
    held = torch.zeros(8)

    def function(x: Any, n: int) -> Any:
        places = (
            held[:4],
            held[::2],
            torch.empty(0),
            held[2:6].view(2, 2),
            torch.empty(4, dtype=torch.float64),
            x,
        )
        place = places[n % 6]
        result = torch.mul(x.view(place.shape) if n == 3 else x, 3.0, out=place)
        return result is place, place, torch.add(place, 1, alpha=2, out=torch.empty_like(place)), held + 0

    return calls(
        function, *[lambda n=n: (normal(4, seed=n), n) for n in (0, 1, 2, 3, 4, 5, 0)], observe=held.clone
    )


def _written_out_of_another_type() -> World:
    def function(x: Any, n: int) -> Any:
        place = torch.zeros(3, dtype=(torch.float64, torch.float16, torch.int32, torch.bool)[n])
        torch.add(x, 1, out=place)
        values, where = torch.max(x.view(1, 3), 1, out=(torch.empty(1), torch.empty(1, dtype=torch.long)))
        return place, values, where

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 2, 0, 3, 1)])


def _bits_written() -> World:
    def function(x: Any) -> Any:
        bits = x.view(torch.int32)
        y = x * 1
        bits.bitwise_and_(0x7FFFFFFF)
        halves = x.view(torch.float16)
        return y, x, bits >> 23, halves.shape, x.view(torch.uint8)[..., -1]

    return calls(function, *[normals(2, 3), normals(2, 3), normals(3, 3), normals(2, 2)])


def _complex_parts_written() -> World:
    def function(x: Any) -> Any:
        z = torch.complex(x, x + 1)
        z.real.mul_(2)
        torch.view_as_real(z)[..., 1].sub_(3)
        w = z.conj()
        z.imag.zero_()
        return z, w, w.is_conj(), w.imag, w.resolve_conj(), w.imag.is_neg()

    return calls(function, *[normals(3), normals(3), normals(4), normals(2)])


def _conjugated_arguments() -> World:
    def function(z: Any) -> Any:
        y = z * 2
        z.mul_(1j)
        return y, z, z.is_conj()

    def lazily() -> Any:
        return (torch.complex(normal(3), normal(3, seed=1)).conj(),)

    def plain() -> Any:
        return (torch.complex(normal(3), normal(3, seed=1)),)

    return calls(function, plain, lazily, plain, lazily, lazily)


def _gradients_asked_for() -> World:
    def function(x: Any, n: int) -> Any:
        if n == 1:
            x.requires_grad_()
        elif n == 2:
            x.requires_grad = True
        y = (x * 2).sum()
        known = x.requires_grad, y.requires_grad, x.is_leaf, y.grad_fn is None
        if y.requires_grad:
            y.backward()
            x.grad.add_(1)
            known += (x.grad,)
        if n == 3:
            x.requires_grad_(False)
        return known, y.detach_(), x.detach()

    def make(n: int, asked: bool) -> Any:
        return lambda: (normal(3).requires_grad_(asked), n)

    return calls(
        function, *[make(*p) for p in ((0, False), (1, False), (0, True), (2, False), (3, True), (0, False))]
    )


def _gradients_of_held_tensors() -> World:
    weight = nn.Parameter(normal(3))

    def function(x: Any, n: int) -> Any:
        weight.requires_grad_(n % 2 == 0)
        y = x * weight
        if y.requires_grad:
            y.sum().backward()
        if n == 3:
            weight.grad = None
        elif weight.grad is not None:
            weight.grad *= 2
        return y.detach(), y.requires_grad

    return calls(
        function,
        *[lambda n=n: (normal(3, seed=n), n) for n in (0, 1, 2, 3, 0, 1, 0)],
        observe=lambda: None if weight.grad is None else weight.grad.clone(),
    )


def _hooks_of_tensors() -> World:
    log: list[Any] = []

    def function(x: Any, n: int) -> Any:
        x = x.detach().requires_grad_()
        y = x * n
        handle = y.register_hook(lambda g: g * 2)
        if n % 2:
            handle.remove()
        y.retain_grad()
        x.register_hook(lambda g: log.append(float(g.sum())))
        y.sum().backward()
        return x.grad, y.grad

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 3, 2, 4)], observe=log.copy)


def _hooks_see_what_changed() -> World:
    class Held:
        factor, seen = 1.0, 0.0

    held = Held()

    def scaled(gradient: Any) -> Any:
        held.seen = float(gradient.sum())
        return gradient * held.factor

    def function(x: Any, n: int) -> Any:
        x = x.detach().requires_grad_()
        y = x * 2
        y.register_hook(scaled)
        held.factor = n + 1
        y.sum().backward()
        return x.grad, held.seen

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 1, 2, 3, 1)])


def _negated_where_read() -> World:
    def function(x: Any) -> Any:
        return torch.softmax(x * 2 + 1, -1), x.is_neg(), x.sum(0)

    def negated(rows: int) -> Any:
        return lambda: (torch._neg_view(normal(rows, 4)),)

    def part(rows: int) -> Any:
        return lambda: (torch.complex(normal(rows, 4), normal(rows, 4, seed=1)).conj().imag,)

    return calls(function, negated(3), normals(3, 4), negated(4), part(3), part(5), normals(5, 4), negated(5))


def _duplicates_written() -> World:
    def function(x: Any, at: Any) -> Any:
        x.index_put_((at,), torch.ones(len(at)), accumulate=True)
        y = x.scatter_add(0, at, torch.arange(float(len(at)))).index_add_(0, at, x[at])
        x[at > 1] = -1.0 if len(at) == len(x) else 0.0
        return y, x.masked_scatter_(x < 0, torch.arange(9.0)), x.put_(at, y[at])

    places = ([0, 0, 1, 2], [3, 3, 3, 3], [0, 1, 2, 3], [-1, 3, 0, -4], [1, 1, 0, 0])
    return calls(function, *[lambda p=p: (normal(4), torch.tensor(p)) for p in places])


def _rows_written_in_a_loop() -> World:
    def function(x: Any) -> Any:
        for i, row in enumerate(x):
            row.add_(i)
            row[i % 2] *= x[0, 0]
        for part in x.unbind(1):
            part -= part.mean()
        first, *others = x.split(1)
        first.copy_(sum(others) if others else first)
        return x

    return calls(function, *[normals(n, 3) for n in (3, 3, 2, 1, 4)])


def _tagged_tensors() -> World:
    held = normal(3, seed=4)

    def function(x: Any, n: int) -> Any:
        x.tag = getattr(x, "tag", 0) + n
        held.count = getattr(held, "count", 0) + 1
        y = x * x.tag + held * held.count
        y.tag = "result", x.tag
        return y, y.tag, hasattr(y + 0, "tag"), sorted(vars(x)), sorted(y.__dict__)

    shared = normal(3, seed=8)
    return calls(
        function,
        *(lambda n=n: (normal(3), n) for n in (1, 2)),
        *(lambda n=n: (shared, n) for n in (1, 2, 3)),
        observe=lambda: vars(held).get("count"),
    )


def _tensors_in_sets() -> World:
    seen: set[Any] = set()
    table: dict[Any, Any] = {}

    def function(x: Any, y: Any) -> Any:
        known = x in seen, y in table
        seen.add(x)
        seen.add(x)
        table[x] = table.get(x, 0) + 1
        inside = {x: 1.0, y: 2.0}
        z = x * inside[x] + y * inside[y]
        return z, known, len(seen), len(inside), table[x], len({x, y, x.view(-1), z})

    kept = normal(3, seed=3)
    pairs = (lambda: (normal(3), normal(3, seed=1)), lambda: (kept, kept), lambda: (kept, normal(3)))
    return calls(function, *pairs, *pairs, observe=lambda: (len(seen), [*table.values()]))


def _copies() -> World:
    layer = nn.Linear(3, 3)

    def function(x: Any) -> Any:
        x.tag = "kept"
        shallow, deep = copy.copy(x), copy.deepcopy(x)
        shallow.add_(1)
        deep.mul_(5)
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            twin.weight.zero_()
            both = copy.deepcopy([x, x.view(-1), {"x": x}])
            both[0].add_(1)
            return x, shallow, deep, deep.tag, twin(x), layer(x), both, both[2]["x"] is both[0]

    return steps(function, *(None, None, lambda: layer.weight.data.mul_(2), None))


def _state_of_a_module() -> World:
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def function(x: Any, n: int) -> Any:
        state = layer.state_dict()
        if n == 1:
            state["0.bias"].fill_(2.0)
        elif n == 2:
            layer.load_state_dict({k: torch.ones_like(v) for k, v in state.items()})
        elif n == 3:
            layer.train(not layer.training)
        elif n == 4:
            layer.apply(lambda m: m.bias.data.add_(1) if isinstance(m, nn.Linear) else None)
        return layer(x).detach(), [*state][-1]

    return calls(
        function,
        *[lambda n=n: (normal(4, 3, seed=n), n) for n in (0, 1, 2, 0, 3, 0, 4, 0)],
        observe=lambda: [v.clone() for v in layer.state_dict().values()],
    )


def _pooled() -> World:
    def turned() -> Any:
        return (normal(2, 6, 4).transpose(1, 2),)

    return calls(
        lambda x: (functional.max_pool1d(x, 3, 2, 1), functional.avg_pool1d(x, 2), x.cumsum(1)),
        *(normals(2, 4, 6), turned, turned, normals(2, 4, 6), turned),
    )


def _zero_strides_and_lengths() -> World:
    def function(x: Any) -> Any:
        y = x.flip(0)
        return (
            y,
            y.contiguous().data_ptr() == y.data_ptr(),
            x.add(1),
            x.sum(0),
            x.cumsum(0),
            x.new_empty(x.shape).shape,
        )

    def expanded() -> Any:
        return (normal(3).expand(4, 3),)

    return calls(
        function,
        *(normals(4, 3), expanded, lambda: (normal(3, 4).t(),), lambda: (normal(8, 3)[::2],)),
        *(lambda: (normal(0, 3),), lambda: (normal(4, 1, 3).transpose(0, 1)[0],), normals(4, 3)),
    )


def _copies_of_tensors_in_objects() -> World:
    def function(x: Any) -> Any:
        held = types.SimpleNamespace(
            rows=[x, x], count=torch.tensor(3), more=types.SimpleNamespace(table={"x": x})
        )
        twin = copy.deepcopy(held)
        twin.rows[0].add_(1)
        twin.count.add_(1)
        return twin.rows[1], twin.more.table["x"] is twin.rows[0], held.rows[0], twin.count, held.count

    return calls(function, *[lambda s=s: (normal(3, 2, seed=s),) for s in (0, 1, 2)])


def _copies_that_share_memory() -> World:
    def function(x: Any, y: Any) -> Any:
        first, second, third = copy.deepcopy((x, y, x[1:].t()))
        second.add_(1)
        third.mul_(2)
        return first, second, third, x, second.stride(), third.stride()

    def apart() -> Any:
        return normal(3, 4), normal(4)

    def within() -> Any:
        x = normal(3, 4)
        return x, x[0]

    return calls(function, apart, apart, within, within, apart)


def _copies_that_may_share_memory() -> World:
    def function(x: Any, y: Any) -> Any:
        first, second = copy.deepcopy([x, y])
        second.add_(1)
        return first, second

    def apart() -> Any:
        return normal(3, 4), normal(4)

    def within() -> Any:
        x = normal(3, 4)
        return x[1:, ::2], x[2]

    return calls(function, apart, apart, within, within, apart, within)


programs_of(globals(), "storage")
