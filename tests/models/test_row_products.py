"""Products of rows with float matrices by kernels of ours on CPUs, with what follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder.lower.chain.panels import panels
from ladder.runtime.compile import target_of
from ladder.runtime.model import build
from schedules.row_panels import NARROW, WIDE, Registers, registers_of
from targets import get_device

HAS = registers_of(get_device(target_of(torch.device("cpu")))) is not None
needs_vectors = pytest.mark.skipif(not HAS, reason="the CPU has neither AVX2 nor AVX-512")


def kinds(fast: Callable[..., object]) -> list[str]:
    return [step.part.kind for step in fast.models[0].plan.steps]  # type: ignore[attr-defined]


def close(found: Tensor, expected: Tensor, depth: int) -> bool:
    """Compare results of sums of ``depth`` products: each rounds at most once."""
    largest = max([1.0, *expected.nan_to_num(0, 0, 0).abs().flatten().tolist()])
    return torch.allclose(found, expected, rtol=1e-5, atol=depth * 2**-23 * largest, equal_nan=True)


class Layer(nn.Module):
    """A product with a bias, a function, a factor of columns, and what is added."""

    def __init__(self, depth: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(depth, columns)
        self.scale = nn.Parameter(torch.randn(columns))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.silu(self.linear(x)) * self.scale + y


SHAPES = [(1, 1, 1), (7, 33, 17), (5, 3, 64), (13, 40, 40), (2, 7, 80), (29, 5, 130), (6, 64, 192), (0, 4, 5)]


@needs_vectors
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_odd_sizes(rows: int, depth: int, columns: int) -> None:
    torch.manual_seed(0)
    model = Layer(depth, columns).eval()
    fast = ladder.compile(model)
    x, y = torch.randn(rows, depth), torch.randn(rows, columns)
    turned = torch.randn(depth, rows).t()
    with torch.no_grad():
        for given in (x, x, x, turned, x):
            assert close(fast(given, y), model(given, y), depth)
    assert not fast.refused
    assert kinds(fast) == (["rows"] if depth > 1 else ["chain"])


@needs_vectors
def test_few_rows_are_multiplied_however_deep_they_are() -> None:
    """A panel of the matrix that leaves the cache costs nothing where it is read once."""
    model, x = nn.Linear(5000, 24).eval(), torch.randn(3, 5000)
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(2):
            assert close(fast(x), model(x), 5000)
    assert kinds(fast) == ["rows"]


@needs_vectors
def test_special_values() -> None:
    torch.manual_seed(0)
    model = Layer(20, 37).eval()
    x, y = torch.randn(9, 20), torch.randn(9, 37)
    x[0, 3], x[4, 19], x[5, 0], x[8, 1] = float("nan"), float("inf"), -float("inf"), 1e38
    y[1, 2], y[2, 36] = float("nan"), float("inf")
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(3):
            found = fast(x, y)
        expected = model(x, y)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert close(found[[1, 2, 3, 6, 7]], expected[[1, 2, 3, 6, 7]], 20)


@needs_vectors
def test_numbers_of_rows_that_change_and_weights_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 50), nn.ReLU(), nn.Linear(50, 6)).eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for rows in (3, 3, 8, 1, 17, 8):
            x = torch.randn(2, rows, 12)
            for _ in range(2):
                assert close(fast(x), model(x), 50)
            model[0].weight.mul_(1.5)
        model[2].weight = nn.Parameter(torch.randn(6, 50))
        for _ in range(3):
            assert close(fast(x), model(x), 50)
    assert not fast.refused


@needs_vectors
def test_matrices_that_change_in_each_call_are_multiplied_by_torch() -> None:
    def multiplied(x: Tensor, matrix: Tensor) -> Tensor:
        return (x @ matrix).relu()

    torch.manual_seed(0)
    fast = ladder.compile(multiplied)
    for _ in range(4):
        x, matrix = torch.randn(5, 8), torch.randn(8, 20)
        assert close(fast(x, matrix), multiplied(x, matrix), 8)
    for _ in range(3):  # one that stays
        assert close(fast(x, matrix), multiplied(x, matrix), 8)
        x = torch.randn(5, 8)


@needs_vectors
def test_points_of_images_with_what_follows() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(20)
    norm.running_var.uniform_(0.5, 2)
    model = nn.Sequential(nn.Conv2d(6, 20, 1, bias=False), norm, nn.Hardswish(), nn.Conv2d(20, 7, 1)).eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for images in (2, 2, 3, 1):
            x = torch.randn(images, 6, 5, 3)
            assert close(fast(x), model(x), 20)
    assert set(kinds(fast)) <= {"rows", "view", "chain"}
    assert not any("maximum" in step[2] for step in fast.models[0].plan.table() if step[0] == "chain")


@pytest.mark.parametrize("registers", [WIDE, NARROW], ids=["AVX-512", "AVX2"])
@pytest.mark.parametrize("columns", [1, 8, 16, 17, 24, 40, 64, 80, 130])
def test_panels_hold_the_matrix_and_zeros(columns: int, registers: Registers) -> None:
    matrix = torch.randn(columns, 3)
    found = panels(matrix, registers)
    width = registers.lanes * registers.panel_vectors(columns)
    assert found.shape[1:] == (3, width)
    flat = found.transpose(1, 2).reshape(-1, 3)
    assert torch.equal(flat[:columns], matrix)
    assert not flat[columns:].any()


WINDOWS = {
    "three by three": (lambda: nn.Conv2d(5, 20, 3, padding=1), (2, 5, 7, 6)),
    "every second, wide border": (lambda: nn.Conv2d(3, 17, (5, 3), stride=2, padding=(4, 1)), (1, 3, 9, 8)),
    "dilated, no border": (lambda: nn.Conv2d(4, 70, 3, dilation=2), (3, 4, 8, 7)),
    "border along one axis": (lambda: nn.Conv2d(4, 8, (1, 3), padding=(0, 1)), (1, 4, 5, 1)),
    "one axis": (lambda: nn.Conv1d(6, 33, 4, stride=3, padding=2), (2, 6, 11)),
    "no images": (lambda: nn.Conv2d(5, 20, 3, padding=1), (0, 5, 7, 6)),
    "tiles": (lambda: nn.Conv2d(16, 20, 3, padding=1), (2, 16, 9, 8)),
    "tiles without a border": (lambda: nn.Conv2d(32, 70, 3), (1, 32, 13, 11)),
    "tiles with a wide border": (lambda: nn.Conv2d(48, 17, 3, padding=(2, 1)), (3, 48, 5, 9)),
}


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Return images as a single convolution of ours reads them; it leaves others to torch."""
    return images.movedim(1, -1).contiguous().movedim(-1, 1)


