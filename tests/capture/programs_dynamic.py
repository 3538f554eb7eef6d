"""Programs whose way depends on values and shapes, whose surroundings change, and model idioms."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types

import numpy as np
import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


@program
def tensor_bool_branch_merge():
    """if on a tensor, both branches assign python state"""
    st = {"pos": 0, "neg": 0}

    def fn(x):
        y = x * 1
        if (x > 0).all():
            y = y + 10
            st["pos"] += 1
        else:
            y = y - 10
            st["neg"] += 1
        return y

    return calls(fn, lambda: (torch.ones(3),), lambda: (-torch.ones(3),), observe=lambda: dict(st))


@program
def while_until_converged():
    def fn(x):
        n = 0
        while x.norm() > 1.0:
            x = x * 0.5
            n += 1
        return x, n

    return calls(fn, lambda: (torch.ones(4) * 3,), lambda: (torch.ones(4) * 20,))


@program
def unique_and_python_dict():
    def fn(x):
        u, c = torch.unique(x, return_counts=True)
        return {int(k): int(v) for k, v in zip(u, c)}, u.float().mean()

    return calls(fn, lambda: (torch.tensor([1, 1, 2]),), lambda: (torch.tensor([3, 4, 5]),))


@program
def python_scalar_args_vary():
    """step counter / temperature passed as python numbers, 12 different values"""

    def fn(x, step, temp):
        lr = 0.5 * (1 + math.cos(math.pi * step / 100)) if step > 3 else step / 3
        return x * lr / max(temp, 0.1)

    return calls(fn, *[(lambda i=i: (normal(3), i, 1.0 / (i + 1))) for i in range(12)])


@program
def bool_flags_and_none_args():
    """MagPy: booleans share one object id -> cannot be lifted"""

    def fn(x, mask=None, flag=True, mode="a"):
        if mask is not None:
            x = x * mask
        return (x + 1 if flag else x - 1) * (2 if mode == "a" else 3)

    return World(
        fn,
        [
            (None, lambda: (normal(3), None, True)),
            (None, lambda: (normal(3), normal(3, seed=1), False)),
            (None, lambda: (normal(3), None, False, "b")),
        ],
    )


@program
def lstm_packed_sequence():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x, lens):
            p = nn.utils.rnn.pack_padded_sequence(x, lens, batch_first=True, enforce_sorted=False)
            o, (h, c) = self.l(p)
            o, _ = nn.utils.rnn.pad_packed_sequence(o, batch_first=True)
            return o, h

    m = M().eval()
    return calls(
        m, lambda: (normal(2, 3, 4), torch.tensor([3, 2])), lambda: (normal(2, 3, 4), torch.tensor([1, 3]))
    )


@program
def tensor_metadata_logic():
    """dtype/device/stride/contiguity/requires_grad/data_ptr tests in python"""

    def fn(x, y):
        if not x.is_contiguous():
            x = x.contiguous() * 2
        if x.dtype == torch.float32 and str(x.device).startswith("cpu") and x.stride(-1) == 1:
            x = x + 1
        if x.data_ptr() == y.data_ptr():
            x = x * 10
        return x.type(y.type()), x.size() == y.size(), torch.get_default_dtype()

    return calls(
        fn, lambda: (normal(3, 3), normal(3, 3, seed=1)), lambda: (normal(3, 3).t(), normal(3, 3).double())
    )


@program
def tensor_attribute_on_tensor():
    """python attribute stored on a tensor object"""

    def fn(x):
        x._zoo_tag = getattr(x, "_zoo_tag", 0) + 1
        y = x * x._zoo_tag
        y._zoo_name = "y"
        return y, hasattr(y, "_zoo_name")

    t = normal(3)
    return calls(fn, lambda: (t,), lambda: (t,), observe=lambda: getattr(t, "_zoo_tag", None))


@program
def tensor_subclass_output():
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types_, args=(), kwargs=None):
            return super().__torch_function__(func, types_, args, kwargs or {})

        def shout(self):
            return "tagged%d" % self.dim()

    def fn(x):
        t = x.as_subclass(Tagged) * 2
        return t, t.shout(), isinstance(t + 1, Tagged)

    return calls(fn, lambda: (normal(3),))


@program
def class_attribute_constant_changed():
    class A:
        scale = 2

    a = A()

    def fn(x):
        return x * a.scale

    return World(
        fn,
        [
            (None, lambda: (normal(3),)),
            (lambda: setattr(A, "scale", 5), lambda: (normal(3),)),
            (lambda: setattr(a, "scale", 7), lambda: (normal(3),)),
        ],
    )


@program
def module_class_forward_patched():
    """library patches nn.Module.forward of a user layer class (LoRA / quantisation injection)"""

    class L(nn.Module):
        def forward(self, x):
            return x * 2

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = L()

        def forward(self, x):
            return self.l(x) + 1

    m = M()
    return World(
        m,
        [
            (None, lambda: (normal(3),)),
            (lambda: setattr(L, "forward", lambda self, x: x * 10), lambda: (normal(3),)),
            (lambda: setattr(m.l, "forward", lambda x: x * 100), lambda: (normal(3),)),
        ],
    )


@program
def global_tensor_replaced_and_resized():
    ns = types.SimpleNamespace(w=torch.ones(3))

    def fn(x):
        return (x * ns.w).sum()

    return World(
        fn,
        [
            (None, lambda: (normal(3),)),
            (lambda: setattr(ns, "w", torch.full((3,), 4.0)), lambda: (normal(3),)),
            (lambda: setattr(ns, "w", torch.full((1,), 4.0, dtype=torch.float64)), lambda: (normal(3),)),
            (lambda: setattr(ns, "w", 2), lambda: (normal(3),)),
        ],
    )


@program
def int_bool_float_same_value():
    """1, True and 1.0 compare equal but behave differently"""

    def fn(x, k):
        return x * k, str(k), isinstance(k, bool)

    return calls(
        fn,
        lambda: (normal(3), 1),
        lambda: (normal(3), True),
        lambda: (normal(3), 1.0),
        lambda: (normal(3), np.int64(1)),
    )


@program
def nested_alias_in_dict():
    """two keys of one dict refer to the same list / to different lists"""

    def fn(x, d):
        d["a"].append(1)
        return x * len(d["b"])

    def shared():
        l = []
        return (normal(3), {"a": l, "b": l})

    return calls(fn, lambda: (normal(3), {"a": [], "b": []}), shared, lambda: (normal(3), {"a": [], "b": []}))


@program
def object_alias_self_cycle():
    """two attributes are / are not the same object; cyclic reference"""

    class N:
        def __init__(self, v):
            self.v, self.next = v, None

    def fn(x, n):
        n.next.v = 10
        return x * n.v

    def cyc():
        n = N(2)
        n.next = n
        return (normal(3), n)

    def two():
        n = N(2)
        n.next = N(3)
        return (normal(3), n)

    return calls(fn, two, cyc, two)


@program
def dict_order_and_extra_key():
    def fn(x, d):
        for i, (k, v) in enumerate(d.items()):
            x = x * (i + 1) + v
        return x

    return calls(
        fn,
        lambda: (normal(3), {"a": 1, "b": 2}),
        lambda: (normal(3), {"b": 2, "a": 1}),
        lambda: (normal(3), {"a": 1, "b": 2, "c": 3}),
    )


@program
def dataclass_config_field_changed():
    @dataclasses.dataclass
    class Cfg:
        scale: float = 1.0
        acts: tuple = ("relu",)

    c = Cfg()

    def fn(x):
        for a in c.acts:
            x = getattr(torch, a)(x)
        return x * c.scale

    return World(
        fn,
        [
            (None, lambda: (normal(3),)),
            (lambda: setattr(c, "scale", 3.0), lambda: (normal(3),)),
            (lambda: setattr(c, "acts", ("sin", "cos")), lambda: (normal(3),)),
        ],
    )


@program
def builtin_module_function_patched():
    """math.sqrt / torch.sin replaced (mocking libraries)"""
    real_sqrt, real_sin = math.sqrt, torch.sin

    def fn(x):
        return torch.sin(x) * math.sqrt(4.0)

    def patch():
        math.sqrt = lambda v: 100.0
        torch.sin = lambda t: t * 0 + 5

    def back():
        math.sqrt, torch.sin = real_sqrt, real_sin

    return World(
        fn, [(back, lambda: (normal(3),)), (patch, lambda: (normal(3),)), (back, lambda: (normal(3),))]
    )


@program
def unregistered_layer_list():
    """layers kept in a plain python list / dict (not ModuleList)"""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = [nn.Linear(4, 4) for _ in range(2)]
            self.heads = {"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)}

        def forward(self, x):
            for l in self.layers:
                x = l(x).relu()
            return {k: h(x) for k, h in self.heads.items()}

    m = M()
    return calls(m, lambda: (normal(2, 4),), lambda: (normal(5, 4),))


@program
def assert_on_tensor_value():
    def fn(x, idx):
        assert idx.min() >= 0, "negative index"
        assert x.dim() == 2 and x.size(0) > 1
        return x[idx]

    return World(
        fn,
        [
            (None, lambda: (normal(4, 2), torch.tensor([0, 3]))),
            (None, lambda: (normal(4, 2), torch.tensor([1, 2]))),
        ],
    )


@program
def cached_property_and_super_forward():
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(3, 3)

        def forward(self, x):
            return self.l(x)

        @functools.cached_property
        def scale(self):
            return 1.0 / math.sqrt(self.l.in_features)

    class D(Base):
        def forward(self, x, **kw):
            return super().forward(x) * self.scale + super().scale

    m = D()
    return calls(
        m, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=1),), observe=lambda: "scale" in m.__dict__
    )


@program
def named_children_and_isinstance_walk():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Dropout())
            self.take = ["0", "2"]

        def forward(self, x):
            outs = []
            for name, mod in self.body._modules.items():
                x = mod(x)
                if name in self.take or type(mod).__name__ == "ReLU":
                    outs.append(x)
            for mod in self.modules():
                if isinstance(mod, nn.Linear):
                    x = x * mod.weight.mean()
            return outs, x, len(list(self.parameters())), sorted(dict(self.named_parameters()))

    m = M().eval()
    return calls(m, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=1),))


@program
def default_mutable_arg_accumulates():
    def fn(x, history=[]):
        history.append(x.shape[0])
        return x * len(history)

    return World(
        fn,
        [(None, lambda: (normal(3),)), (None, lambda: (normal(3),)), (None, lambda: (normal(3), []))],
        observe=lambda: list(fn.__defaults__[0]),
    )


@program
def deepcopy_of_module_in_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(3, 3)

        def forward(self, x):
            t = copy.deepcopy(self.l)
            with torch.no_grad():
                t.weight.mul_(0.5)
            return self.l(x) - t(x), sorted(self.state_dict())

    m = M()
    return calls(m, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=1),))


@program
def scripted_function_inside():
    @torch.jit.script
    def act(x):
        return x * torch.tanh(F.softplus(x))

    def fn(x):
        return act(x) + 1

    return calls(fn, lambda: (normal(3),), lambda: (normal(3, seed=1),))
