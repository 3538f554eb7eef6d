"""Model code of transformers that nobody here wrote: each in one graph, and every call as without capture."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import zoo_every
from benchmarks.forked import rows_of
from benchmarks.zoo import HF, TOLERANCE, AsIs, made, run
from benchmarks.zoo_speed import OURS
from ladder.capture import capture

GRAPHS_ONLY = [
    *("hf/llama", "hf/gemma2", "hf/gpt2", "hf/mixtral", "hf/mamba", "hf/bert", "hf/albert", "hf/modernbert"),
    *("hf/t5", "hf/vit", "hf/resnet"),
]


@pytest.mark.costly
@pytest.mark.parametrize("name", GRAPHS_ONLY)
def test_one_graph(name: str) -> None:
    row = run(name, graphs_only=True, rounds=1)
    assert (row["outcome"], row["right"]) == ("whole", True), row


@pytest.mark.costly
def test_plan() -> None:
    row = run("hf/qwen2", graphs_only=False, rounds=1, steps=40, generate=True)
    assert (row["outcome"], row["right"], row["refused"]) == ("whole", True, []), row
    assert "chain" in row["us"]
    assert {"product", "rows"} & row["us"].keys()
    assert 0 < row["ours"] < row["ours_where_any"] <= 1
    assert row["compile_s"] > 0
    assert all(("torch_us" in step) == (step["kind"] in OURS) for step in row["steps"])
    generated = row["generate"]
    assert (generated["equal"], generated["recorded"][1:]) == (generated["of"], [0, 0, 0]), generated


@pytest.mark.parametrize("name", ["hf/regnet", "hf/resnet", "hf/mobilenet_v2", "hf/convnextv2"])
def test_models_are_well_conditioned(name: str) -> None:
    """Rounding of eager itself stays far below what calls are judged by."""
    pytest.importorskip("torchvision")
    model, inputs = made(name)
    with torch.no_grad():
        found = model(**inputs[0])[0]
        exact = model.double()(**{key: value.double() for key, value in inputs[0].items()})[0]
    assert (found - exact).abs().max() <= TOLERANCE / 20 * exact.abs().max()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_generate(way: str) -> None:
    model: Any
    model, inputs = made("hf/llama")
    model.generation_config.pad_token_id = 0
    fast: Any = capture(model, backend=AsIs())
    prompts = [
        inputs[0]["input_ids"],
        torch.cat([torch.zeros(3, 4, dtype=torch.int64), inputs[2]["input_ids"]], 1),
    ]
    for prompt in prompts:
        found = []
        for each in (model, fast):
            torch.manual_seed(3)
            found.append(each.generate(prompt, max_new_tokens=5, **WAYS[way]))
        assert torch.equal(*found)
    assert (fast.outcome, fast.within.calls["eager"]) == ("whole", 0)


@pytest.mark.parametrize("name", [f"hf/{kind}" for kind in HF])
def test_every_model(name: str, long_test: None) -> None:
    pytest.importorskip("torchvision")
    assert run(name, graphs_only=False, rounds=1)["right"]


@pytest.mark.costly
def test_both_ways() -> None:
    """A gate behind attention takes its result as a view, which torch's own strides allow."""
    row = run("hf/afmoe", graphs_only=False, both=True, rounds=1)
    assert (row["outcome"], row["right"], row["refused"]) == ("whole", True, []), row
    assert row["dynamo"]["right"], row


@pytest.mark.costly
@pytest.mark.parametrize("name", ["whisper", "qwen2_vl", "deepseek_v3"])
def test_a_model_that_no_list_names(name: str) -> None:
    row = run(name, graphs_only=True, rounds=0, make=zoo_every.made)
    assert (row["outcome"], row["right"]) == ("whole", True), row


@pytest.mark.parametrize("name", ["embedding_gemma2_text", "dory"])
def test_small_configurations_of_layers_that_differ(name: str) -> None:
    """Heads that vary by layer, which no field of all layers tells; numbers of layers that must add up."""
    transformers = pytest.importorskip("transformers", minversion="5")
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    made = [*zoo_every.configurations(transformers.CONFIG_MAPPING[name])]
    assert any(not isinstance(each, Exception) and each.hidden_size == 64 for each in made)


@pytest.mark.costly
def test_rows_of_models_that_no_list_names(tmp_path: Path) -> None:
    work = partial(zoo_every.outcome, options={"eager": True, "device": "cpu"})

    def verdicts(seconds: float) -> dict[str, str]:
        names = ["hf/llama", "hf/edgetam_video"]
        rows = [*rows_of(names, work, tmp_path, jobs=2, limit=200.0, seconds=seconds)]
        assert all("inference_session" in row["error"] for row in rows if row["outcome"] == "not made")
        return {row["name"]: zoo_every.verdict(row) for row in rows}

    assert verdicts(200.0) == {"hf/llama": "made", "hf/edgetam_video": "not made"}
    assert verdicts(0.0) == dict.fromkeys(("hf/llama", "hf/edgetam_video"), "not begun")
