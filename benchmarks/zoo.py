"""Model code of other libraries through capture and plans: graphs, splits, errors and times beside eager.

``python -m benchmarks.zoo [NAME ...] [--table MODULE] [--graphs-only | --both] [--generate] [--steps N]
[--rounds N] [--threads N] [--device NAME] [--quantize TYPE] [--output FILE]``

A name is ``hf/TYPE``, a model type of transformers (its causal language model where it has one),
``timm/NAME`` or ``tv/NAME`` of torchvision. Each is made small from its own configuration, with random
weights, and called with inputs that repeat and change; every call is compared with eager. Reported are also
a call once everything has settled beside eager's (in turns, the least of each), the CPU seconds of all calls
that recorded, and the share of time on Ladder's kernels; ``--threads 1`` counts time of the process alone.
``--graphs-only`` runs captured graphs operator by operator, which tests capture alone; ``--both`` makes the
same calls by ``torch.compile(backend="ladder")`` too; ``--generate`` continues prompts by models that can;
``--steps`` lists the dearest steps beside torch. On ``--device cuda`` cuDNN keeps float32 whole, and
a call lasts until the device is done. ``--table`` takes the models of a module's ``ZOO`` instead:
name -> what makes a model and its inputs. ``--quantize`` quantizes linear layers of each first, eager's too,
in groups of 32. `benchmarks.zoo_many` runs many at once. The libraries are the extra ``zoo``.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.harness import (
    command,
    write_record,
)
from benchmarks.zoo_compare import difference
from benchmarks.zoo_generate import generated
from benchmarks.zoo_speed import beside, by_kind, dearest, on_device, quantized, summary
from ladder.capture import Captured, capture
from ladder.capture.captured import run_as_is
from ladder.capture.python.words import words
from ladder.installation import ladder_version
from ladder.integrations import dynamo

Inputs = dict[str, torch.Tensor]
Made = tuple[torch.nn.Module, list[Inputs]]
Make = Callable[[str], Made]

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "embedding_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "dim": 64,
    "hidden_dim": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "emb_dim": 64,
    "num_heads": 4,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "ffn_dim": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "image_token_id": 126,
}
"""Sizes of configurations, where a configuration has them."""

STATE_SPACE = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
SHIFTED = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}
PARTICULAR: dict[str, dict[str, Any]] = {
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "swin": SHIFTED,
    "swinv2": SHIFTED,
    "convnext": STAGES,
    "convnextv2": STAGES,
    "mamba2": {"num_heads": 8, "expand": 2, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "bamba": {**STATE_SPACE, "attn_layer_indices": [1]},
    "granitemoehybrid": {**STATE_SPACE, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {**STATE_SPACE, "mamba_d_ssm": 128},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 4, "mamba_dt_rank": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
}
"""What the sizes of a configuration must be together."""

HF = words(
    """
    llama mistral qwen2 qwen3 gemma gemma2 phi phi3 stablelm olmo olmo2 starcoder2 cohere cohere2
    granite helium glm glm4 nemotron persimmon smollm3 arcee bitnet mixtral qwen2_moe qwen3_moe olmoe
    granitemoe phimoe gpt_oss gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt codegen biogpt xglm mamba
    mamba2 rwkv bert roberta electra albert distilbert mobilebert deberta deberta-v2 modernbert mpnet
    convbert nystromformer xlm-roberta ernie roformer rembert fnet t5 bart mbart pegasus marian
    blenderbot m2m_100 vit deit beit swin swinv2 dinov2 convnext convnextv2 resnet regnet mobilenet_v1
    mobilenet_v2 poolformer segformer
    apertus exaone4 ernie4_5_moe minimax lfm2 falcon_mamba falcon_h1 nemotron_h bamba jamba recurrent_gemma
    granitemoehybrid olmo3 olmo_hybrid deepseek_v2 vaultgemma diffllama flex_olmo gpt_bigcode ctrl openai-gpt
    cpmant nanochat doge roberta-prelayernorm flaubert ibert megatron-bert splinter squeezebert yoso mra
    canine nomic_bert eurobert esm led umt5 fsmt plbart bigbird_pegasus t5gemma nllb-moe encoder-decoder
    data2vec-vision swiftformer layoutlm markuplm visual_bert flava git llava idefics3 mllama internvl
    dinov3_vit dinov3_convnext ijepa
    camembert bert-generation blenderbot-small tapas gte jina_embeddings_v3 modernbert-decoder ernie4_5
    ministral seed_oss hunyuan_v1_dense minicpm3 jetmoe granitemoeshared glm4_moe minimax_m2 llama4_text
    deepseek_v4 hrm_text cwm mt5 imagegpt siglip_vision_model aimv2_vision_model pixtral glpn dpt vit_mae
    sew sew-d wavlm emu3 aria vipllava aya_vision smolvlm
    """
)
"""Model types of transformers that are run by default."""

TIMM = words(
    """
    resnet18 mobilenetv3_small_100 efficientnet_b0 convnext_atto vit_tiny_patch16_224
    deit_tiny_patch16_224 mixer_s32_224 regnetx_002 ghostnet_100 edgenext_xx_small
    lcnet_050 fasternet_t0 mambaout_femto shvit_s1 selecsls42 gcresnext26ts hgnetv2_b0 swiftformer_xs
    """
)

TORCHVISION = words(
    """
    resnet18 mobilenet_v3_small squeezenet1_1 shufflenet_v2_x0_5 efficientnet_b0 vgg11_bn
    regnet_y_400mf alexnet
    """
)

SHAPES = [(2, 16), (2, 16), (3, 9), (4, 21), (5, 13)]
"""Batches and lengths of the inputs; `ORDER` says which are given when."""
ORDER = (0, 0, 0, 1, 2, 0, 3, 4, 0)
ROUNDS = 60
"""Calls of each that are timed."""
TOLERANCE = 2e-4
"""Of the greatest magnitude of a result in float32, which other orders of sums keep to."""


class AsIs:
    """A backend that runs graphs operator by operator, and takes all that capture gives."""

    conditionals = True
    dynamic_shapes = True
    numbers = False

    def __call__(self, module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        """Return what runs a graph."""
        return run_as_is(module, examples)


def all_names() -> list[str]:
    """Return the models that are run by default."""
    return [*(f"hf/{n}" for n in HF), *(f"timm/{n}" for n in TIMM), *(f"tv/{n}" for n in TORCHVISION)]


def made(name: str) -> Made:
    """Return a model with random weights, and its inputs."""
    library, _, kind = name.partition("/")
    torch.manual_seed(0)
    import_torchvision()
    if library == "hf":
        return _transformers(kind)
    if library == "timm":
        import timm

        model: Any = timm.create_model(kind, pretrained=False)
        size = model.default_cfg.get("input_size", (3, 224, 224))[-1]
        return model.eval(), [{"x": _noise(i, batch, 3, size, size)} for i, (batch, _) in enumerate(SHAPES)]
    import torchvision

    network: Any = torchvision.models.get_model(kind, weights=None)
    return network.eval(), [{"x": _noise(i, batch, 3, 64, 64)} for i, (batch, _) in enumerate(SHAPES)]


_operators: list[Any] = []
"""Libraries of operators that were declared, which live as long as they are held."""


def import_torchvision() -> None:
    """Import torchvision, also where its compiled part is for another torch: no model here needs it."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:  # an operator of the compiled part is missing
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        declared: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        _operators.append(declared)
        import torchvision  # noqa: F401


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _transformers(kind: str) -> Made:
    import transformers

    models: Any = transformers
    config = models.CONFIG_MAPPING[kind](**small_configuration(models.CONFIG_MAPPING[kind](), kind))
    model = _made_of(models, config)
    _enlarge(model)
    return model.eval(), [_inputs_of(model, config, seed) for seed in range(len(SHAPES))]


