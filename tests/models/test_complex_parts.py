"""What is computed of complex numbers is of kernels, as two reals each: products, magnitudes, angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_eager import beside_eager
from chain_targets import run_chain

from ladder.frontend import importer
from ladder.frontend.torch_fx import import_fx
from ladder.partition import partition
from ladder.runtime.model.prepared import simplified
from targets import get_device

HOPPER = get_device("cuda/sm_90a")

as_complex, as_real = torch.view_as_complex, torch.view_as_real


def rotary(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    turned = torch.polar(torch.ones_like(a), a)[None, :, None]
    y = as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return as_real(y * turned).flatten(3).type_as(x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rotary": (rotary, ((2, 5, 3, 8), (5, 4))),
    "conjugates": (lambda a, b: as_real(as_complex(a) * as_complex(b).conj() * 0.5), ((3, 4, 5, 2), (5, 2))),
    "real factors": (lambda a, b: as_real(as_complex(a) * b - 2 * as_complex(a)), ((3, 5, 2), (3, 1))),
    "shifted by reals": (lambda a, b: as_real(1 - as_complex(a) + b), ((3, 1, 2), (3, 4))),
    "moved": (
        lambda a: as_real(as_complex(a).mT.flip(0)[1:, :3].unsqueeze(1).expand(-1, 2, -1).contiguous()),
        ((4, 5, 2),),
    ),
    "magnitudes": (lambda a, b: torch.complex(a, b[:, None]).abs(), ((3, 5), (3,))),
    "angles": (lambda a: (-as_complex(a)).angle(), ((4, 7, 2),)),
}


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    for at, value in enumerate((float("nan"), float("inf"), -0.0, 0.0, 1e25)[: len(flat) // 2]):
        flat[2 * at + seed % 2] = value
    return x


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", on_cpu, False)
    program, shapes = PROGRAMS[name]
    inputs = [drawn(shape, seed) for seed, shape in enumerate(shapes)]
    if name == "rotary":  # no sine of an infinity is stored before it is read
        inputs[1] = inputs[1].nan_to_num(0, 1, 1)
    wanted = program(*inputs)
    module = torch.fx.experimental.proxy_tensor.make_fx(program, pre_dispatch=True)(*inputs)
    graph = simplified(import_fx(module, inputs), HOPPER).graph
    parts = [part for part in partition(graph, device=HOPPER) if part.kind != "view"]
    assert {part.kind for part in parts} == {"chain"}
    for target in ("cuda/sm_90a", "rocm/gfx942"):
        known = {node.name: inputs[int(node.name.split("_")[0][3:])] for node in graph.inputs}
        for part in parts:
            given = [known[value] for value in part.inputs]
            known |= dict(zip(part.outputs, run_chain(part.graph, given, target), strict=True))
        found = known[parts[-1].outputs[0]].reshape(wanted.shape)
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)


def of_held(z: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = z * w.conj() + 1
    return y, y.abs(), y.real * 2, torch.fft.ifft(y).angle(), (y[..., None] * 2).imag.sum(-1)


@pytest.mark.parametrize("kind", ["complex64", "complex128"])
def test_complex_arguments(kind: str) -> None:
    """Results that are complex, and what Fourier transforms read, stay torch's."""
    drawn = torch.randn(2, 4, 6, dtype=getattr(torch, kind), generator=torch.Generator().manual_seed(0))
    _, pairs = beside_eager(of_held, (drawn[0], drawn[1]))
    for one, other in pairs:
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_turned_arguments() -> None:
    """Parts of what does not lie in order, or is conjugated by a flag, are not read as they lie."""
    z = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for given in (z.mT, z.conj(), z[:, ::2], z[1:]):
        _, pairs = beside_eager(lambda y: ((y * (1 + 2j)).abs(), y.abs() * 2), (given,))
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
