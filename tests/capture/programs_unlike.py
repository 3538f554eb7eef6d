"""What classes say of themselves that natives never ask, and where each thread, or each call, has its own."""

import collections.abc
import contextlib
import functools
import threading
import typing

import torch
from capture_world import calls, programs, steps
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

X = torch.arange(12.0).reshape(3, 4)


def called(*rows):
    """Register a program of one call with each of `rows`, of which tensors are copied."""

    def copied(row):
        return tuple(item.clone() if isinstance(item, torch.Tensor) else item for item in row)

    def register(function):
        makers = [functools.partial(copied, row) for row in rows]
        programs(**{function.__name__: lambda: calls(function, *makers)})
        return function

    return register


class Irrep(tuple):
    """A tuple that has no length to tell."""

    def __new__(cls, *items):
        return super().__new__(cls, items)

    def __len__(self):
        raise NotImplementedError

    @property
    def parity(self):
        return self[1]


KINDS = [Irrep(2, -1), Irrep(2, 1), Irrep(3, 1)]


@called((X, 0), (X, 1), (X, 2))
def unlike_tuple_without_length(x, number):
    kind, own = KINDS[number], Irrep(x, 2)
    known = [kind == KINDS[1], kind in KINDS, (kind, 2)[0] is kind, {kind: 3}[kind]]
    return x * kind.parity + kind[0] + kind[-1], own[0] * own.parity, known


class Reversed(tuple):
    """A tuple that gives its items from behind, and counts how often it is asked."""

    def __iter__(self):
        self.asked += 1
        return reversed((*tuple.__iter__(self), self.asked))


@called((X, 0), (X, 2))
def unlike_unpacked_tuples(x, number):
    number, (first, *others) = Irrep(number, Irrep(x, 1, 2))
    turned = Reversed((1, 2))
    turned.asked = 0
    last, two, one = turned
    return first * number, others, last, two, one, [*turned], turned.asked


class Settings(threading.local):
    scale = 2

    def __init__(self):
        self.calls = 0


def unlike_thread_local():
    settings, others = Settings(), Settings()

    def function(x):
        settings.calls += 1
        seen = settings.__dict__.get("calls"), vars(others)["calls"], getattr(settings, "no", 3)
        return x * settings.scale + settings.calls + others.calls, seen

    def elsewhere():
        others.calls = 7

    def in_a_thread():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    return steps(function, None, None, in_a_thread, elsewhere, None, observe=lambda: settings.calls)


programs(unlike_thread_local=unlike_thread_local)


@called((X, 1), (X, 1), (X, 2))
def unlike_named_items(x, k):
    made = dict(beta=x, inner=dict(k=k))
    return made, collections.OrderedDict(a=made["beta"] + 1, b=k)


@called((X,), (X,))
def unlike_generic_types(x):
    def inner(
        a: list[int], b: "int | None" = None, *, c: collections.abc.Callable[[int], int] | None = None
    ) -> dict[str, int]:
        return a * 2

    return inner(x), typing.cast(list[torch.Tensor], x), len(inner.__annotations__)


@called((X,), (X + 1,))
def unlike_trees(x):
    leaves, spec = tree_flatten({"a": x, "b": [x + 1, (x, 3)]})
    return tree_unflatten([leaf * 2 for leaf in leaves], spec), tree_map_only(
        torch.Tensor, torch.neg, [x, "s"]
    )


class Choices(collections.abc.Mapping):
    """A class of its own of an abstract one."""

    def __init__(self, **choices):
        self.choices = choices

    def __getitem__(self, key):
        return self.choices[key]

    def __iter__(self):
        return iter(self.choices)

    def __len__(self):
        return len(self.choices)


@called((X, Choices(a=2)), (X, {"a": 2}), (X, 2))
def unlike_abstract(x, given):
    return x * 2 if isinstance(given, Choices) else x + 1


@called((X,), (X[:2],), (X.reshape(4, 3),), (X[:, :3],))
def unlike_operators_that_raise(x):
    out = []
    for size in (5, 12, 6):
        try:
            out.append(x.view(size))
        except RuntimeError as error:
            out.append(type(error).__name__)
    with contextlib.suppress(RuntimeError, ValueError):
        x = x.reshape(7)
    try:
        return out, x @ x
    except RuntimeError:
        return out, x @ x.T


