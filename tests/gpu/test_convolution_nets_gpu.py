"""Whole convolution networks on a GPU: channels last, folded statistics, fused products; against float64."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
zoo: Any = importlib.import_module("model_zoo")

NETS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "resnet": (lambda: zoo.ResNet((1, 1), 64, 10), (2, 3, 64, 64)),
    "efficientnet": (
        lambda: zoo.EfficientNet([(1, 3, 1, 16, 1), (6, 5, 2, 24, 2)], 32, 64, 10),
        (2, 3, 64, 64),
    ),
    "shufflenet": (lambda: zoo.ShuffleNet((2,), (24, 48, 64), 10), (2, 3, 64, 64)),
    "conformer": (lambda: zoo.Conformer(layers=1), (2, 32, 16)),
}


def drawn(make: Callable[[], Any]) -> Any:
    """Return a network in half precision with statistics as training leaves them."""
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.8, 1.2)
    return model.half().eval().requires_grad_(False).cuda()


@pytest.mark.parametrize("name", NETS)
def test_networks(name: str) -> None:
    import ladder

    make, shape = NETS[name]
    model, x = drawn(make), torch.randn(shape, device="cuda").half()
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(4):  # the plan records itself at the third call
            found = fast(x)
        assert not fast.refused
        exact = copy.deepcopy(model).double()(x.double())
        own = torch.linalg.norm(model(x).double() - exact)
        assert torch.linalg.norm(found.double() - exact) < 2 * own
        first = next(p for p in model.parameters() if p.ndim > 2)
        first.mul_(-1)
        exact = copy.deepcopy(model).double()(x.double())
        assert torch.linalg.norm(fast(x).double() - exact) < 2e-3 * torch.linalg.norm(exact)
