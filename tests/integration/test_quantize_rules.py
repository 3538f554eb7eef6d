"""`quantize_` on modules that callers hook, share, leave unfinished or load in unusual ways."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ladder

pytestmark = pytest.mark.usefixtures("one_schedule")


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()


def test_hooks_and_mode_stay_with_the_layer() -> None:
    model, x = two_layers(), torch.randn(3, 64)
    handle = model[0].register_forward_hook(lambda module, inputs, result: 2 * result)
    model[1].register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    )
    ladder.quantize_(model, "int8", group_size=32)
    assert isinstance(model[0], ladder.Linear)
    assert not any(module.training for module in model.modules())
    first = model[0].forward(x)
    torch.testing.assert_close(model(x), model[1].forward(2 * first + 1))
    handle.remove()
    torch.testing.assert_close(model(x), model[1].forward(first + 1))


def test_a_layer_whose_forward_was_replaced_stays() -> None:
    model = two_layers()
    model[0].forward = lambda x: x
    ladder.quantize_(model, "int8")
    assert type(model[0]) is nn.Linear
    assert [row.reason for row in ladder.quantization(model).kept] == ["its forward was replaced"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (nn.utils.weight_norm, "weight"),
        (nn.utils.spectral_norm, "weight"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight"),
        (lambda layer: prune.l1_unstructured(layer, "bias", 0.5), "bias"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_layers_that_compute_their_weight_stay(change: Callable[[nn.Module], Any], name: str) -> None:
    """Such hooks read parameters of their own at each call, which a quantized layer does not have."""
    model, x = two_layers(), torch.randn(3, 64)
    change(model[0])
    hidden = model.eval()[0](x)
    ladder.quantize_(model, "int8", group_size=32)
    assert [row.reason for row in ladder.quantization(model).kept] == [
        f"its {name} is computed before each call"
    ]
    assert torch.equal(model(x), model[1](hidden))


def test_what_was_put_on_a_layer_stays_on_it() -> None:
    model, x = two_layers(), torch.randn(3, 64)
    layer = model[0]
    layer.gain, layer.part = 2.0, nn.Linear(64, 64)
    layer.register_buffer("shift", torch.ones(64))
    layer.register_forward_hook(lambda m, inputs, y: m.gain * y + m.shift + m.part(*inputs))
    model(x)
    ladder.quantize_(model, "int8", group_size=32)
    new = model[0]
    assert isinstance(new, ladder.Linear)
    assert isinstance(new.part, ladder.Linear)
    assert new.shift is layer.shift
    torch.testing.assert_close(new(x), 2 * new.forward(x) + 1 + new.part(x))
    assert {"0.shift", "0.part.bias"} <= model.state_dict().keys()


def test_an_unknown_type_of_a_cache_is_named_without_a_cache() -> None:
    model = two_layers()
    with pytest.raises(ladder.UnknownNameError, match="type of a KV cache 'int99'; did you mean 'int8'"):
        ladder.quantize_(model, "int8", kv_cache="int99")
    assert type(model[0]) is nn.Linear


def test_sparse_rows_and_weights_are_refused() -> None:
    layer = ladder.Linear.from_linear(nn.Linear(64, 32), "int8", activation="int8")
    with pytest.raises(ladder.DTypeError, match=r"x is torch\.sparse_coo, .* give x\.to_dense\(\)"):
        layer(torch.eye(64).to_sparse())
    with pytest.raises(ladder.DTypeError, match=r"needs a dense matrix, got torch\.sparse_csr"):
        ladder.quantize(torch.eye(64).to_sparse_csr(), "int8")


class Shared(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.places = nn.ModuleDict({"second": self.first})


@pytest.mark.parametrize("pattern", ["first", "places.*"])
def test_patterns_know_every_name_of_a_shared_layer(pattern: str) -> None:
    skipped = ladder.quantize_(Shared(), "int4", skip=pattern)
    assert type(skipped.first) is nn.Linear
    assert not ladder.quantization(skipped).unused
    other = ladder.quantize_(Shared(), "int4", overrides={pattern: "int8"})
    assert other.first is other.places["second"]
    assert other.first.problem.weight == "int8"


def test_layers_without_values_are_named() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(64, 64))
    ladder.quantize_(model, "int4")
    (kept,) = ladder.quantization(model).kept
    assert (kept.name, kept.before, kept.reason) == ("0", 0, "LazyLinear is not torch.nn.Linear itself")
    with torch.device("meta"):
        empty = two_layers()
    with pytest.raises(ladder.DeviceError, match="meta device") as caught:
        ladder.quantize_(empty, "int4")
    assert "layer '0'" in caught.value.__notes__[0]
    with pytest.raises(ladder.DTypeError, match=r"takes a torch\.nn\.Module, got Tensor"):
        ladder.quantize_(torch.zeros(4, 4), "int4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip": [3]}, "skip takes patterns of names"),
        ({"overrides": {3: "int8"}}, "overrides takes patterns of names"),
        ({"filter": "0"}, "filter must be a function"),
    ],
)
def test_rules_of_other_kinds_are_refused(options: dict[str, Any], words: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(ladder.DTypeError, match=words):
        ladder.quantize_(model, **options)
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("bias", [True, False])
def test_a_state_is_assigned_to_a_module_on_the_meta_device(bias: bool) -> None:
    made = ladder.quantize_(nn.Sequential(nn.Linear(64, 8, bias=bias)), "int4", group_size=32)
    with torch.device("meta"):
        empty = nn.Sequential(ladder.Linear(64, 8, bias, weight="int4", group_size=32))
    empty.load_state_dict(made.state_dict(), assign=True)
    x = torch.randn(3, 64)
    assert torch.equal(empty(x), made(x))


def test_the_report_of_a_second_call_has_what_the_first_one_quantized() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    ladder.quantize_(model, "int8", skip=["1", "2"])
    ladder.quantize_(model, "int4", group_size=32, skip=["2"])
    report = ladder.quantization(model)
    assert [(row.name, row.weight) for row in report.quantized] == [("0", "int8"), ("1", "int4_g32")]
    assert len(report.rows) == 3


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("typo", "known: 0, 1"), ("*.1", "did you mean '1'"), ("model.0.down", "known: 0, 1")],
)
def test_an_override_that_names_no_layer_is_refused(pattern: str, hint: str) -> None:
    """Its options would be lost: the layer would be quantized as all others are."""
    model = two_layers()
    with pytest.raises(
        ladder.UnknownNameError, match=f"layer of Sequential in overrides '{re.escape(pattern)}'"
    ) as told:
        ladder.quantize_(model, "int4", group_size=32, overrides={"0": "int8", pattern: "int8"})
    assert hint in str(told.value)
    assert type(model[0]) is nn.Linear


def test_overrides_may_name_what_is_skipped_chosen_before_or_quantized() -> None:
    model = ladder.quantize_(
        two_layers(), "int4", group_size=32, skip="1", overrides={"?": "int8", "1": None}
    )
    assert type(model[1]) is nn.Linear
    ladder.quantize_(model, "int4", group_size=32, overrides={"0": "int8"})
    assert [row.weight for row in ladder.quantization(model).rows] == ["int8_g32", "int4_g32"]


@pytest.mark.parametrize("options", [{}, {"activation": "int8"}])
def test_layers_without_values_answer_on_the_meta_device(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        empty = ladder.Linear(64, 48, group_size=32, dtype=torch.bfloat16, **options)
    moved = ladder.quantize_(two_layers(), "int4", group_size=32, **options).to("meta")
    x = torch.empty(2, 3, 64, device="meta")
    assert (empty(x.bfloat16()).shape, empty(x.bfloat16()).dtype) == ((2, 3, 48), torch.bfloat16)
    assert moved(x).shape == (2, 3, 64)
    with pytest.raises(ladder.LadderError, match="no weight yet"):
        empty(torch.zeros(3, 64))


def test_a_layer_takes_its_input_by_the_name_that_torch_gives_it() -> None:
    convolution = nn.Conv2d(8, 8, 3)
    layers = ladder.Linear.from_linear(nn.Linear(64, 64), "int8"), ladder.Conv.from_conv(convolution, "int8")
    for layer, x in zip(layers, (torch.randn(3, 64), torch.randn(1, 8, 4, 4)), strict=True):
        assert torch.equal(layer(input=x), layer(x))


def test_an_input_without_values_for_a_layer_with_values_is_refused() -> None:
    layer = ladder.Linear.from_linear(nn.Linear(64, 64), "int8")
    with pytest.raises(ladder.LadderError, match="meta"):
        layer(torch.randn(3, 64, device="meta"))


def test_scales_of_other_types_are_options_of_layers() -> None:
    """The error of weights that are too small for float16 scales names the option, which was unknown."""
    model, x = two_layers(), torch.randn(3, 64)
    with torch.no_grad():
        model[1].weight.mul_(1e-9)
    with pytest.raises(ladder.LadderError, match="scale_type='float32'"):
        ladder.quantize_(model, "int4", group_size=32)
    wanted = model(x)
    ladder.quantize_(model, "int8", scale_type="float32", overrides={"0": {"scaling": "absmax"}})
    torch.testing.assert_close(model(x) - model[1].bias, wanted - model[1].bias, atol=5e-11, rtol=0.05)
    assert model[1].canonical.scale_type == "float32"