def _enlarge(model: torch.nn.Module) -> None:
    """Double weights drawn so small that results hardly depend on them: no convolutions that keep magnitudes.

    A batch norm that never trained divides by 1, so those would grow them until gates are steps.
    """
    layers = [m for m in model.modules() if isinstance(m, torch.nn.modules.conv._ConvNd)]
    kept = {id(m.weight) for m in layers if m.weight.norm() >= len(m.weight) ** 0.5}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and id(parameter) not in kept:
                parameter.mul_(2.0)


def small_configuration(default: Any, kind: str) -> dict[str, Any]:
    """Return what makes a configuration small, those of its parts too."""
    given = {
        key: value
        for key, value in SMALL.items()
        if not isinstance(getattr(default, key, ()), list | tuple) and not _is_computed(type(default), key)
    }
    if getattr(default, "num_attention_heads", 0) == getattr(default, "num_key_value_heads", None):
        given["num_key_value_heads"] = given["num_attention_heads"]
    for key in default.sub_configs:
        part = getattr(default, key, None)
        if part is not None:
            given[key] = {"model_type": part.model_type, **small_configuration(part, part.model_type)}
    return {**given, **PARTICULAR.get(kind, {})}


def _is_computed(kind: type, key: str) -> bool:
    found = getattr(kind, key, None)
    return isinstance(found, property) and found.fset is None


