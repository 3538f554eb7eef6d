"""What modules of public projects do, old ones among them."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections import OrderedDict

import numpy as np
import torch
import torch.utils.checkpoint
from capture_world import calls, normal, normals, program, programs, steps
from torch.autograd import Variable
from torch.nn.utils import parametrizations


@program
def variables_of_old():
    def fn(x):
        shared = Variable(x)
        shared.add_(1)
        volatile = Variable(x * 2, volatile=True)
        try:
            Variable(3)
        except TypeError as error:
            said = str(error)
        return x, shared, volatile, isinstance(x, Variable), Variable(), said

    return calls(fn, normals(3, 4), lambda: (normal(3, 4, seed=1),))


@program
def availability_and_versions():
    def fn(x):
        where = torch.device("cuda" if torch.cuda.is_available() and x.is_cuda else "cpu")
        new = torch.__version__ >= "1.6.0", torch.__version__ > (1, 2), torch.__version__ == "0.4"
        return x.to(where) + new[0], new, int(torch.__version__.split(".")[0])

    return calls(fn, normals(3, 4), lambda: (normal(3, 4, seed=1),))


@program
def names_that_modules_lack():
    plain, computing = types.ModuleType("plain"), types.ModuleType("computing")
    computing.__getattr__ = lambda name: {"scale": 3}[name] if name == "scale" else getattr(plain, name)

    def fn(x):
        try:
            x = x * plain.scale
        except AttributeError as error:
            x = x + len(error.name)
        return (
            x * computing.scale,
            getattr(plain, "bias", 7),
            hasattr(computing, "bias"),
            hasattr(torch, "no_such"),
        )

    def given():
        plain.scale, plain.bias = 2, 1

    return steps(
        fn, None, None, given, lambda: delattr(plain, "scale"), lambda: setattr(computing, "scale", 5)
    )


@program
def checkpoints_where_nothing_is_recorded():
    layer, checkpoint = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()), torch.utils.checkpoint

    @torch.no_grad()
    def fn(x):
        kept = checkpoint.checkpoint(lambda value: value, x, use_reentrant=True)
        y = checkpoint.checkpoint(layer, x, use_reentrant=True) + checkpoint.checkpoint(layer, x)
        z = checkpoint.checkpoint(lambda a, b: a * b, x, b=y, use_reentrant=False)
        return y, z, kept is x, checkpoint.checkpoint_sequential(layer, 2, x, use_reentrant=False)

    return calls(fn, normals(3, 4), lambda: (normal(3, 4, seed=1),))


@program
def registries_of_subclasses():
    class Backend:
        pass

    class First(Backend):
        scale = 2

    class Second(First):
        scale = 3

    known, later = {}, []

    def fn(x):
        kinds, left = [], Backend.__subclasses__()
        while left:
            kind = left.pop()
            left += kind.__subclasses__()
            kinds.append(kind)
        largest = max(kinds, key=lambda kind: kind.scale)
        if largest not in known:
            known[largest] = largest()
        return x * known[largest].scale, len(kinds), Second.__subclasses__()

    def more():
        later.append(type("Third", (Backend,), {"scale": 7}))

    return steps(fn, None, None, more, None, observe=lambda: [kind.__name__ for kind in known])


@program
def modules_compared_with_names():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.activation = torch.nn.ReLU()

        def forward(self, x):
            named = self.activation == "linear", "relu" == self.activation, self.activation != b"relu"
            others = [1] == self.activation, {} != self.activation, {1, 2} == self, self == (self,)
            try:
                self.activation < "relu"
            except TypeError as error:
                said = str(error)
            return x if named[0] or others[0] else self.activation(x), named, others, said

    return calls(Layer(), normals(3, 4), lambda: (normal(3, 4, seed=1),))


@program
def transforms_asked_about():
    def fn(x):
        active = torch._C._are_functorch_transforms_active

        def row(item):
            return item * 2 if active() else item * 3

        return row(x), torch.vmap(row)(x), active()

    return calls(fn, normals(3, 4), lambda: (normal(3, 4, seed=1),))


@program
def checks_that_hold():
    def fn(x):
        weights = torch.distributions.Categorical(logits=x)
        if torch.isnan(x).any():
            raise ValueError("nan")
        x.mul_(2)
        assert not (x > 1e6).any()
        return weights.sample(), weights.entropy(), torch.distributions.Beta(x.exp(), 1.0).rsample()

    return calls(fn, *[lambda s=s: (normal(3, 4, seed=s),) for s in range(3)], normals(5, 4))


@program
def checks_that_raise():
    seen = []

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x, scale):
            self.calls += 1
            normal_ = torch.distributions.Normal(self.linear(x), scale)
            drawn = normal_.rsample()
            x.mul_(2)
            assert (drawn < 1e6).all(), "drawn"
            if not (x < 1e3).all():
                seen.append(self.calls)
                raise ValueError(f"of {self.calls} calls")
            return normal_.log_prob(drawn), x, drawn

    def given(scale, factor=1.0):
        return lambda: (normal(3, 4) * factor, torch.full((3, 4), scale))

    layer = Layer()
    made = given(1.0), given(-1.0), given(2.0), given(1.0, 1e5), given(1.0, 1e9), given(1e9), given(1.0)
    return calls(layer, *made, *(given(-2.0),) * 5, given(1.0), observe=lambda: (layer.calls, list(seen)))


@program
def checks_on_sides_of_branches():
    def fn(x):
        if x.sum() > 0:
            assert (x < 100).all()
            return x * 2
        if (x == 7).any():
            raise KeyError(7)
        return x * 3

    return calls(
        fn,
        *[lambda f=f: (normal(3, 4).abs() * f,) for f in (1, -1, 2, -2, 1000, 1, -3)],
        lambda: (-torch.full((3, 4), 7.0).abs(),),
        lambda: (torch.tensor([7.0, -9.0]),),
    )


@program
def generators_that_compare_tensors():
    def fn(x, kept):
        same = all(torch.equal(item, x) for item in kept)
        kept.append(x * 2)
        return torch.relu(x) + same + max((item for item in kept), key=lambda item: float(item.sum()))

    return calls(fn, *[lambda n=n: (normal(3, 4), [normal(3, 4)] * n) for n in (1, 2, 1)])


@program
def small_arrays_of_the_program():
    class Space:
        def __init__(self):
            self.low, self.high, self.dtype = np.zeros(3), np.full((2, 3), 255.0)[:, ::2], np.dtype("uint8")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.space = Space()

        def forward(self, x):
            space = self.space
            if space.dtype != np.uint8 or space.dtype.kind == np.dtype("float32").kind:
                return x * 3, space.dtype.name
            if np.any(space.low != 0) or space.high.shape == space.low.shape:
                return x - float(space.low.max()), space.low.tolist()
            doubled = space.high * 2
            return x / space.high[1, 1] * len(space.low), doubled, space.high.T

    layer = Layer()
    shared = torch.from_numpy(layer.space.low)
    changes = (
        lambda: layer.space.high.__setitem__((1, 1), 7.0),
        lambda: shared.add_(2),
        lambda: setattr(layer.space, "low", np.zeros(3)),
        lambda: setattr(layer.space, "dtype", np.dtype("float64")),
        lambda: setattr(layer.space, "dtype", np.dtype("u1")),
        lambda: setattr(layer.space, "low", np.zeros(3, "float32")),
    )
    return steps(layer, None, *changes, None)


@program
def arrays_that_are_not_compared():
    low, large = np.zeros(3), np.arange(10000.0)
    shared = torch.from_numpy(low)

    def fn(x):
        shared.add_(1)
        return x + float(low[0]), float(large[3])

    return calls(fn, *(normals(3, 4),) * 3, observe=lambda: low.tolist())


@program
def powers_of_numbers():
    def fn(x):
        count = -3
        count **= x
        return (-1) ** x.floor(), (-2.5) ** x, -(2**x), 2 ** (-1 * x), count, pow(-1, x.long())

    return calls(fn, *(lambda: (torch.arange(4.0),),) * 2, lambda: (torch.arange(7.0) - 3,))


@program
def numbers_of_numpy_and_tensors():
    byte, small = np.uint8(200), np.int8(-3)

    def fn(x):
        left = np.float64(3) - x, np.float32(2.5) * x, np.int64(2) / x, np.float16(1.5) < x, byte**x
        return left, x - np.float64(3), x // small, operator.add(np.float64(1), x)

    return calls(fn, *(normals(3, 4),) * 2, lambda: (torch.arange(1, 5),))


@program
def numbers_of_numpy_that_torch_takes_for_floats():
    def fn(x):
        added = operator.add(x, np.bool_(True)), x + np.bool_(True), np.bool_(True) * x
        return added, x * np.complex64(1 + 2j), operator.mul(np.complex128(1j), x)

    return calls(fn, *(lambda: (torch.arange(1, 5),),) * 3)


@program
def lengths_of_views():
    layers = torch.nn.ModuleDict({"a": torch.nn.ReLU(), "b": torch.nn.Tanh()})
    scales, ordered = {"a": 2}, OrderedDict(a=1, b=2)

    def fn(x):
        made = {name: layer(x) for name, layer in layers.items()}
        if len(layers._modules.values()) != len(scales.keys()):
            x = x * len(scales.items())
        return x, len(made.values()), len(made.items()), len(ordered.keys()), len(layers.keys())

    def more():
        scales["b"] = 3

    return steps(fn, None, None, more, None, make=normals(3, 4))


class Scaled:
    @functools.singledispatchmethod
    def scaled(self, value):
        return value

    @scaled.register
    def _(self, value: torch.Tensor):
        return value * 2

    @scaled.register
    def _(self, value: int):
        return value + 1


@program
def methods_chosen_by_class():
    owner, chosen = Scaled(), functools.singledispatch(lambda value: "object")

    def fn(x):
        return owner.scaled(x), owner.scaled(3), owner.scaled(None), chosen.dispatch(type(x))(x)

    def register():
        chosen.register(torch.Tensor, lambda value: value + 5)

    return steps(fn, None, None, register, None, make=normals(3, 4))


@program
def weak_references_to_classes():
    layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.GELU())

    def fn(x):
        met = []
        for layer in layers:
            met.append(weakref.ref(type(layer)))
            x = layer(x) * len(met)
        return x, [reference() is torch.nn.ReLU for reference in met]

    return calls(fn, normals(3, 4), normals(3, 4), normals(2, 5))


def recurrent_of(norm):
    def make():
        torch.manual_seed(0)
        rnn = norm(torch.nn.LSTM(4, 5, 2, batch_first=True), "weight_hh_l0")
        return calls(rnn.eval(), *(normals(2, 3, 4),) * 2, normals(3, 5, 4))

    return make


programs(
    weights_that_a_recurrent_layer_computes=recurrent_of(parametrizations.weight_norm),
    weights_that_a_hook_computes=recurrent_of(torch.nn.utils.weight_norm),
)


@program
def weak_references_after_changes():
    class Kept:
        pass

    class Owner(torch.nn.Module):
        def forward(self, x):
            before, self.kept = weakref.ref(self.kept), Kept()
            now = self.kept
            self.own = weakref.ref(now) if before() is None else None
            return x * (2 if before() is None else 3)

    owner = Owner()
    owner.kept = Kept()
    return calls(owner, *(normals(3, 4),) * 3)


class Attributes(dict):
    """Items as attributes, by methods of dictionaries themselves."""

    __getattr__ = dict.__getitem__

    def __setattr__(self, k, v):
        self[k] = v


class Absent(dict):
    __getattr__ = dict.get


@program
def items_as_attributes():
    """a dictionary whose ``__getattr__`` is a method of dictionaries; a name that is missing is a KeyError"""

    def fn(x, given):
        out = Attributes(up=x * 2)
        out.down = out.up - given.shift
        given.seen = out.down
        try:
            out.sideways
        except KeyError as missing:
            out.name = str(missing)
        return out, out.down.sum(), Absent(a=1).b, out.keys is not None

    return calls(
        fn,
        lambda: (normal(3), Attributes(shift=2)),
        lambda: (normal(3, seed=1), Attributes(shift=2)),
        lambda: (normal(3, seed=1), Attributes(shift=5, up=0)),
    )


@program
def sets_of_what_iterators_give():
    """Names of adapters joined in a display: ``__iter__`` of containers of modules gives native iterators."""
    homes = torch.nn.ParameterDict({"a": torch.ones(2)}), torch.nn.ModuleDict({"b": torch.nn.Identity()})

    def fn(x, given):
        names = {*homes[0], *homes[1], *zip("c", (1,), strict=True)}
        return x * len(names), sorted(map(str, names)), {0, *given}, next(given, None)

    return calls(fn, *(lambda size=size: (normal(size), iter([1, 2])) for size in (2, 2, 3)))


@program
def keys_as_sets():
    """Names that are missing, unexpected or shared: keys of dictionaries in operators of sets."""
    standing = {"a": 1, "b": 2}
    ordered = OrderedDict(b=1, c=2)

    def fn(x, given):
        names = known = {"z"}
        names |= given.keys()
        missing, shared = standing.keys() - given.keys(), given.keys() & {"a", "b"}
        told = frozenset(ordered) ^ standing.keys(), ordered.keys() | {"q"}, given.keys() - ordered.keys()
        same = given.keys() == standing.keys(), {"a"} < standing.keys(), standing.keys() >= given.keys()
        return x * len(missing), sorted(names), known, shared, told, same, type(told[0]).__name__

    given = {"a": 1}, {"a": 1}, {"a": 2, "b": 3}, {"c": 1}
    return calls(fn, *(lambda given=given: (normal(2), dict(given)) for given in given))