@called((X,), (X[:2],))
def unlike_index_that_raises(x):
    try:
        return x[2]
    except IndexError:
        return x[0] * 2


@called((X, torch.tensor([1, 0])), (X, torch.tensor([1, 9])), (X, torch.tensor([0, 2])))
def unlike_values_that_raise(x, rows):
    try:
        return x[rows]
    except IndexError:
        return x[0]


@torch.compiler.disable
def left_alone(x, by=2):
    return x * by


@functools.wraps(left_alone)
def around(x):
    return left_alone(x, 3) + 1


@called((X,), (X + 1,))
def unlike_disabled(x):
    return left_alone(x) + around(x)


@called((X,), (X + 0.6,), (X - 2,))
def unlike_numbers_of_tensors(x):
    return x * int(x.mean()), int((x > 1).any()), float(x.sum() > 3)


class Kind:
    """A class that calls only tell from others."""


LOOKS = {
    "instance": lambda x, given: isinstance(given, Kind),
    "several": lambda x, given: isinstance(given, (dict, torch.Tensor)),
    "type": lambda x, given: type(given) is Kind,
    "class": lambda x, given: given.__class__ is dict,
    "subclass": lambda x, given: issubclass(type(given), Kind),
    "callable": lambda x, given: callable(given),
    "attribute": lambda x, given: hasattr(given, "items"),
    "truth": lambda x, given: not isinstance(given, torch.Tensor) and bool(given),
    "none": lambda x, given: given is None,
    "not_none": lambda x, given: given is not None,
    "same": lambda x, given: given is x,
    "tensor": lambda x, given: torch.is_tensor(given),
    "among": lambda x, given: type(given) in {dict, torch.Tensor},
    "starred": lambda x, *given: type(given[0]) is list,
    "passed": lambda x, *given: isinstance(*given, Kind),
}


def unlike_kinds(look):
    """Return a world whose calls differ in what is only looked at."""

    def function(x, given):
        return x * 2 if look(x, given) else x + 1

    kinds = [Kind(), {}, {"a": 1}, [], [1], X[0], None, 3, torch.nn.ReLU()]
    pairs = [kind for first in kinds for kind in (first, kinds[0], first)]
    return lambda: calls(function, *(functools.partial(tuple, (X.clone() + 4, kind)) for kind in pairs))


programs(**{f"unlike_kinds_by_{name}": unlike_kinds(look) for name, look in LOOKS.items()})


EMPTY = ()
TUPLES = {
    "truth": lambda x, given: bool(given),
    "or": lambda x, given: (given or 5) == 5,
    "equal": lambda x, given: given == (1,),
    "nested": lambda x, given: (given, 2) == ((1,), 2),
    "among": lambda x, given: given in ((1,), ()),
    "in_set": lambda x, given: given in {(1,), (2,)},
    "key": lambda x, given: {(1,): True}.get(given, False),
    "hash": lambda x, given: hash((given,)) == hash(((1,),)),
    "empty": lambda x, given: given is EMPTY,
}


def unlike_tuples(look):
    """Return a world whose calls differ in a tuple of constants that is looked at as a whole."""

    def function(x, given, *rest):
        return x * 2 if look(x, given) or (rest and look(x, rest)) else x + 1

    rows = [(1,), (), (1,), (2,), (True,), (1.0,), ((),), (None,), (1, 1)]
    makers = [functools.partial(tuple, (X.clone() + 4, row)) for row in rows]
    makers += [functools.partial(tuple, (X.clone() + 4, 7, row)) for row in rows]
    return lambda: calls(function, *makers)


programs(**{f"unlike_tuples_by_{name}": unlike_tuples(look) for name, look in TUPLES.items()})


class Output(collections.OrderedDict):
    """As outputs of models: items by key or number, of its own saying."""

    def __getitem__(self, key):
        held = dict(self.items())
        return held[key] * 2 if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self):
        return tuple(self[key] for key in self.keys())


@called((X, 1), (X + 1, 1), (X, 2))
def unlike_unpacked_outputs(x, k):
    def taking(a, b=None, c=None):
        return a + b * c

    output = Output(a=x, b=x * k)
    return taking(**output, c=3), {**output, "d": output[0]}, dict(output.items())
