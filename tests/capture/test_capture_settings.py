"""Settings that a program switches around its operators: part of the graph, and right in every call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ladder
from ladder.capture import Captured, capture
from ladder.capture.values.settings import all_settings, restore_settings


def _one_backend(x: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        y = functional.scaled_dot_product_attention(x, x, x)
    return y + 1, torch.backends.cuda.flash_sdp_enabled()


def _under_autocast(x: Any) -> Any:
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        y = functional.scaled_dot_product_attention(x, x, x)
    return y.float()


def _in_order(x: Any) -> Any:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        order = torch._C._get_sdp_priority_order()
        order.append(7)  # a list of the program's own
        y = functional.scaled_dot_product_attention(x, x, x) * len(order)
    return y, torch._C._get_sdp_priority_order()


def _in_layers(x: Any) -> Any:
    for _ in range(4):
        with sdpa_kernel(SDPBackend.MATH):
            x = functional.scaled_dot_product_attention(x, x, x) * 1.1
        x = functional.silu(x)
    return x


def _flags_of_library(x: Any) -> Any:
    with torch.backends.cudnn.flags(enabled=False):
        seen = torch.backends.cudnn.enabled
        y = x * 2
    return y, seen


def _left_otherwise(x: Any) -> Any:
    torch.backends.cuda.enable_math_sdp(False)
    return functional.relu(x) * 2


def _turned(x: Any) -> Any:
    was = torch.backends.cuda.math_sdp_enabled()
    torch.backends.cuda.enable_math_sdp(not was)
    return x * (3 if was else 5)


def _only_written(x: Any) -> Any:
    torch.backends.cuda.enable_math_sdp(False)
    return x.shape[0]


def _precision(x: Any) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    y = x @ x.transpose(-1, -2)
    torch.set_float32_matmul_precision(before)
    return y, len(before)


def _watched_for_nan(x: Any) -> Any:
    with torch.autograd.set_detect_anomaly(False):
        y = x * 2
    return y


def _deterministic(x: Any) -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    y = functional.silu(x) * (2 if torch.is_deterministic_algorithms_warn_only_enabled() else 3)
    filled = torch.empty(3)
    torch.use_deterministic_algorithms(mode=before)
    return y, filled, x * 2, torch.is_deterministic_algorithms_warn_only_enabled()


def _fails_between(x: Any) -> Any:
    torch.backends.cuda.enable_math_sdp(False)
    y = x.flatten()[(x.flatten()[0] > 0).long() * 100_000]
    torch.backends.cuda.enable_math_sdp(True)
    return y


PROGRAMS = (_one_backend, _in_order, _in_layers, _flags_of_library, _left_otherwise, _turned, _precision)
PROGRAMS += (_watched_for_nan, _only_written, _under_autocast, _deterministic)
COMPILED = (_one_backend, _in_layers, _left_otherwise, _only_written)


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    before = all_settings()
    yield
    restore_settings(before)


def _outcomes(function: Callable[..., Any]) -> list[Any]:
    """Call with settings changed from outside on the way; return results or errors, and what was left."""
    found = []
    for call in range(6):
        x = torch.randn(2 if call == 3 else 1, 2, 4, 8, generator=torch.Generator().manual_seed(call)).abs()
        if call in (2, 4):
            torch.backends.cuda.enable_flash_sdp(call == 4)
        try:
            with torch.no_grad():
                result = function(-x if call == 5 else x)
        except IndexError as error:
            result = type(error)
        found.append((result, all_settings()))
    return found


def _compare(program: Callable[..., Any], fast: Captured) -> None:
    before = all_settings()
    expected = _outcomes(program)
    restore_settings(before)
    for (result, left), (wanted, wanted_left) in zip(_outcomes(fast), expected, strict=True):
        assert left == wanted_left
        if isinstance(wanted, type):
            assert result is wanted
        else:
            torch.testing.assert_close(result, wanted, equal_nan=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_are_part_of_the_graph(program: Callable[..., Any]) -> None:
    fast = capture(program)
    _compare(program, fast)
    assert fast.outcome == "whole"


@pytest.mark.parametrize("program", COMPILED)
def test_plans_switch_settings(program: Callable[..., Any]) -> None:
    fast = ladder.compile(program)
    _compare(program, fast)
    assert fast.outcome == "whole"
    assert not fast.refused


def test_an_error_between_two_writes_leaves_what_the_program_leaves() -> None:
    _compare(_fails_between, capture(_fails_between))


def test_flags_that_torch_refuses_to_tell_are_left_alone() -> None:
    """Where its newer flags were set torch answers no question about the older ones."""
    before = torch.backends.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.fp32_precision, torch.backends.cudnn.conv.fp32_precision = "tf32", "ieee"
        fast, x = ladder.compile(lambda x: functional.silu(x * 2)), torch.randn(3, 8)
        for _ in range(2):
            torch.testing.assert_close(fast(x), functional.silu(x * 2))
        assert torch.backends.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before


def test_whether_algorithms_are_deterministic_is_read() -> None:
    def program(x: Any) -> Any:
        return x * (2 if torch.are_deterministic_algorithms_enabled() else 3)

    fast, x = capture(program), torch.ones(2)
    try:
        for on in (False, True, False, True):
            torch.use_deterministic_algorithms(on)
            assert torch.equal(fast(x), program(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert fast.outcome == "whole"
    assert fast.calls["recorded"] == 2


def _other_default(x: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        made = torch.ones(3) + x, torch.arange(3.0) * x, torch.rand(3), x.int() / 2, torch.tensor(1.5)
    finally:
        torch.set_default_dtype(torch.float32)
    return *made, torch.ones(3) * x, torch.get_default_dtype()


def _leaves_other_default(x: Any) -> Any:
    before = torch.ones(4, 3) * x.sum()
    torch.set_default_dtype(torch.float64)
    return before, torch.ones(4, 3) * 2, torch.linspace(0, 1, 4)


def _refused_default(x: Any) -> Any:
    torch.set_default_dtype(torch.int32)
    return x


@pytest.mark.parametrize("make", [capture, ladder.compile])
@pytest.mark.parametrize("program", [_other_default, _leaves_other_default, _refused_default])
def test_the_default_dtype_is_switched_by_the_graph(make: Any, program: Any) -> None:
    fast = make(program)
    try:
        for number in range(3):
            assert _with_default(fast, number) == _with_default(program, number)
    finally:
        torch.set_default_dtype(torch.float32)
    assert fast.outcome == "whole"
    assert fast.calls == {"recorded": 1, "eager": 0}


def _with_default(function: Any, seed: int) -> Any:
    """Return what a function gives, as lists with dtypes, or raises, and the default dtype behind it."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(seed)
    try:
        found = function(torch.randn(3))
    except TypeError as error:
        return str(error), torch.get_default_dtype()
    results = [(item.dtype, item.tolist()) if isinstance(item, torch.Tensor) else item for item in found]
    return results, torch.get_default_dtype()


