"""What modules of public projects do, old ones among them."""

from __future__ import annotations

import types

import torch
import torch.utils.checkpoint
from capture_world import calls, normal, normals, program, steps
from torch.autograd import Variable


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
