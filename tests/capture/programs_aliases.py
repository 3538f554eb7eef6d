"""Memory that tensors share, metadata and writes that autograd may refuse."""

from __future__ import annotations

import torch
from capture_world import World, calls, normal, program
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@program
def storage_offset_read():
    b = torch.arange(10.0)
    return calls(
        lambda x: (x * x.storage_offset(), x._is_view(), x.is_leaf, x.is_conj(), x.is_inference()),
        lambda: (b[2:5],),
        lambda: (b[1:4],),
        lambda: (torch.ones(3),),
        lambda: (b[5:8],),
        lambda: (b[5:8].detach().clone(),),
    )


@program
def view_flags():
    b = torch.ones(4, 4)

    def inf():
        with torch.inference_mode():
            return torch.ones(3)

    return calls(
        lambda x: (x + 1, x._is_view(), x.is_inference(), x._base is None, x.is_neg(), x.is_conj()),
        lambda: (b[0],),
        lambda: (torch.ones(4),),
        lambda: (inf(),),
        lambda: (torch.ones(3),),
        lambda: (inf(),),
    )


@program
def leaf_inplace_after_change():
    z = torch.zeros(3)

    def fn(x):
        z.add_(1)
        x.add_(1)
        return x * 2

    def leaf():
        return (torch.ones(3, requires_grad=True),)

    def non():
        return (torch.ones(3, requires_grad=True) * 1,)

    return calls(fn, non, leaf, non, leaf, leaf, observe=lambda: z.clone())


@program
def multiview_inplace():
    z = torch.zeros(3)

    def fn(x, y):
        z.add_(1)
        x.mul_(y)
        return x * 2

    def a():
        return (torch.ones(3), torch.ones(3, requires_grad=True))

    def b():
        return (torch.ones(2, 3).unbind()[0], torch.ones(3, requires_grad=True))

    def c():
        with torch.no_grad():
            return (torch.ones(2, 3)[0], torch.ones(3, requires_grad=True))

    def d():
        t = torch.ones(2, 3, requires_grad=True) * 1
        return (t.unbind()[0], torch.ones(3))

    return calls(fn, a, b, c, d, a, b, observe=lambda: z.clone())


@program
def inference_tensor_inplace():
    z = torch.zeros(3)

    def fn(x):
        z.add_(1)
        x.add_(1)
        return x

    def inf():
        with torch.inference_mode():
            return (torch.ones(3),)

    return calls(fn, lambda: (torch.ones(3),), inf, lambda: (torch.ones(3),), inf, observe=lambda: z.clone())


@program
def shared_storage_args():
    def fn(x, y):
        x.add_(1)
        y.mul_(2)
        return x + y, x is y

    def views():
        b = torch.ones(4)
        return (b[:3], b[1:])

    def same():
        b = torch.ones(3)
        return (b, b)

    def view2():
        b = torch.ones(3)
        return (b, b.view(3))

    def exp():
        b = torch.ones(1)
        return (b.expand(3), torch.ones(3))

    return calls(fn, lambda: (torch.ones(3), torch.ones(3)), views, same, view2, views, same, exp)


@program
def view_chains_inplace():
    def fn(x):
        y = x.view(-1)
        z = y[2:6]
        w = z.unflatten(0, (2, 2)).t()
        w.mul_(3)
        y[0] = 9
        x[-1].copy_(y[:3])
        z.fill_(2) if x.sum() > 0 else z.zero_()
        return y, z, w, x.t()

    return calls(fn, lambda: (torch.ones(3, 3),), lambda: (-torch.ones(3, 3),), lambda: (torch.ones(3, 3),))


@program
def output_is_view_of_input():
    def fn(x):
        return (
            x[0],
            x.t(),
            x,
            x.view(9),
            x.detach(),
            x.expand(2, 3, 3),
            x.contiguous(),
            x.float(),
            x.to(torch.float32),
            x.clone(),
        )

    def alias(x, out):
        return [o.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for o in out]

    return calls(lambda x: (lambda o: (o, alias(x, o)))(fn(x)), *[lambda: (normal(3, 3),)] * 3)


@program
def metadata_inplace_ops():
    def fn(x, k):
        x.unsqueeze_(0)
        x.transpose_(0, 1)
        x.squeeze_()
        if k:
            x.resize_(2, 2)
            x.requires_grad_()
        x.detach_()
        return x, x.shape, x.requires_grad

    return calls(fn, *[lambda k=k: (normal(4), k) for k in (0, 1, 0, 1)])


@program
def set_data_and_grad():
    p = nn.Parameter(torch.ones(3))

    def fn(x, k):
        p.data = p.data * 2
        if k == 1:
            p.grad = x.clone()
        if k == 2:
            p.grad = None
        if k == 3:
            p.data.add_(1)
            p.grad.add_(1) if p.grad is not None else None
        return p * x, p.grad is None

    return calls(
        fn,
        *[lambda k=k: (normal(3), k) for k in (0, 1, 3, 2, 0, 3)],
        observe=lambda: (p.detach().clone(), p.grad),
    )