def _without_versions(x: Any) -> Any:
    with torch.inference_mode():
        y = torch.relu(x)
    return y, y + 1, x * 2


@torch.inference_mode()
def _all_without_versions(x: Any) -> Any:
    return torch.relu(x), x[:1]


def _fails_without_versions(x: Any) -> Any:
    with torch.inference_mode():
        y = torch.relu(x)
    return y * x, y.requires_grad_()


def _inside_only(x: Any) -> Any:
    y = x + 1
    with torch.inference_mode():
        z = y * 2
        with torch.inference_mode(mode=False):
            w = y + torch.is_grad_enabled()
    return z + w, x[:1]


def _left_by_an_error(x: Any) -> Any:
    try:
        with torch.inference_mode():
            x.detach().mul_(2)
            raise KeyError
    except KeyError:
        return (x + torch.is_inference_mode_enabled(),)


def _broken_inside(x: Any) -> Any:
    with torch.inference_mode():
        y = x * 2
        os.getpid()
        z = y + 1
    return (z + 0,)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (_all_without_versions, "whole"),
        (_inside_only, "whole"),
        (_left_by_an_error, "whole"),
        (_broken_inside, "split"),
        (_without_versions, "split"),
        (_fails_without_versions, "split"),
    ],
)
@pytest.mark.parametrize("way", [capture, ladder.compile])
def test_graphs_run_in_the_mode_of_what_they_make(program: Any, outcome: str, way: Any) -> None:
    fast = way(program)
    for number in range(3):
        x, its = (
            torch.full((4,), number - 1.0, requires_grad=program is _fails_without_versions) for _ in range(2)
        )
        assert _kinds(fast, x) == _kinds(program, its)
        assert torch.equal(x, its)
    assert fast.outcome == outcome
    assert torch.is_grad_enabled()


def _kinds(function: Any, x: Any) -> Any:
    try:
        found = function(x)
    except RuntimeError as error:
        return str(error), torch.is_inference_mode_enabled()
    return [(item.is_inference(), item.tolist()) for item in found], torch.is_inference_mode_enabled()


SHOWING = (
    lambda x: x.unflatten(0, (2, -1)),
    lambda x: x.reshape(x.shape),
    lambda x: x.view_as(x),
    lambda x: torch.narrow(x, 0, 0, 2),
    lambda x: x.tensor_split(2)[1],
    lambda x: x.movedim(0, 1),
    lambda x: torch.einsum("ij->ji", x),
    lambda x: x.unsafe_chunk(2)[0],
    lambda x: x.chunk(2)[1],
    lambda x: x.view(torch.float32),
    lambda x: torch.dropout(x, 0.5, train=False),
)
"""What gives views of a matrix, or the matrix itself."""


@pytest.mark.parametrize("source", ["parameter", "result", "made inside"])
@pytest.mark.parametrize(
    ("way", "show"), [*((capture, show) for show in SHOWING), (ladder.compile, SHOWING[0])]
)
def test_views_made_in_inference_mode_are_what_they_are_in_eager(show: Any, way: Any, source: str) -> None:
    def program(x: Any) -> Any:
        y = x * 1 if source == "made inside" else x
        with torch.inference_mode():
            shown = show(y)
        return shown, shown.requires_grad, shown._is_view()

    assert _shown(way(program), source) == _shown(program, source)


def _shown(function: Any, source: str) -> list[Any]:
    """Return what is told of views in calls of a function, and what writing one raises."""
    x = torch.ones(4, 4, requires_grad=True)
    x = x * 2 if source == "result" else x
    told: list[Any] = []
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            shown, *seen = function(x)
        told.append((*seen, shown.is_inference(), shown.data_ptr() == x.data_ptr(), shown.tolist()))
        told.append(grad and (shown.requires_grad, shown._is_view(), shown.is_leaf, str(shown.grad_fn)[:12]))
        try:
            told.append((shown * 2).requires_grad)
            shown.mul_(1)
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_which_accelerator_there_is_is_read() -> None:
    def program(x: Any) -> Any:
        return x * 2, torch.accelerator.current_accelerator()

    fast, x = capture(program), torch.ones(2)
    for _ in range(2):
        found, expected = fast(x), program(x)
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]
    assert fast.outcome == "whole"
