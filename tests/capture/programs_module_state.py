"""Modules and state that change between calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


@program
def dtype_changes():
    l = nn.Linear(3, 3)

    def fn(x):
        return l(x.to(l.weight.dtype)), x.dtype.is_floating_point, x.element_size()

    return World(
        fn,
        [
            (None, lambda: (normal(2, 3),)),
            (None, lambda: (normal(2, 3).double(),)),
            (l.double, lambda: (normal(2, 3),)),
            (None, lambda: (torch.ones(2, 3, dtype=torch.int64),)),
            (l.float, lambda: (normal(2, 3).bfloat16(),)),
            (None, lambda: (normal(2, 3),)),
            (lambda: l.to("meta"), lambda: (normal(2, 3).to("meta"),)),
        ],
    )


@program
def sparse_and_meta_and_quant():
    def fn(x):
        return x.is_sparse, x.layout, (x * 2).to_dense() if x.is_sparse else x * 2, x.is_meta, x.device

    return calls(
        fn,
        lambda: (torch.eye(3),),
        lambda: (torch.eye(3).to_sparse(),),
        lambda: (torch.ones(3, device="meta"),),
        lambda: (torch.eye(3).to_sparse(),),
    )


@program
def requires_grad_flow():
    w = torch.ones(3, requires_grad=True)

    def fn(x, k):
        with torch.set_grad_enabled(k > 0):
            y = w * x
        z = y.detach() if k > 1 else y
        torch._C._set_grad_enabled(True)
        if k == 3:
            w.requires_grad_(False)
        return y.requires_grad, z.requires_grad, z.is_leaf, y, torch.is_grad_enabled()

    return World(
        fn, [(lambda k=k: w.requires_grad_(True), lambda k=k: (normal(3), k)) for k in (0, 1, 2, 3, 0, 1, 3)]
    )


@program
def state_read_toggles():
    def fn(x):
        r = [x * 2]
        if torch.are_deterministic_algorithms_enabled():
            r.append("det")
        if torch.is_deterministic_algorithms_warn_only_enabled():
            r.append("warn")
        if torch.backends.mkldnn.enabled:
            r.append("mkl")
        if torch.backends.cudnn.enabled:
            r.append("cudnn")
        if torch.backends.cudnn.benchmark:
            r.append("bench")
        if torch.is_anomaly_enabled():
            r.append("anom")
        r.append(torch.get_num_threads())
        r.append(torch.get_float32_matmul_precision())
        if torch.backends.cuda.matmul.allow_tf32:
            r.append("tf32")
        if torch.jit.is_scripting():
            r.append("comp")
        return r

    A = lambda: (normal(3),)
    S = torch.use_deterministic_algorithms
    return World(
        fn,
        [
            (None, A),
            (None, A),
            (lambda: S(True, warn_only=True), A),
            (lambda: S(True), A),
            (lambda: S(False), A),
            (lambda: setattr(torch.backends.cudnn, "enabled", False), A),
            (lambda: setattr(torch.backends.cudnn, "enabled", True), A),
            (lambda: torch.set_float32_matmul_precision("high"), A),
            (lambda: torch.set_float32_matmul_precision("highest"), A),
            (lambda: setattr(torch.backends.cudnn, "benchmark", True), A),
            (lambda: setattr(torch.backends.cudnn, "benchmark", False), A),
            (lambda: torch.autograd.set_detect_anomaly(True), A),
            (lambda: torch.autograd.set_detect_anomaly(False), A),
        ],
    )


@program
def parametrize_and_weight_norm():
    l = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    class Sym(nn.Module):
        def forward(s, x):
            return x + x.t()

    k = nn.Linear(3, 3)
    nn.utils.parametrize.register_parametrization(k, "weight", Sym())
    A = lambda: (normal(2, 3),)

    def fn(x):
        with nn.utils.parametrize.cached():
            a = k(x) + k(x)
        return l(x) + a

    def rm():
        if nn.utils.parametrize.is_parametrized(k):
            nn.utils.parametrize.remove_parametrizations(k, "weight")

    return World(fn, [(None, A), (None, A), (rm, A), (None, A)])


@program
def module_surgery():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    A = lambda: (normal(2, 3),)

    def s1():
        m[1] = nn.Tanh()

    def s2():
        m.append(nn.Sigmoid())

    def s3():
        del m[0]

    def s4():
        m[1].weight.data.mul_(2) if hasattr(m[1], "weight") else None

    def s5():
        m.insert(0, nn.Identity())

    def s6():
        m[2].weight = nn.Parameter(torch.ones(3, 3))

    def s7():
        m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})

    def s8():
        m[2].bias = None

    return World(lambda x: m(x), [(s, A) for s in (None, None, s1, s2, s3, s4, s5, s6, s7, s8, None)])


@program
def foreach_and_out():
    a = [torch.ones(3), torch.ones(3)]
    buf = torch.zeros(3)

    def fn(x):
        torch._foreach_add_(a, 1)
        torch._foreach_mul_(a, [2.0, 3.0])
        torch.add(x, 1, out=buf)
        r = torch.mul(x, 2, out=x)
        return r is x, a[0] + buf, torch._foreach_norm(a), torch.stack(a, out=torch.empty(2, 3))

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: (a[0].clone(), buf.clone()))


@program
def mutated_then_error():
    buf = torch.zeros(3)
    n = []

    def fn(x, i):
        buf.add_(x)
        n.append(1)
        y = buf[i]
        z = F.embedding(torch.tensor([i]), x.view(3, 1))
        return y * 2, z

    return calls(
        fn, *[lambda i=i: (normal(3), i) for i in (0, 1, 5, 2, 7)], observe=lambda: (buf.clone(), len(n))
    )


@program
def mutated_then_value_error():
    buf = torch.zeros(3)

    def fn(x, i):
        buf.add_(x)
        return F.embedding(i, x.view(3, 1)), F.one_hot(i, 3) * 1, torch.gather(x, 0, i)

    return calls(
        fn,
        *[lambda i=i: (normal(3), torch.tensor([i])) for i in (0, 1, 5, 2, 7, -1)],
        observe=lambda: buf.clone(),
    )


@program
def lists_of_tensors_conditional():
    def fn(xs, flags):
        out = []
        for x, f in zip(xs, flags, strict=True):
            if f:
                out.append(x * 2)
            elif f is None:
                continue
            else:
                out.insert(0, x)
        acc = torch.zeros(3)
        for o in reversed(out):
            acc = acc + o
        return out, acc, len(out), out[::-1]

    return calls(
        fn,
        lambda: ([normal(3), normal(3)], [True, False]),
        lambda: ([normal(3)], [None]),
        lambda: ([normal(3), normal(3)], [False, False]),
        lambda: ([normal(3)], [True, False]),
        lambda: ([normal(3), normal(3)], (1, 0)),
    )


@program
def complex_conj_neg():
    def fn(x):
        return (x * 2).abs(), x.is_conj(), x.conj().is_conj(), torch.view_as_real(x.resolve_conj()), x.imag

    return calls(
        fn,
        lambda: (torch.ones(3) * (1 + 2j),),
        lambda: ((torch.ones(3) * (1 + 2j)).conj(),),
        lambda: (torch.ones(3) * (1 + 2j),),
    )


@program
def id_and_data_ptr():
    seen = {}

    def fn(x, y):
        k = id(x)
        seen[k] = seen.get(k, 0) + 1
        return x + y, id(x) == id(y), x.data_ptr() == y.data_ptr(), len(seen), hash(x) == hash(y)

    t = normal(3)
    u = normal(3, seed=1)
    return calls(fn, lambda: (t, t), lambda: (t, u), lambda: (u, t), lambda: (t, t))


@program
def converts_its_parts():
    """A router that puts its classifier into a type in each call; so it is that of the last call."""
    torch.manual_seed(0)
    l = nn.Linear(3, 3).requires_grad_(False)

    def fn(x, dtype):
        weight = l.weight
        moved = l.to(dtype)
        return moved(x.to(dtype)), moved is l, l.weight is weight, l.weight.dtype, l.to(x)(x)

    kinds = (torch.float32, torch.float32, torch.float64, torch.float32, torch.float32)
    return calls(
        fn,
        *[lambda kind=kind: (normal(2, 3), kind) for kind in kinds],
        observe=lambda: [l.weight.clone(), l.bias.clone(), l.weight._version],
    )
