"""Branches on values of tensors: one graph where both sides change nothing, the same results everywhere."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from capture_world import normal, snapshot
from torch import nn

import ladder
from ladder.capture import capture
from ladder.capture.trace.conditionals import Unrecorded, choose


def two_sides(x, log):
    h = x.relu() + 1
    h = h * 2 if h.sum() > 6 else h - 1
    return h.cos(), h


def other_structures(x, log):
    if x.sum() > 0:
        return {"a": x * 2, "b": [x, x + 1]}
    return (x - 1, "negative", 3)


def nested(x, log):
    if x.sum() > 0:
        if x.max() > 2:
            return x / x.max(), 1
        return x * 2, 2
    if x.min() < -2 or not (x.mean() > -1):
        return x - x.min(), 3
    return x, 4


def one_after_another(x, log):
    y = x.exp() if x.sum() > 0 else x.abs()
    z = y + 1 if y.max() < 4 else y - 1
    return z.sqrt() if (z > 0).all() else z


def seldom(x, log):
    if not torch.isfinite(x).all():
        return None
    return x.softmax(0)


def checked(x, log):
    assert torch.isfinite(x).all(), "not finite"
    return x.softmax(0)


def raises_on_one_side(x, log):
    if x.sum() > 4:
        raise ValueError(f"{x.shape[0]} values")
    return x + 1


def effect_on_one_side(x, log):
    y = x * 2
    if y.sum() > 0:
        log.append("positive")
    return y + 1


def effect_before(x, log):
    log.append("called")
    return x * 2 if x.sum() > 0 else x - 1


def writes_on_both_sides(x, log):
    y = x.clone()
    if x.sum() > 0:
        x.mul_(2)
    else:
        x.zero_()
    return x + y


def writes_what_it_made(x, log):
    if x.sum() > 0:
        y = torch.zeros(4)
        y[1:3] = x[:2]
    else:
        y = x.clone().neg_()
    return y


def aliases(x, log):
    h = x + 1
    if h.sum() > 4:
        return h, h, h[:2], x
    return h.view(2, 2), x[1:], x, h


def bools_of_operators(x, log):
    if torch.equal(x, x.abs()) or torch.allclose(x, x.round()):
        return x * 3
    return x.sign() if (x == 0).any().item() else x - 3


def loops(x, log):
    for step in range(3):
        x = x / 2 if x.norm() > 4 else x + step
    return x


def under_no_grad(x, log):
    if x.sum() > 0:
        with torch.no_grad():
            return x * 2
    return x * 3


def draws_on_one_side(x, log):
    return x + torch.rand(4) if x.sum() > 0 else x


def draws_before(x, log):
    y = x + torch.rand(4)
    return y * 2 if x.sum() > 0 else y


def unequal_shapes(x, log):
    kept = x[x > 0]
    if kept.sum() > 3:
        return kept
    return x.nonzero()


def closes_over(x, log):
    scale = 2.0

    def positive():
        return x * scale

    def negative():
        nonlocal scale
        scale = 3.0
        return x * scale

    return (positive if x.sum() > 0 else negative)(), scale


WHOLE = (two_sides, other_structures, nested, seldom, effect_before, writes_what_it_made, aliases)
WHOLE += (bools_of_operators, draws_before, loops)
SPLIT = (raises_on_one_side, effect_on_one_side, writes_on_both_sides, draws_on_one_side)
OTHERS = (one_after_another, under_no_grad, closes_over, unequal_shapes)


def inputs(number):
    if number % 9 == 8:
        return torch.tensor([1.0, 2.0, 0.0, 3.0])
    return normal(4, seed=number) * (1 + number % 3) + (number % 5 - 2)


def outcome(function, x, log):
    torch.manual_seed(0)
    try:
        result = function(x, log)
    except Exception as error:  # the comparison is of exceptions too
        result = repr(error)
    alike = [a is b for a, b in itertools.combinations(flat((result, x)), 2)]
    return repr(snapshot((result, x, log, torch.rand(2)))), alike, memory((result, x))


def flat(value):
    if isinstance(value, dict):
        value = tuple(value.values())
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, tuple | list) else [value]


def memory(value):
    starts = [leaf.untyped_storage().data_ptr() for leaf in flat(value) if isinstance(leaf, torch.Tensor)]
    return [starts.index(start) for start in starts]


@pytest.mark.parametrize("program", WHOLE + SPLIT + OTHERS, ids=lambda program: program.__name__)
def test_same_as_without_capture(program):
    captured, logs = capture(program), ([], [])
    for number in range(30):
        expected = outcome(program, inputs(number), logs[0])
        assert outcome(captured, inputs(number), logs[1]) == expected, number
    recorded = captured.calls["recorded"]
    for number in range(9 if program in WHOLE else 0):
        outcome(captured, inputs(number), logs[1])
    assert captured.calls == {"recorded": recorded, "eager": 0}
    if program in WHOLE:
        assert captured.outcome == "whole", captured.explain()
        assert "conditional: by " in captured.explain()
    if program in SPLIT:
        assert captured.outcome == "split"


def test_a_side_that_was_never_taken_is_recorded_when_it_is():
    captured = capture(seldom)
    for _ in range(3):
        captured(torch.ones(4), [])
    assert "true: 1 operators, false: not known" in captured.explain()
    assert captured(torch.full((4,), float("nan")), []) is None
    assert torch.equal(captured(torch.ones(4), []), torch.ones(4) / 4)
    with pytest.raises(Unrecorded):
        choose(torch.tensor(True), None, tuple, ())


def test_a_side_that_only_raises_is_no_branch():
    captured = capture(checked)
    for _ in range(8):
        assert torch.equal(captured(torch.ones(4), []), torch.ones(4) / 4)
        assert captured.outcome == "whole"
        assert captured.calls == {"recorded": 1, "eager": 0}
    assert "conditional: by " not in captured.explain()
    for _ in range(8):
        with pytest.raises(AssertionError, match="not finite"):
            captured(torch.full((4,), float("nan")), [])
        assert torch.equal(captured(torch.ones(4), []), torch.ones(4) / 4)


def test_what_a_side_reads_is_guarded():
    scales = {"high": 2.0, "low": 3.0}
    captured = capture(lambda x: x * scales["high"] if x.sum() > 0 else x * scales["low"])
    one = torch.ones(2)
    for x in (one, -one, one, -one):
        captured(x)
    assert captured.outcome == "whole"
    scales["low"] = 5.0
    assert captured(one).tolist() == [2, 2]
    assert captured(-one).tolist() == [-5, -5]


def test_gradients_go_through_the_side_that_is_taken():
    weight = torch.ones(3, requires_grad=True)
    captured = capture(lambda x: (x * weight).exp() if x.sum() > 0 else x / weight)
    for x in (torch.ones(3), -torch.ones(3)) * 3:
        (grad,) = torch.autograd.grad(captured(x).sum(), weight)
        torch.testing.assert_close(grad, torch.exp(x) if x.sum() > 0 else -x)
    assert captured.outcome == "whole"


def test_nothing_of_a_side_lives_on():
    seen = []

    class Held:
        pass

    def program(x):
        y = x * 2 if x.sum() > 0 else x * 3
        held = Held()
        held.x = y
        return held

    captured = capture(program)
    for x in (torch.ones(2), -torch.ones(2)) * 3:
        seen.append(weakref.ref(captured(x)))
        assert seen[-1]() is None
    assert captured.outcome == "whole"


def test_no_hook_of_the_program_sees_a_side_or_a_loop():
    def program(x):
        for _ in range(4):
            x = (x + 1) * x
        return x * 2 if x.sum() > 0 else x * 3

    captured, seen = capture(program), []
    for x in (torch.ones(2), -torch.ones(2)) * 3:
        captured(x)
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module))):
        captured(torch.ones(2))
    assert seen == []
    assert "choose" in captured.graphs[0].code
    assert "repeat" in captured.graphs[0].code


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = torch.relu(self.first(x))
        if h.mean() > 0.3:
            return self.second(h).softmax(-1), h
        return h * torch.sigmoid(h), h


def test_plans_of_both_sides():
    model = Gated()
    compiled = ladder.compile(model)
    with torch.no_grad():
        for number in range(8):
            x = normal(4, 16, seed=number) * (3 if number % 2 else 0.1)
            for mine, theirs in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert compiled.outcome == "whole"
    assert not compiled.refused
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("program", [seldom, nested])
def test_a_side_that_computes_nothing_is_no_refused_graph(program):
    fast = ladder.compile(program)
    for x in (torch.ones(3), torch.tensor([3.0, torch.inf, 1.0]), -torch.ones(3) / 4, -torch.ones(3)) * 4:
        expected, found = program(x, []), fast(x, [])
        assert str(found) == str(expected)
    assert fast.refused == []


def checks_in_a_row(x):
    """Like validation of arguments: checks in a row that raise."""
    for _ in range(6):
        x = x * 1.5
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
    return torch.relu(x)


def gradients_switched_on_a_side(x):
    """Like a lazy property of ``torch.distributions``."""
    if torch.isnan(x).any():
        raise ValueError("not a number")
    with torch.enable_grad():
        y = x * 2
    return y + torch.is_grad_enabled()


def categorical(x):
    return torch.distributions.Categorical(logits=x, validate_args=True).entropy()


@pytest.mark.parametrize("way", [capture, ladder.compile])
@pytest.mark.parametrize("program", [checks_in_a_row, gradients_switched_on_a_side, categorical])
def test_checks_in_a_row_are_one_graph(program, way):
    fast = way(program)
    for seed in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert torch.allclose(fast(x), program(x), rtol=1e-6)
            assert not torch.is_grad_enabled()
    assert fast.outcome == "whole"
    with pytest.raises(ValueError, match=r"not |invalid"):
        fast(torch.full((3, 8), torch.nan))
    assert torch.equal(fast(x), program(x))


def error_while_gradients_are_switched(x):
    if x.sum() > 0:
        with torch.enable_grad():
            if x.max() > 1.5:
                raise ValueError("too large")
            return x + 1
    return x


def test_an_error_on_a_side_leaves_the_state_of_torch():
    fast = capture(error_while_gradients_are_switched)
    for seed in range(14):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert _told(fast, x) == _told(error_while_gradients_are_switched, x)


def _told(function, x):
    try:
        found = function(x).tolist()
    except ValueError as error:
        found = str(error)
    return found, torch.is_grad_enabled()


def test_gradients_recorded_on_a_side_keep_a_graph_in_torch():
    layer = torch.nn.Linear(8, 8)

    def program(x):
        if torch.isnan(x).any():
            raise ValueError("not a number")
        with torch.enable_grad():
            return layer(x)

    fast = ladder.compile(program)
    for _ in range(3):
        with torch.no_grad():
            assert fast(torch.ones(2, 8)).requires_grad


class Flagged(nn.Module):
    """Sets itself up in a first call, and takes its layers by a mask."""

    def __init__(self, ready):
        super().__init__()
        self.register_buffer("ready", torch.tensor([ready]))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.mask = torch.tensor([True, False, True])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.scale.copy_(x.mean(0))
            self.ready.fill_(True)
        for number, taken in enumerate(self.mask):
            x = x * self.scale if taken else x + number
        self.calls += 1
        return -x if self.calls % 3 == 0 else x


@pytest.mark.parametrize("ready", [True, False])
def test_flags_and_masks_may_change(ready):
    plain, held = Flagged(ready), Flagged(ready)
    captured = capture(held)
    for number in range(12):
        x = normal(2 + number % 2, 4, seed=number)
        for model in (plain, held) if number in (5, 9) else ():
            model.mask[1] = number == 5
        assert torch.equal(captured(x), plain(x)), number
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffer, held.get_buffer(name)), (number, name)


def test_flags_are_assumed_and_not_branched_on():
    model = Flagged(ready=True)
    captured = capture(lambda x: x * model.scale if model.ready & model.mask[0] else x)
    for _ in range(2):
        assert captured(torch.ones(4)).tolist() == [1] * 4
    assert (captured.outcome, captured.calls["recorded"]) == ("whole", 1)
    assert "conditional" not in captured.explain()
    model.ready.fill_(False)
    model.scale.fill_(2)
    assert captured(torch.ones(4)).tolist() == [1] * 4
    model.ready.fill_(True)
    assert captured(torch.ones(4)).tolist() == [2] * 4
