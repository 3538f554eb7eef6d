"""`ladder.superoptimize` of any function of tensors: with effects, of values, of any layout; its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ladder
from ladder.api.superopt_calls import require_pure
from ladder.api.tensor_program import recorded
from ladder.superopt.generator import Limits
from tile_types.errors import ConversionError, DTypeError, LadderError, ShapeError

SQUARE = Limits(operators=6, workers=1, split=False, proofs=2)


@pytest.fixture(autouse=True)
def slow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of these sizes are faster as torch runs them: what is tested is the kernels."""
    for module in ("superopt_task", "superoptimize"):
        monkeypatch.setattr(f"ladder.api.{module}.torch_seconds", lambda function, inputs: 1.0)


@pytest.fixture(scope="module")
def cache(kernels_of_the_run):
    with ladder.knobs.override(cache_dir=kernels_of_the_run):
        yield


def draw(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.5).half()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v


def fused_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ w) * 2.0


def two_ways(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Looks at a value, and goes on by it."""
    y = fused_product(x, w)
    return y + 1.0 if y[0, 0].item() > 0 else y - 1.0


def heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return attention(q, k, v)


def columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Has as many columns as there are positive values in a row."""
    return x[:, w[0] > 0] * 2.0


def rounded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y.half() * 2.0


WHATEVER = {
    "cos has no counterpart": lambda x, w: torch.cos(x @ w),
    "the result is torch.float32": lambda x, w: (x @ w).float(),
    "expand has no counterpart": lambda x, w: x.sum(-1, keepdim=True).expand(16, 16) @ w,
    "getitem has no counterpart": lambda x, w: x[:, None] * w,
    "topk": lambda x, w: torch.topk(x @ w, 3).values,
    "glu": lambda x, w: F.glu(x @ w),
    "mish": lambda x, w: F.mish(x @ w) * 2.0,
    "group_norm": lambda x, w: F.group_norm(x @ w, 4),
    "amin": lambda x, w: (x - x.amin(-1, keepdim=True)) @ w,
    "a maximum alone": lambda x, w: torch.exp(x - x.amax(-1, keepdim=True)) + w * 0.0,
    "a tuple": lambda x, w: (x @ w).max(-1),
    "one result twice": lambda x, w: (fused_product(x, w),) * 2,
    "the input": lambda x, w: x,
    "a number": lambda x, w: float((x @ w).sum()),
    "a mapping": lambda x, w: {"y": fused_product(x, w)},
    "values that are read": two_ways,
    "slices that kernels read": heads,
    "shapes of values": columns,
    "another type inside": rounded,
    "vmap": lambda x, w: torch.vmap(lambda row: torch.relu(row @ w))(x),
    "no number but the generator's": lambda x, w: F.dropout(x, 0.5, True) @ w,
}


@pytest.mark.parametrize("name", WHATEVER)
def test_any_function_runs(name: str, cache: None) -> None:
    """In parts, though torch would be faster here, or as torch runs it; other values take another way."""
    function, state = WHATEVER[name], torch.get_rng_state()
    wide = draw(16, 48) if function is heads else draw(16, 16)
    found = ladder.superoptimize(function, [draw(16, 16), wide], limits=SQUARE, trials=1)
    assert torch.equal(torch.get_rng_state(), state)
    for x, w in ((draw(16, 16), wide), (draw(32, 16)[16:], -wide)):
        results = []
        for call in (found, function):
            torch.manual_seed(5)
            results.append(call(x, w))
        torch.set_rng_state(state)
        assert type(results[0]) is type(results[1])
        torch.testing.assert_close(*results, rtol=4e-3, atol=4e-3, check_stride=True)


def test_arguments_may_share_memory(cache: None) -> None:
    """Optimised with one tensor for both inputs, called with distinct ones, views of one, and a result."""
    one, other = draw(16, 16).float(), draw(16, 32)[:, :16].contiguous().float()
    found = ladder.superoptimize(fused_product, [one, one], limits=SQUARE, trials=1)
    both = torch.cat([one.reshape(-1), other.reshape(-1)])
    overlapping = both[:256].view(16, 16), both[64:320].view(16, 16)
    for x, w in ((one, one), (one, other), (other, one), overlapping, (found(one, other), one)):
        assert torch.allclose(found(x, w), fused_product(x, w), rtol=1e-5, atol=1e-6)


AS_TORCH = {
    "input 0 has no elements": [draw(0, 16), draw(16, 16)],
    "input 0 is torch.float64": [draw(16, 16).double(), draw(16, 16).double()],
    "input 0 is torch.int64": [torch.arange(16).view(4, 4), torch.arange(16).view(4, 4)],
    "input 0 is of torch.sparse_coo": [draw(16, 16).float().to_sparse(), draw(16, 4).float()],
}


@pytest.mark.parametrize("message", AS_TORCH)
def test_inputs_that_no_kernel_takes_are_torchs(message: str) -> None:
    x, w = AS_TORCH[message]
    found = ladder.superoptimize(torch.matmul, [x, w])
    assert torch.equal(found(x, w), x @ w)
    (part,) = found.parts
    assert message in part.reason
    assert "torch runs it as it is" in str(found)


def test_bare_numbers_are_inputs(cache: None) -> None:
    """Tiles have axes: what takes a tensor without is compiled, the rest is proved."""
    function = lambda x, w, scale: fused_product(x, w) * scale  # noqa: E731
    inputs = [draw(16, 16), draw(16, 16), torch.tensor(3.0).half()]
    found = ladder.superoptimize(function, inputs, limits=SQUARE, trials=1)
    assert [bool(part.kernels) for part in found.parts] == [True, False]
    torch.testing.assert_close(found(*inputs), function(*inputs), rtol=2e-3, atol=1e-3)


def test_inputs_that_are_not_contiguous_are_copied(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first or in later calls; the copies count as kernels' time."""
    x, w = draw(32, 16).t()[::2], draw(1, 32).expand(32, 32)
    found = ladder.superoptimize(fused_product, [x, w], limits=SQUARE, trials=1)
    assert "copied for kernels, since not contiguous: input 0, 1" in str(found)
    shifted = torch.cat([draw(1).flatten(), x.flatten()])[1:].view(8, 32)
    for given in ((x, w), (x.contiguous(), w), (x, draw(32, 32).t()), (shifted, w)):
        torch.testing.assert_close(found(*given), fused_product(*given), rtol=2e-3, atol=1e-3)
    monkeypatch.setattr(
        "ladder.api.superoptimize.torch_seconds", lambda call, given: 0.5 if call is fused_product else 1.0
    )
    assert ladder.superoptimize(fused_product, [x, w], limits=SQUARE, trials=1).unfused is fused_product


def test_functions_that_ask_how_arguments_lie(cache: None) -> None:
    asking = lambda x, w: fused_product(x, w) * (2.0 if x.is_contiguous() else 3.0)  # noqa: E731
    x, w = draw(16, 16).t(), draw(16, 16)
    found = ladder.superoptimize(asking, [x, w], limits=SQUARE, trials=1)
    torch.testing.assert_close(found(x, w), asking(x, w), rtol=2e-3, atol=1e-3)
    with pytest.raises(ConversionError, match="something else where its input 0 is contiguous"):
        found(x.contiguous(), w)
    with pytest.raises(ConversionError, match=r"something else where its input 0 is of strides \(1, 16\)"):
        ladder.superoptimize(asking, [w, w], limits=SQUARE, trials=1)(x, w)


WRONG: dict[str, dict[str, Any]] = {
    "constants are numbers of inputs, 0 to 1; got 2": {"constants": [2]},
    "constants is a list of numbers of inputs, got int": {"constants": 0},
    "unknown device 'cuda/sm_9z'": {"target": "cuda/sm_9z"},
    "limits must be ladder.superopt.generator.Limits, got int": {"limits": 3},
    "trials must be 1 or more, got 0": {"trials": 0},
    "trials": {"trials": "4"},
    "inputs is empty": {"inputs": []},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_errors_of_their_own(message: str) -> None:
    given = {"inputs": [draw(16, 16), draw(16, 16)], **WRONG[message]}
    with pytest.raises(LadderError, match=message):
        ladder.superoptimize(fused_product, **given)


def test_inputs_that_are_not_used_change_nothing(cache: None) -> None:
    x, w = draw(16, 16), draw(16, 16) * 2
    found = ladder.superoptimize(
        lambda x, spare, w: fused_product(x, w), [x, draw(4), w], limits=SQUARE, trials=1
    )
    assert found.parts[0].kernels is not None
    torch.testing.assert_close(found(x, draw(4), w), fused_product(x, w), rtol=2e-2, atol=2e-2)


def test_functions_that_ask_whether_arguments_are_one_tensor(cache: None) -> None:
    def asking(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ w) * (2.0 if x is w else 3.0)

    x, w = draw(16, 16).float(), draw(16, 32)[:, :16].contiguous().float()
    found = ladder.superoptimize(asking, [x, w], limits=SQUARE, trials=1)
    assert torch.allclose(found(x, w), asking(x, w), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConversionError, match="something else where its input 1 is input 0"):
        found(x, x)
    assert torch.equal(ladder.superoptimize(asking, [x, x], trials=1)(x, w), asking(x, w))


def test_calls_are_held_to_the_contract(cache: None) -> None:
    x, w = draw(16, 16).float(), draw(16, 16).float()
    found = ladder.superoptimize(fused_product, [x, w], limits=SQUARE, trials=1)
    with pytest.raises(ConversionError, match="requires gradients"):
        found(x.clone().requires_grad_(), w)
    with torch.no_grad():
        assert not found(x.clone().requires_grad_(), w).requires_grad
    with pytest.raises(ShapeError, match="takes 2 tensors, got 1"):
        found(x)
    with pytest.raises(ShapeError, match="optimised for"):
        found(x[:8], w)
    with pytest.raises(DTypeError, match=r"optimised for torch\.float32"):
        found(x.half(), w.half())


def shifted_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its view sees what is added later."""
    y = x @ w
    turned = y.t()
    y += 1.0
    return turned * 2.0


EFFECTS = {
    "mul_ writes in place": lambda x, w: x.mul_(2) * w + w,
    "setitem writes in place": lambda x, w: (x.__setitem__(0, 1.0), x * w + w)[1],
    "add writes in place": lambda x, w: torch.add(x, w, out=x) * w,
    "iadd writes in place": shifted_product,
    "silu writes in place": lambda x, w: (lambda y: F.silu(y, inplace=True) + y)(x @ w),
}


@pytest.mark.parametrize("message", EFFECTS)
def test_effects_are_torchs_and_examples_stay(message: str) -> None:
    x, w = draw(16, 16), draw(16, 16)
    before = x.clone(), w.clone()
    found = ladder.superoptimize(EFFECTS[message], [x, w], trials=1)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    assert x._version == 0
    assert message in found.parts[0].reason
    assert torch.equal(found(x, w), EFFECTS[message](*before))
    assert torch.equal(x, before[0])


def test_operators_named_after_keywords_write_nothing() -> None:
    inputs = [draw(16, 16), draw(16, 16)]
    found = recorded(lambda x, w: torch.where((x > 0) & (w > 0), x, w), inputs)
    require_pure(found, inputs, inputs)
