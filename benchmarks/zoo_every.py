"""A tiny random model of every configuration class of transformers, through `benchmarks.zoo`.

``python -m benchmarks.zoo_every [TYPE ...] [--jobs N] [--limit S] [--seconds S] [--output FILE]
[--device NAME] [--graphs-only | --both | --eager]``

No list names the models: `transformers.CONFIG_MAPPING` does. Sizes of a configuration are shrunk by what its
fields are called, inputs follow from the signature of ``forward``; the first of several shrinkings and sets
of inputs that runs eagerly is taken, and what none of them fits is listed with the errors. Each model runs in
a process of its own, forked from one that has imported the libraries, for ``--limit`` seconds at most; what
has not begun after ``--seconds`` is left out. ``--eager`` only makes the models.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.forked import rows_of, write_row
from benchmarks.harness import command, write_record
from benchmarks.zoo import Inputs, Made, called, run, versions_of
from benchmarks.zoo_inputs import inputs_of, told
from benchmarks.zoo_speed import on_device

LAYERS = (
    r"(^|_)(num_|n_)?(hidden_|spatial_|temporal_|lstm_|residual_)?(layers?|depth|blocks)$|num_encoder_blocks"
)
WIDTHS: tuple[tuple[str, int], ...] = (
    (r"(key_value|kv).*heads$", 2),
    (r"heads$|^n_head$|num_head$|attention_heads", 4),
    (r"(^|_)rotary_dim$", 8),
    (r"(head_dim|dim_head|d_head|d_kv|kv_channels|head_size)$", 16),
    (
        r"(intermediate_size|ffn_dim|d_ff|mlp_dim|hidden_dim|d_inner|ffn_hidden_size|feedforward_dim|linear_units)$",
        128,
    ),
    (r"lora_rank$", 16),
    (
        r"(hidden_size|d_model|embed_dim|embedding_size|n_embd|emb_dim|projection_dim|embedding_dim|_hidden_size"
        r"|^dim|fpn_hidden_size|out_hidden_size|query_pre_attn_scalar|upsample_initial_channel|model_dim|output_dim"
        r"|projector_dim|hidden_size_\w+|ple_embed_dim|decoder_dim|word_embed_proj_dim)$",
        64,
    ),
)
"""Pattern of a field's name -> size."""
WIDE: tuple[tuple[str, int], ...] = tuple(
    (pattern, {64: 256, 128: 256}.get(size, size)) for pattern, size in WIDTHS if "head_dim" not in pattern
)
"""The same with heads as wide as by default, which other fields may have to add up to."""
COUNTS: tuple[tuple[str, int], ...] = (
    (r"experts_per_tok(en)?$|moe_topk$|moe_k$", 2),
    (r"(num|n)_(local_|routed_)?experts$|moe_num_experts$", 4),
    (r"n_group$|topk_group$|num_expert_group$", 1),
    (r"vocab_size$", 128),
)
SPATIAL: tuple[tuple[str, int], ...] = (
    (r"image_size$|crop_size$", 32),
    (r"(^|_)patch_size$", 8),
    (r"max_source_positions$", 64),
    (r"num_frames$", 4),
    (r"num_position_embeddings$", 16),
)
PLACES = r"ind(ex|ic)es$|idxs$|(?<!num)_layers$"
"""Names of lists that say which layers do something."""
TOKEN = r"token_(id|index)$"
"""Names of fields that hold the number of a token."""
FREE = 120
"""The first token that inputs do not hold, from which configurations count theirs."""
ALONE = 100_000_000
"""Parameters of the largest model that is made."""


def shrunk(config: Any, layers: int, kinds: tuple[str, ...], tokens: dict[str, int]) -> dict[str, Any]:
    """Return what makes a configuration small: `layers` layers, and the sizes of `kinds` of fields."""
    tables = {"widths": WIDTHS, "wide": WIDE, "counts": COUNTS, "spatial": SPATIAL}
    given: dict[str, Any] = {}
    before = read(config, "num_hidden_layers")
    number = partial(_number, config=config, layers=layers, tables=[tables[kind] for kind in kinds])
    for name, value in config.to_dict().items():
        part: Any = read(config, name)
        if hasattr(part, "sub_configs"):
            given[name] = {**shrunk(part, layers, kinds, tokens), "model_type": part.model_type}
        elif isinstance(value, bool) or _is_computed(type(config), name):
            continue
        elif isinstance(value, int):
            given.update(number(name, value, tokens=tokens))
        elif name == "per_layer_config" and value:  # what one layer has otherwise, the last that is kept
            unlike = next(iter(value.values()))
            small = [number(key, item, tokens=tokens) or {key: item} for key, item in unlike.items()]
            given[name] = {str(layers - 1): {key: item for each in small for key, item in each.items()}}
        elif isinstance(value, list) and isinstance(before, int) and len(value) == before:
            given[name] = _kinds_first(value, layers)
        elif isinstance(value, list) and re.search(PLACES, name) and not hasattr(config, "depths"):
            numbers = all(isinstance(item, int) for item in value)
            given[name] = sorted({min(item, layers - 1) for item in value}) if numbers else value
        elif isinstance(value, dict) and "mrope_section" in value and "widths" in kinds:
            given[name] = {**value, "mrope_section": [2, 3, 3]}
    return given