@needs_vectors
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_of_images(case: str) -> None:
    torch.manual_seed(0)
    make, shape = WINDOWS[case]
    convolution = make()
    model = nn.Sequential(convolution, nn.GELU()).eval()
    fast = ladder.compile(model)
    depth = convolution.weight[0].numel()
    with torch.no_grad():
        for _ in range(3):
            x = channels_last(torch.randn(shape))
            assert close(fast(x), model(x), depth)
    assert not fast.refused
    assert ("rows" in kinds(fast)) == (0 not in shape)


@needs_vectors
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_numbers_that_are_not_finite_stay_in_their_windows(value: float) -> None:
    """Differences of elements would make infinite results NaN: blocks of these are multiplied as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 24, 3, padding=1), nn.LeakyReLU()).eval()
    fast, x = ladder.compile(model), channels_last(torch.randn(2, 32, 21, 30))
    x[1, 3, 7, 8], x[0, 5, 20, 29] = value, -value
    with torch.no_grad():
        fast(x)
        found, expected = fast(x), model(x)
    assert "rows" in kinds(fast)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())
    same = expected.isfinite() & (expected.abs() < 1e30)  # else what is small errs by the large number
    assert close(found[same], expected[same], 288)


@needs_vectors
@pytest.mark.parametrize("large", [1e3, -1e8, 3e38])
def test_elements_err_by_what_they_read(large: float) -> None:
    """Of a tile of 4 x 4, Winograd's products give each result what its 3 x 3 elements account for."""
    torch.manual_seed(0)
    model = nn.Conv2d(16, 16, 3, padding=1, bias=False).eval()
    x = channels_last(torch.randn(1, 16, 21, 30))
    x[0, 3, 7, 8] = large
    exact = nn.functional.conv2d(x.double(), model.weight.double(), padding=1)
    reach = nn.functional.max_pool2d(x.abs().amax(1), 3, stride=1, padding=1)
    fast = ladder.compile(model)
    with torch.no_grad():
        fast(x)
        found = fast(x)
    assert "rows" in kinds(fast)
    assert ((found.double() - exact).abs() <= 1e-4 * reach).all()