def _made_of(models: Any, config: Any) -> Any:
    """Return a model of the first kind that there is."""
    for auto in ("CausalLM", "Seq2SeqLM", "ImageTextToText", "CTC", "MaskedLM"):
        try:
            return getattr(models, f"AutoModelFor{auto}").from_config(config)
        except ValueError:
            continue
    return models.AutoModel.from_config(config)


def _inputs_of(model: Any, config: Any, seed: int) -> Inputs:
    batch, length = SHAPES[seed]
    drawn = torch.Generator().manual_seed(seed)
    asked = inspect.signature(model.forward).parameters
    inputs: Inputs = {}
    for name in (model.main_input_name, "input_ids"):
        if name in asked and name in MADE:
            inputs[name] = MADE[name](config, drawn, batch, length)
    if config.is_encoder_decoder and "decoder_input_ids" in asked:
        inputs["decoder_input_ids"] = torch.randint(3, 128, (batch, 5), generator=drawn)
    if model.main_input_name == "input_ids" and config.model_type in SEEING:
        inputs.update(_with_images(model, config, inputs["input_ids"], drawn))
    return inputs


def _with_images(model: Any, config: Any, tokens: torch.Tensor, drawn: torch.Generator) -> Inputs:
    """Return one image for each row of `tokens`, and the tokens with places for what is seen in it."""
    batch = tokens.shape[0]
    pixels = _pixels(config, drawn, batch, 0)
    if SEEING[config.model_type]:
        pixels = pixels.unsqueeze(1)  # images of each row
    with torch.no_grad():
        seen = model.get_image_features(pixel_values=pixels).pooler_output
    count = sum(len(part.flatten(0, -2)) for part in seen) // batch
    places = torch.full((batch, count), config.image_token_id)
    ids = torch.cat([tokens[:, :2].clamp(max=100), places, tokens[:, 2:].clamp(max=100)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _pixels(config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    part = getattr(config, "vision_config", None) or config
    size, channels = getattr(part, "image_size", 64), getattr(part, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(batch, channels, height, width, generator=drawn)


def _tokens(config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=drawn)


def _frames(config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    """Return what models of audio take: frames by mel bins, the bins first where a convolution takes them."""
    bins = next(
        (
            getattr(config, n)
            for n in ("num_mel_bins", "feature_size", "input_feat_per_channel")
            if hasattr(config, n)
        ),
        80,
    )
    if hasattr(config, "max_source_positions") and config.model_type == "whisper":
        return torch.randn(batch, bins, 2 * config.max_source_positions, generator=drawn)
    return torch.randn(batch, 4 * length, bins, generator=drawn)


def _wave(config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, 400 + 80 * length, generator=drawn)


SEEING = {"llava": False, "vipllava": False, "aya_vision": False, "idefics3": True, "smolvlm": True}
"""Types of models that are given images with their tokens -> whether a row has several."""
MADE: dict[str, Callable[[Any, torch.Generator, int, int], torch.Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _frames,
    "input_values": _wave,
}
"""Name of an argument of a model -> what makes one."""


def called(eager: Any, fast: Any, inputs: list[Inputs], recorded: Callable[[], int]) -> dict[str, Any]:
    """Make all calls beside eager; return the worst difference, and how long calls and records took."""
    worst, seconds, spent = 0.0, [], 0.0
    for number in ORDER:
        torch.manual_seed(0)
        expected = eager(**copy.deepcopy(inputs[number]))
        torch.manual_seed(0)
        given, start, begun = copy.deepcopy(inputs[number]), time.perf_counter(), time.process_time()
        before = recorded()
        found = fast(**given)
        seconds.append(round(time.perf_counter() - start, 3))
        spent += (time.process_time() - begun) * (recorded() > before)
        worst = max(worst, difference(expected, found))
    return {"right": worst <= TOLERANCE, "worst": worst, "seconds": seconds, "compile_s": round(spent, 2)}


def by_dynamo(model: Any, inputs: list[Inputs]) -> dict[str, Any]:
    """Return what the same calls give through torch's own capture; an error is a part of the result."""
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    frames = torch._dynamo.utils.counters["frames"]
    fast = torch.compile(model, backend=dynamo.backend)
    try:
        with torch.no_grad():
            return called(eager, fast, inputs, lambda: frames["total"])
    except Exception as error:
        return {"right": False, "error": f"{type(error).__name__}: {error}"[:500]}


def run(
    name: str,
    *,
    graphs_only: bool,
    both: bool = False,
    rounds: int = ROUNDS,
    make: Make = made,
    generate: bool = False,
    steps: int = 0,
) -> dict[str, Any]:
    """Run one model; return its outcome, the worst difference, splits and times."""
    model, inputs = make(name)
    eager = copy.deepcopy(model)
    fast: Captured = capture(model, backend=AsIs()) if graphs_only else ladder.compile(model)
    with torch.no_grad():
        calls = called(eager, fast, inputs, lambda: fast.calls["recorded"])
        times = dict(zip(("eager_ms", "ladder_ms"), beside(eager, fast, inputs[0], rounds), strict=True))
        shared = {} if graphs_only else by_kind(fast, inputs[0])
        top = dearest(fast, inputs[0], steps) if steps else []
    splits = sorted({f"{record.split}: {record.where[-1]}" for record in fast.records if record.split})
    refused = list(getattr(fast, "refused", []))
    return {
        "name": name,
        "outcome": fast.outcome,
        **calls,
        "splits": splits,
        "refused": refused,
        "ratio": times["ladder_ms"] / times["eager_ms"],
        **times,
        **shared,
        **({"steps": top} if steps else {}),
        **({"dynamo": by_dynamo(*make(name))} if both else {}),
        **({"generate": found} if generate and (found := generated(make(name), rounds)) else {}),
    }


def tabled(module: str) -> dict[str, Callable[[], Any]]:
    """Return the models of another module: name -> what makes a model and its inputs."""
    found: dict[str, Callable[[], Any]] = importlib.import_module(module).ZOO
    return found


def versions_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the versions of what made the rows."""
    libraries = {"hf": "transformers", "timm": "timm", "tv": "torchvision"}
    used = {libraries[row["name"].partition("/")[0]] for row in rows}
    return {"ladder": ladder_version(), **{name: version(name) for name in sorted({"torch", *used})}}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--graphs-only", action="store_true")
    ways.add_argument("--both", action="store_true")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--table")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantize")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    table = tabled(arguments.table) if arguments.table else {}
    make: Make = (lambda name: table[name]()[:2]) if table else made
    make = quantized(make, arguments.quantize) if arguments.quantize else make
    if arguments.device != "cpu":
        make = on_device(make, arguments.device)
    options = {key: getattr(arguments, key) for key in ("graphs_only", "both", "rounds", "generate", "steps")}
    rows = []
    for name in arguments.names or list(table) or all_names():
        try:
            row = run(name, make=make, **options)
        except Exception as error:
            row = {
                "name": name,
                "outcome": "failed",
                "right": False,
                "error": f"{type(error).__name__}: {error}",
            }
            traceback.print_exc(limit=-2)
        rows.append(row)
        ratio, spent, ours = (row.get(key, float("nan")) for key in ("ratio", "compile_s", "ours"))
        print(
            f"{name:36} {row['outcome']:7} {'right' if is_right(row) else 'WRONG'} ×{ratio:.2f} of eager,"
            f" compiled in {spent:.1f} s, {ours:.0%} on our kernels",
            *row.get("splits", [])[:3],
            row.get("error", "")[:150],
            flush=True,
        )
    whole, right = (sum(test(row) for row in rows) for test in (_is_whole, is_right))
    print(f"{len(rows)} models: {whole} in one graph, {right} right", summary(rows), sep="\n")
    if arguments.output is not None:
        report = {"versions": versions_of(rows), "command": command(), "rows": rows}
        write_record(arguments.output, report)


def _is_whole(row: dict[str, Any]) -> bool:
    return bool(row["outcome"] == "whole")


def is_right(row: dict[str, Any]) -> bool:
    """Say whether every call was right, by ``torch.compile`` too where that was asked."""
    return bool(row["right"] and row.get("dynamo", row)["right"])


if __name__ == "__main__":
    main()