def read(config: Any, name: str) -> Any:
    """Return a field; None if there is none, or if layers have values of their own."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer where a field varies by layer
        return None


def _is_computed(kind: type, key: str) -> bool:
    found = getattr(kind, key, None)
    return isinstance(found, property) and found.fset is None


def _kinds_first(value: list[Any], count: int) -> list[Any]:
    """Return so many items of a list with one for each layer, unlike ones first."""
    unlike = [item for place, item in enumerate(value) if item not in value[:place]]
    return sorted((unlike + value)[:count], key=value.index)


def _number(
    name: str, value: int, config: Any, layers: int, tables: list[Any], tokens: dict[str, int]
) -> dict[str, int]:
    if re.search(TOKEN, name):
        common = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
        return {name: common.get(name, tokens.setdefault(name, FREE + len(tokens) % 8))}
    if value > layers and re.search(LAYERS, name):
        return {name: layers}
    if re.search(r"key_value.*heads$", name) and value == read(config, "num_attention_heads"):
        return {name: 4} if any(table is WIDTHS for table in tables) else {}
    for table in tables:
        for pattern, size in table:
            if value > size and re.search(pattern, name):
                return {name: _as_wide(name, size, config) if table is WIDE else size}
    return {}


def _as_wide(name: str, size: int, config: Any) -> int:
    """Return as many heads as fit where each is as wide as by default; other sizes as they are."""
    if "heads" not in name:
        return size
    numbers = {key: value for key, value in config.to_dict().items() if type(value) is int and value > 0}
    heads = numbers.get("num_attention_heads", numbers.get("num_heads", 1))
    hidden = numbers.get("hidden_size", numbers.get("embed_dim", 64))
    return max(1, min(size, 256 // numbers.get("head_dim", max(1, hidden // heads))))


SHRINKINGS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (2, ("counts", "widths", "spatial")),
    (2, ("counts", "wide", "spatial")),
    (2, ("counts", "widths")),
    (4, ("counts", "widths", "spatial")),
    (4, ("counts", "widths")),
    (2, ("counts", "spatial")),
    (2, ("counts",)),
)
"""Layers at most and kinds of fields that are shrunk, in the order in which they are tried."""


def configurations(kind: type) -> Iterator[Any]:
    """Yield small configurations of a class, the smallest first, or the errors that they raise."""
    default: Any = kind()
    seen: list[dict[str, Any]] = []
    for layers, kinds in SHRINKINGS:
        given = shrunk(default, layers, kinds, {})
        if given in seen:
            continue
        seen.append(given)
        try:
            yield kind(**given)
        except Exception as error:
            yield error
            yield kind(**_accepted(kind, given))


def _accepted(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a class takes one after the other, where it refuses all of them together."""
    taken: dict[str, Any] = {}
    for name in [*given, *given]:  # what depends on a later field is taken in the second round
        try:
            kind(**taken, **{name: given[name]} if name not in taken else {})
            taken.setdefault(name, given[name])
        except Exception:  # (this field, or one that it must agree with, stays as large as it is)
            continue
    return taken


def classes_of(models: Any, kind: type) -> list[type]:
    """Return the classes of models that take a configuration, the one that does most first."""
    automatic = [getattr(models, f"AutoModelFor{name}", None) for name in HEADS]
    found: list[type] = []
    for auto in [*automatic, models.AutoModel]:
        mapping = auto._model_mapping if auto is not None else {}
        if kind in mapping:
            named = mapping[kind]
            found += named if isinstance(named, tuple) else [named]
    home = kind.__module__.replace("configuration_", "modeling_")
    if importlib.util.find_spec(home) is not None:
        others = vars(importlib.import_module(home)).values()
        found += [each for each in others if isinstance(each, type) and _is_model_of(each, kind, home)]
    return list(dict.fromkeys(found))


def _is_model_of(each: Any, kind: type, home: str) -> bool:
    own = issubclass(each, torch.nn.Module) and each.__module__ == home
    return (
        own and getattr(each, "config_class", None) is kind and not each.__name__.endswith("PreTrainedModel")
    )