@program
def modes_inside():
    log = []

    class FM(TorchFunctionMode):
        def __torch_function__(s, f, t, a=(), k=None):
            log.append(getattr(f, "__name__", str(f)))
            return f(*a, **(k or {}))

    class DM(TorchDispatchMode):
        def __torch_dispatch__(s, f, t, a=(), k=None):
            log.append(str(f))
            return f(*a, **(k or {}))

    def fn(x):
        y = x + 1
        with FM():
            y = y * 2
        with DM():
            y = torch.relu(y)
        with torch.device("cpu"):
            z = torch.ones(3)
        return y - z

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(log))


@program
def modes_outside():
    log = []

    class FM(TorchFunctionMode):
        def __torch_function__(s, f, t, a=(), k=None):
            log.append(getattr(f, "__name__", str(f)))
            return f(*a, **(k or {}))

    m = FM()

    def fn(x):
        return (x * 2 + 1).sum()

    A = lambda: (normal(3),)
    return World(
        fn,
        [(None, A), (None, A), (lambda: m.__enter__(), A), (lambda: m.__exit__(None, None, None), A)],
        observe=lambda: len(log) > 0,
    )


@program
def default_device_outside():
    def fn(x):
        return x * 2, torch.empty(2).device, torch.zeros(1).dtype, torch.tensor([1.0]).dtype

    A = lambda: (torch.ones(3, device="cpu"),)
    return World(
        fn,
        [
            (None, A),
            (None, A),
            (lambda: torch.set_default_device("meta"), A),
            (lambda: torch.set_default_device(None), A),
            (lambda: torch.set_default_dtype(torch.float64), A),
            (lambda: torch.set_default_dtype(torch.float32), A),
        ],
    )


@program
def inference_mode_variants():
    @torch.inference_mode()
    def g(x):
        return x * 2

    def fn(x):
        a = g(x)
        with torch.inference_mode():
            b = x + 1
        with torch.inference_mode(False):
            c = x - 1
        return (
            a,
            b,
            c,
            a.is_inference(),
            b.is_inference(),
            c.is_inference(),
            torch.is_inference_mode_enabled(),
        )

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def autocast_variants():
    l = nn.Linear(3, 3)

    def fn(x, k):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(k)):
            y = l(x)
            with torch.autocast("cpu", enabled=False):
                z = x @ x.t()
        return y.dtype, y, z.dtype, torch.is_autocast_enabled("cpu")

    return calls(fn, *[lambda k=k: (normal(3, 3), k) for k in (0, 1, 0, 1)])


@program
def autocast_outside():
    l = nn.Linear(3, 3)
    A = lambda: (normal(3, 3),)
    return World(
        lambda x: (l(x).dtype, l(x)),
        [
            (None, A),
            (None, A),
            (lambda: torch.set_autocast_enabled("cpu", True), A),
            (None, A),
            (lambda: torch.set_autocast_enabled("cpu", False), A),
        ],
    )


@program
def argument_met_inside_another_first():
    def fn(x, held, d):
        y = held[0] * 2 + d["t"]
        held.append(x)
        return x, y, held[-1] is x

    t, other = normal(3), normal(3, seed=1)
    return calls(
        fn,
        lambda: (t, [t], {"t": t}),
        lambda: (t * 5, [t], {"t": t}),
        lambda: (other, [t], {"t": other}),
        lambda: (other, [other], {"t": t}),
    )


@program
def written_views_that_no_schema_tells():
    def fn(x):
        found = []
        for view in (
            lambda v: v.type_as(x),
            torch.atleast_1d,
            torch.atleast_3d,
            lambda v: torch.einsum("ij->ji", v),
            torch.conj_physical,
            lambda v: torch.cartesian_prod(v[0]),
            lambda v: v.sum_to_size(2, 3),
        ):
            v = x * 2
            view(v).add_(1)
            found.append(v)
        return found

    return calls(fn, *[lambda: (normal(2, 3),)] * 3)


@program
def written_arguments_that_overlap_themselves():
    def fn(x):
        x.narrow(-1, 0, 1).zero_()
        return x + 1

    return calls(
        fn,
        *[lambda: (normal(1, 4).expand(3, 4),)] * 3,
        lambda: (torch.arange(4.0).as_strided((3, 2), (1, 1)),),
        lambda: (normal(3, 4),),
    )


@program
def numbers_without_axes_turned_around():
    return calls(lambda x: (x.flip(0) * 2, x.flip(-1), x.flip(())), *[lambda: (torch.tensor(2.0),)] * 3)