@needs_vectors
def test_windows_of_images_of_open_sizes() -> None:
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 16, 3, padding=1, stride=2), nn.Conv2d(16, 19, 3)
    model = nn.Sequential(first, nn.ReLU(), last).eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for images, high, wide in ((2, 9, 9), (2, 9, 9), (1, 12, 7), (3, 8, 15), (1, 21, 50), (2, 9, 9)):
            x = torch.randn(images, 3, high, wide)
            x[0, 0, 0, 0] = float("nan")
            found, expected = fast(x), model(x)
            assert torch.equal(found.isnan(), expected.isnan())
            assert close(found, expected, 180)
    assert not fast.refused


@needs_vectors
def test_tiles_of_images_of_open_sizes() -> None:
    """One tile is multiplied as it is, more by Winograd's products; parts of tiles lie beyond the image."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 24, 1), nn.ReLU(), nn.Conv2d(24, 40, 3, padding=1), nn.ReLU()).eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for batch, high, wide in (
            (1, 9, 9),
            (1, 2, 2),
            (1, 1, 1),
            (1, 2, 1),
            (2, 2, 2),
            (1, 3, 2),
            (1, 6, 17),
        ):
            for scale in (1.0, float("inf")):
                x = torch.randn(batch, 16, high, wide)
                x[-1, 3, 0, 0] *= scale
                found, expected = fast(x), model(x)
                assert torch.equal(found.isfinite(), expected.isfinite())
                same = expected.isfinite()
                assert close(found[same], expected[same], 216)
    assert not fast.refused


@needs_vectors
@pytest.mark.parametrize("lasting", [True, False])
def test_one_convolution_of_images_of_many_sizes(lasting: bool) -> None:
    """Winograd's products serve a weight's large images, other products the small ones."""
    torch.manual_seed(0)
    head = nn.Conv2d(64, 91, 3, padding=1).eval().requires_grad_(not lasting)
    fast = ladder.compile(lambda *images: [torch.relu(head(image)) for image in images])
    images = [torch.randn(2, 64, size, size) for size in (16, 4, 8, 1, 2, 3)]
    for _ in range(3):
        with torch.no_grad():
            for found, expected in zip(fast(*images), (head(image).relu() for image in images), strict=True):
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not fast.refused


def test_convolutions_without_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels cannot be built, torch computes a convolution and what follows it, node by node."""

    def none(parts: Any, requests: Any, device: Any) -> Any:
        own = [at for at, part in enumerate(parts) if part.kind in build.JOBS]
        return {}, [], dict.fromkeys(own, "no compiler")

    monkeypatch.setattr(build, "build_kernels", none)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).eval(), torch.randn(1, 3, 9, 9)
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
    assert "operator by operator" in fast.plan()