HEADS = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "SpeechSeq2Seq", "CTC", "MaskedLM")


def made(name: str) -> Made:
    """Return a model with random weights, and its inputs."""
    import transformers

    models: Any = transformers
    models.logging.set_verbosity_error()
    kind = models.CONFIG_MAPPING[name]
    classes = classes_of(models, kind)[:4]
    reasons = [] if classes else ["no class of a model takes this configuration"]
    for config in configurations(kind):
        if isinstance(config, Exception):
            reasons.append(told(config))
            continue
        for each in classes:
            try:
                return _run_eagerly(each, config)
            except Exception as error:
                why = str(error) if isinstance(error, LookupError) else told(error)
                reasons.append(f"{each.__name__}: {why}")
    raise LookupError(" | ".join(dict.fromkeys(reasons)))


def _run_eagerly(each: Any, config: Any) -> Made:
    config = copy.deepcopy(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in each(copy.deepcopy(config)).parameters())
    if size > ALONE:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = each(config).eval().float()
    with torch.no_grad():  # weights as drawn are so small that results hardly depend on them
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model, inputs_of(model, config)


WRONG_TOO, UNSTEADY = "another result than eager's", "eager itself gives other results"
BY_WHOM = {WRONG_TOO: "as torch.compile, not as eager", UNSTEADY: "not steady"}
"""What explains another result than eager's -> verdict."""


def by_fullgraph(model: Any, inputs: list[Inputs]) -> str:
    """Return why torch's own capture does not make the calls in one graph, right; empty if it does."""
    torch._dynamo.reset()
    fast = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    try:
        with torch.no_grad():
            if not called(model, copy.deepcopy(model), inputs, int)["right"]:
                return UNSTEADY
            right = called(model, fast, inputs, int)["right"]
    except Exception as error:
        return told(error)
    return "" if right else WRONG_TOO


def outcome(name: str, output: Path, options: dict[str, Any]) -> None:
    """Write the row of a model, as a process of its own."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    begun = time.monotonic()
    row: dict[str, Any] = {"name": name, "outcome": "not made", "right": False}
    try:
        make: Callable[[str], Made] = made
        once: Made = make(name.removeprefix("hf/"))
        row.update(model=type(once[0]).__name__, outcome="made")
        if not options["eager"]:
            taken = lambda _: (copy.deepcopy(once[0]), copy.deepcopy(once[1]))  # noqa: E731
            make = on_device(taken, options["device"]) if options["device"] != "cpu" else taken
            asked = {key: options[key] for key in ("graphs_only", "both")}
            row["outcome"] = "raised"
            row.update(run(name, rounds=0, make=make, **asked))
            if row["outcome"] != "whole" or not row["right"]:
                row["fullgraph"] = by_fullgraph(*make(name))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:1500]
        row["at"] = traceback.format_exc().splitlines()[-12:]
    row["total_s"] = round(time.monotonic() - begun, 1)
    write_row(row, output)


def verdict(row: dict[str, Any]) -> str:
    """Return in one word what became of a model."""
    if row["outcome"] in ("not made", "not begun", "not finished", "died", "made", "raised"):
        return str(row["outcome"])
    if not row["right"]:
        return BY_WHOM.get(row.get("fullgraph", ""), "wrong")
    if not row.get("dynamo", row)["right"]:
        return "wrong by torch.compile"
    if row["refused"]:
        return "refused"
    if row["outcome"] != "split":
        return "one graph" if row["outcome"] == "whole" else "not captured"
    return "splits" if row.get("fullgraph") else "splits where torch does not"


def main() -> None:
    """Run the command line."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    ways = parser.add_mutually_exclusive_group()
    for way in ("--graphs-only", "--both", "--eager"):
        ways.add_argument(way, action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    names = [f"hf/{name}" for name in arguments.names or transformers.CONFIG_MAPPING]
    torch.set_num_threads(1)
    options = {key: getattr(arguments, key) for key in ("graphs_only", "both", "eager", "device")}
    bounds = {key: getattr(arguments, key) for key in ("jobs", "limit", "seconds")}
    bounds["method"] = "fork" if arguments.device == "cpu" else "spawn"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(names, partial(outcome, options=options), Path(folder), **bounds):
            rows.append({**row, "verdict": verdict(row)})
            said = (*row.get("splits", [])[:3], row.get("error", "")[:150])
            print(f"{row['name']:36} {verdict(row)}", *said, flush=True)
    print(dict(collections.Counter(row["verdict"] for row in rows)))
    write_record(arguments.output, {"versions": versions_of(rows), "command": command(), "rows": rows})


if __name__ == "__main__":
    main()
