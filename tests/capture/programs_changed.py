"""Containers and dictionaries of objects that are read whole after the program has changed a part of them."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, deque

import torch
from capture_world import World, calls, normal, programs_of
from torch import nn


class Box:
    """An object with whatever attributes it is given."""

    def __init__(self, **given):
        self.__dict__.update(given)


class Labels(list):
    """A list with an attribute."""

    note = ""


def _attributes_listed():
    def fn(x, box):
        box.scale = 3
        return {name: x * value for name, value in vars(box).items()}

    return calls(
        fn,
        lambda: (normal(3), Box(scale=2)),
        lambda: (normal(3), Box(bias=2)),
        lambda: (normal(3), Box(bias=4, scale=1)),
        lambda: (normal(3), Box(scale=1, bias=4)),
    )


def _attributes_listed_of_one_object():
    box = Box(bias=1)

    def fn(x):
        box.count = box.bias + 1
        return [x * value for value in list(box.__dict__.values())], len(vars(box))

    def unset():
        del box.count

    steps = [(None, lambda: (normal(3),)), (unset, lambda: (normal(3),)), (None, lambda: (normal(3),))]
    change = lambda: setattr(box, "bias", 5)
    return World(fn, [*steps, (change, lambda: (normal(3),))], observe=lambda: dict(vars(box)))


def _attribute_removed_then_listed():
    def fn(x, box):
        del box.scale
        names = sorted(vars(box)) if vars(box) else ["none"]
        return x + len(names), names

    return calls(
        fn,
        lambda: (normal(3), Box(scale=2)),
        lambda: (normal(3), Box(scale=2, bias=1)),
        lambda: (normal(3), Box(scale=3)),
    )


def _copied_after_change():
    def fn(x, box):
        box.history.append(x)
        box.step = len(box.history)
        other = Box()
        other.__dict__.update(box.__dict__)
        other.step += 1
        return other, torch.stack(other.history).sum()

    return calls(
        fn,
        lambda: (normal(3), Box(history=[], name="a")),
        lambda: (normal(3), Box(history=[normal(3, seed=1)], name="a")),
        lambda: (normal(3), Box(name="b", history=[])),
    )


def _module_attributes_listed():
    model = nn.Linear(3, 3)

    def fn(x):
        model.seen = getattr(model, "seen", 0) + 1
        plain = {name: value for name, value in vars(model).items() if isinstance(value, int)}
        return model(x) * plain["seen"], sorted(plain)

    return calls(fn, *[lambda: (normal(2, 3),)] * 4, observe=lambda: model.seen)


def _large_dictionary_listed():
    def fn(x, table):
        table["new"] = x * 2
        return sum(value for value in table.values()), list(table), [*table.items()][-1][1]

    def table(first, size):
        return {f"k{i}": i + first for i in range(size)}

    return calls(
        fn,
        lambda: (normal(3), table(0, 80)),
        lambda: (normal(3), table(1, 80)),
        lambda: (normal(3), table(1, 81)),
        lambda: (normal(3), {**table(1, 81), "new": 7}),
    )


def _large_dictionary_with_default_listed():
    def fn(x, table):
        table["a"].append(x)
        return {key: len(value) for key, value in table.items()}

    def table(size):
        return defaultdict(list, {f"k{i}": [] for i in range(size)})

    return calls(fn, lambda: (normal(3), table(70)), lambda: (normal(3), table(71)))


def _values_that_change_listed():
    table = {"a": 1, "b": 2}

    def fn(x):
        table["a"] = table["a"] + 1
        return x * sum(table.values()), dict(table)

    return calls(fn, *[lambda: (normal(3),)] * 6, observe=lambda: dict(table))


def _grown_list_read():
    history = []

    def fn(x):
        history.append(x.sum())
        return torch.stack(history) if history else x

    return calls(fn, *[lambda: (normal(3),)] * 6, observe=lambda: [item.item() for item in history])


def _grown_list_read_through_other_names():
    def fn(x, items):
        same = items
        items.append(x + 1)
        same.append(x + 2)
        first, *rest = same
        return first + len(rest), [*reversed(items)], items[1:]

    return calls(
        fn,
        lambda: (normal(3), []),
        lambda: (normal(3), [normal(3, seed=1)]),
        lambda: (normal(3), [normal(3, seed=1), normal(3, seed=2)]),
    )


def _deque_grown_at_both_ends_read():
    queue = deque([1, 2], maxlen=5)

    def fn(x):
        queue.appendleft(len(queue))
        queue.append(7)
        return x * sum(queue), list(queue), queue.maxlen

    return calls(fn, *[lambda: (normal(3),)] * 6, observe=lambda: list(queue))


def _ordered_dictionary_read():
    def fn(x, table):
        table["b"] = x
        table.move_to_end("a")
        table["c"] = x + 1
        return list(table.items()), list(reversed(table))

    return calls(
        fn,
        lambda: (normal(3), OrderedDict(a=1, b=2)),
        lambda: (normal(3), OrderedDict(a=1)),
        lambda: (normal(3), OrderedDict(b=3, a=1)),
    )


def _counter_read():
    def fn(x, counts):
        counts["a"] += 2
        counts.update("b")
        return x * sum(counts.values()), counts.most_common(), +counts

    return calls(
        fn,
        lambda: (normal(3), Counter("abc")),
        lambda: (normal(3), Counter("aabc")),
        lambda: (normal(3), Counter()),
    )


def _set_grown_read():
    def fn(x, tags):
        tags.add("z")
        tags.discard("a")
        return x * len(tags), sorted(tags), "b" in tags

    return calls(
        fn, lambda: (normal(3), {"a"}), lambda: (normal(3), {"b"}), lambda: (normal(3), {"a", "b", "z"})
    )


def _subclass_with_attribute_read():
    def fn(x, labels):
        labels.note = "read"
        return x + sum(labels), labels.note, [*labels]

    return calls(
        fn,
        lambda: (normal(3), Labels([1, 2])),
        lambda: (normal(3), Labels([1, 3])),
        lambda: (normal(3), Labels([1])),
    )


def _wrapped_dictionary_read():
    def fn(x, table):
        table["b"] = 3
        table.mark = True
        return {key: x * value for key, value in table.items()}, len(table.data)

    return calls(
        fn,
        lambda: (normal(3), UserDict(a=1)),
        lambda: (normal(3), UserDict(a=2)),
        lambda: (normal(3), UserDict()),
    )


def _nested_changed_and_compared():
    def fn(x, state):
        state["inner"]["n"] = 4
        state["list"][0] = 9
        same = state == {"inner": {"n": 4, "m": 1}, "list": [9, 2]}
        return x * 2 if same else x * 3

    return calls(
        fn,
        lambda: (normal(3), {"inner": {"n": 0, "m": 1}, "list": [1, 2]}),
        lambda: (normal(3), {"inner": {"n": 5, "m": 1}, "list": [7, 2]}),
        lambda: (normal(3), {"inner": {"m": 1}, "list": [7, 2]}),
        lambda: (normal(3), {"inner": {"n": 5, "m": 2}, "list": [7, 2]}),
    )


programs_of(globals(), "changed")
