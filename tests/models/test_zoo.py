"""Model code of transformers that nobody here wrote: each in one graph, and every call as without capture."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.zoo import HF, run

GRAPHS_ONLY = [
    *("hf/llama", "hf/gemma2", "hf/gpt2", "hf/mixtral", "hf/mamba", "hf/bert", "hf/albert", "hf/modernbert"),
    *("hf/t5", "hf/vit", "hf/resnet"),
]


@pytest.mark.parametrize("name", GRAPHS_ONLY)
def test_one_graph(name: str) -> None:
    row = run(name, graphs_only=True)
    assert (row["outcome"], row["right"]) == ("whole", True), row


def test_plan() -> None:
    row = run("hf/qwen2", graphs_only=False)
    assert (row["outcome"], row["right"], row["refused"]) == ("whole", True, []), row


@pytest.mark.parametrize("name", [f"hf/{kind}" for kind in HF])
def test_every_model(name: str, long_test: None) -> None:
    pytest.importorskip("torchvision")
    assert run(name, graphs_only=False)["right"]
