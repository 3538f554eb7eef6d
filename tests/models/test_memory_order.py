"""Arguments are read, and results left, in the order in which the program has their axes in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

import ladder
from ladder.api import aliasing
from tests.models.test_row_products import needs_vectors

LAST: Any = torch.channels_last

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "windows": lambda x: functional.avg_pool2d(x, 3, 1, 1),
    "greatest of windows": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "vectors of images": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "over channels": lambda x: functional.normalize(x, dim=1),
    "softmax": lambda x: x.softmax(1),
    "another order": lambda x: x + x.flatten(2).view(x.shape).flip(1),
    "in order": lambda x: (x * 2).contiguous(),
    "a row": lambda x: x.permute(0, 2, 3, 1) + 1,
    "the argument": lambda x: (x, x * 2),
    "views": lambda x: (x[0], x.transpose(1, 2), x.flatten(2)),
    "written": lambda x: (x.mul_(2), x.sum(1)),
    "by torch": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "positions": lambda x: functional.max_pool2d(x * 2, (1, 2), return_indices=True),
    "borders": lambda x: functional.pad(
        functional.pad(x, (3, 1, 0, 0), "replicate"), (0, 2, 0, 0), "reflect"
    ),
    "rolled": lambda x: torch.roll(x, (-3, 17), (1, 3)),
    "turned around": lambda x: (x * 2).flip(1, -1),
    "group norm": lambda x: functional.silu(functional.group_norm(x, 2)),
    "instance norm": lambda x: functional.instance_norm(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_order_is_kept(name: str) -> None:
    program = PROGRAMS[name]
    fast = ladder.compile(program)
    images = torch.randn(2, 6, 8, 10)
    layouts = (images, images.contiguous(memory_format=LAST), images.transpose(2, 3).contiguous().mT)
    for given in (*layouts, images[:, :, ::2], torch.randn(1, 6, 1, 4).contiguous(memory_format=LAST)):
        for _ in range(2):
            x, y = (given.clone(memory_format=torch.preserve_format) for _ in range(2))
            pairs = zip(*map(_pytree.tree_leaves, ((program(x), x), (fast(y), y))), strict=True)
            for want, found in pairs:
                torch.testing.assert_close(found, want)
                assert found.stride() == want.stride()
    assert not fast.refused


@pytest.mark.parametrize("place", [(), (0,)])
def test_strides_are_of_memory(place: tuple[int, ...]) -> None:
    """`as_strided` reads what lies in memory, whose order need not be that of the axes."""
    images, steps = torch.randn(2, 6, 8, 10), (480, 80, 10, 1)
    programs: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.as_strided(x.shape, steps, *place) + 1,
        lambda x: (x + 1).as_strided(x.shape, steps, *place) * 2,
        lambda x: (x + 1).mT.contiguous().mT.as_strided(x.shape, steps, *place) * 2,
        lambda x: x.clone().as_strided_(x.shape, steps, *place) + 1,
    )
    for program in programs:
        fast = ladder.compile(program)
        for given in (images, images.contiguous(memory_format=LAST), images.mT.contiguous().mT):
            for _ in range(2):
                torch.testing.assert_close(fast(given), program(given))
        assert not fast.refused
        part = torch.randn(2, 6, 8, 20)[..., ::2]
        torch.testing.assert_close([fast(part), fast(part)], [program(part)] * 2)


@pytest.mark.parametrize("given", [torch.randn(8, 8)[:, ::2], torch.randn(8, 8)[:, :4], torch.randn(8, 4)])
def test_what_equals_an_argument_with_gaps_has_none(given: Tensor) -> None:
    """A copy lies densely, whatever its elements are computed from: plans leave factors of 1 out."""
    programs: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: (x * 1).as_strided((4,), (5,)) + 1,
        lambda x: (x * 1).fill_diagonal_(-2),
        lambda x: (x + 0).view(torch.int32),
        lambda x: x.contiguous().fill_diagonal_(-2),
    )
    for program in programs:
        fast = ladder.compile(program)
        for _ in range(2):
            assert torch.equal(fast(given), program(given))


@pytest.mark.parametrize("name", ["windows", "greatest of windows", "vectors of images", "over channels"])
@pytest.mark.parametrize("last", [False, True])
def test_nothing_is_copied(name: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(aliasing, "relaid")
    x = torch.randn(2, 6, 8, 10)
    x = x.contiguous(memory_format=LAST) if last else x
    fast = ladder.compile(PROGRAMS[name])
    fast(x)
    kinds = [kind for kind, *_ in fast.models[0].plan.table()]
    assert kinds.count("view") == 2 * last
    assert "library" not in kinds
    for step in fast.models[0].plan.steps:
        if step.part.kind == "view":
            assert step.part.operators == ("restride",)


@pytest.mark.parametrize("groups", [1, 6])
def test_one_convolution_stays_as_it_is(groups: int) -> None:
    """Channels last pay from the second one on; sums over windows of single channels not across memory."""
    layer = nn.Conv2d(6, 12, 3, padding=1, groups=groups).eval()
    fast, x = ladder.compile(layer), torch.randn(2, 6, 8, 10)
    with torch.no_grad():
        for given in (x, x.contiguous(memory_format=LAST)):
            want, found = layer(given), fast(given)
            torch.testing.assert_close(found, want)
            assert found.stride() == want.stride()
    assert "transpose" not in str(fast.models[0].plan)


@needs_vectors
@pytest.mark.parametrize("turned", [False, True])
def test_one_convolution_is_ours_where_turning_its_image_is_free(turned: bool) -> None:
    """Images of one channel, or that come with channels last, ignoring axes of one element."""
    layer = nn.Conv2d(8 if turned else 1, 12, (5, 1)).eval()
    x = torch.randn(2, 40, 8) if turned else torch.randn(2, 1, 40, 1)

    def program(x: Tensor) -> Tensor:
        image = (x * 2).unsqueeze(-1).permute(0, 2, 1, 3) if turned else x
        return layer(image).relu()

    fast = ladder.compile(program)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), program(x))
    assert "rows" in [kind for kind, *_ in fast.models[0].plan.table()]
