"""Inputs of a model that no table knows, from the signature of its ``forward`` and its configuration."""

from __future__ import annotations

import copy
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo import SHAPES, Inputs

Drawn = Callable[[Any, Any, torch.Generator, int, int], Any]


def inputs_of(model: Any, config: Any, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Inputs]:
    """Return inputs of several batches and lengths, on the model's device, with which it runs eagerly.

    shapes: (rows, tokens of each) of each of the inputs.

    Raises
    ------
    LookupError
        With what some of the sets of inputs raised, where none fits.
    """
    reasons: list[str] = []
    for names in argument_sets(model):
        for ways in itertools.islice(itertools.product(*(MADE[name] for name in names)), 12):
            try:
                drawing = dict(zip(names, ways, strict=True))
                made = [_made(model, config, drawing, seed, *shape) for seed, shape in enumerate(shapes)]
                with torch.no_grad():
                    for each in made:
                        model(**copy.deepcopy(each))
                return made
            except Exception as error:
                reasons.append(f"{', '.join(names)}: {told(error)}")
    raise LookupError("; ".join(reasons[:2] + reasons[2:][-1:]) or "no inputs are known")


def told(error: Exception) -> str:
    """Return an error and where it was raised, in one short line."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {str(error)[:160]} ({Path(last.filename).name}:{last.lineno})"


def argument_sets(model: Any) -> Iterator[list[str]]:
    """Yield names of arguments that may be given together."""
    asked = inspect.signature(model.forward).parameters
    empty = inspect.Parameter.empty
    required = [
        name
        for name, each in asked.items()
        if each.default is empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    main = [model.main_input_name] if model.main_input_name in asked else []
    base = list(dict.fromkeys([*required, *main]))
    if model.config.is_encoder_decoder and "decoder_input_ids" in asked:
        base.append("decoder_input_ids")
    instead = {"inputs_embeds", "query_embeds"} if "input_ids" in asked else set()
    known = [name for name in asked if name in MADE and name not in instead.union(base)]
    media = [name for name in known if name in MEDIA]
    words = [name for name in ("input_ids", "attention_mask") if name in known]
    for more in ([], words, ["decoder_input_ids"], media + words, media, known):
        names = [*base, *(name for name in more if name in asked and name not in base)]
        if all(name in MADE for name in names):
            yield names
    missing = [name for name in base if name not in MADE]
    if missing:
        raise LookupError(f"how to make {missing} is not known")


def _made(model: Any, config: Any, ways: dict[str, Drawn], seed: int, batch: int, length: int) -> Inputs:
    drawn = torch.Generator().manual_seed(seed)
    found = {name: _fitting(model, way(model, config, drawn, batch, length)) for name, way in ways.items()}
    if "input_ids" in found and "pixel_values" in found:
        found.update(_with_places(model, config, found))
    if "attention_mask" in found and "input_ids" in found:
        found["attention_mask"] = torch.ones_like(found["input_ids"])
    return found


def _fitting(model: Any, value: torch.Tensor) -> torch.Tensor:
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


def _with_places(model: Any, config: Any, inputs: Inputs) -> Inputs:
    """Return tokens with places for what is seen in images, where the model puts it there."""
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if token is None or not hasattr(model, "get_image_features"):
        return {}
    asked = inspect.signature(model.get_image_features).parameters
    given = {name: value for name, value in inputs.items() if name in asked and name != "input_ids"}
    with torch.no_grad():
        seen = model.get_image_features(**given)
    seen = getattr(seen, "pooler_output", seen)
    count = sum(part.numel() // part.shape[-1] for part in seen)
    ids = inputs["input_ids"]
    places = ids.new_full((len(ids), count // len(ids)), token)
    return {"input_ids": torch.cat([ids[:, :2], places, ids[:, 2:]], 1)}


def _part(config: Any, *names: str) -> Any:
    return next((part for name in names if (part := getattr(config, name, None)) is not None), config)


def field(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the first field of these names that a configuration has, or one of its parts."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    for part in parts:
        for name in names:
            found = getattr(part, name, None)
            if isinstance(found, int | list | tuple) and not isinstance(found, bool):
                return found
    return default


def _tokens(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    limit = field(config, ("vocab_size",), 128)
    return torch.randint(3, min(limit, 100), (batch, length), generator=drawn)


def _few_tokens(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return _tokens(model, config, drawn, batch, 5)


def _ones(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.int64)


def _zeros(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


def _seeing(config: Any) -> Any:
    return _part(config, "vision_config", "image_config", "backbone_config")


def _pixels(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    seeing = _seeing(config)
    size = field(seeing, ("image_size", "input_size"), 64)
    channels = field(seeing, ("num_channels", "in_channels", "in_chans"), 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = channels if isinstance(channels, int) else 3
    return torch.randn(batch, channels, height, width, generator=drawn)


def _patches(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    """Return patches of images, a row each, of which `_grid` says how they lie."""
    seeing = _seeing(config)
    patch, times = (getattr(seeing, name, 2) for name in ("patch_size", "temporal_patch_size"))
    wide = getattr(seeing, "in_channels", 3) * times * patch * patch
    return torch.randn(batch * 16, wide, generator=drawn)


def _grid(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.tensor([[1, 4, 4]] * batch)


def _boxes(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 30, (batch, length, 4), generator=drawn).sort(-1).values


def _frames(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    """Return frames by mel bins, as many as a model with a limit asks for."""
    hearing = _part(config, "audio_config", "encoder_config", "speech_config")
    bins = field(hearing, BINS, 80)
    return torch.randn(batch, field(hearing, ("max_length",), 8 * length), bins, generator=drawn)


BINS = ("num_mel_bins", "n_mels", "mel_bins", "feature_size", "input_feat_per_channel", "input_dim")


def _bins_first(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    hearing = _part(config, "audio_config", "encoder_config", "speech_config")
    frames = 2 * field(hearing, ("max_source_positions",), 4 * length)
    return torch.randn(batch, field(hearing, BINS, 80), frames, generator=drawn)


def _spectrogram(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    hearing = _part(config, "audio_config")
    size = field(hearing, ("spec_size",), 256)
    return torch.randn(batch, 1, 4 * size, field(hearing, BINS, 64), generator=drawn)


def _wave(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, 1600 + 320 * length, generator=drawn)


def _wave_of_channel(
    model: Any, config: Any, drawn: torch.Generator, batch: int, length: int
) -> torch.Tensor:
    return torch.randn(batch, 1, 1920 * length, generator=drawn)


def _videos(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    images = _pixels(model, config, drawn, batch, length)
    frames = field(_seeing(config), ("num_frames", "frames_per_clip"), 2)
    return images.unsqueeze(1).expand(-1, frames, *images.shape[1:]).contiguous()


def _one_each(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return _pixels(model, config, drawn, batch, length).unsqueeze(1)


def _hidden(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    wide = field(config, ("hidden_size", "d_model", "embed_dim"), 64)
    return torch.randn(batch, length, wide if isinstance(wide, int) else wide[0], generator=drawn)


def _map(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return _hidden(model, config, drawn, batch, 16).transpose(1, 2).reshape(batch, -1, 4, 4)


def _series(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    long = field(config, ("context_length",), 32) + max([0, *(getattr(config, "lags_sequence", None) or [])])
    return torch.randn(batch, long, generator=drawn)


def _series_of_channels(
    model: Any, config: Any, drawn: torch.Generator, batch: int, length: int
) -> torch.Tensor:
    series = _series(model, config, drawn, batch, length)
    return series.unsqueeze(-1) + torch.arange(getattr(config, "num_input_channels", 1))


def _series_ones(model: Any, config: Any, drawn: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.ones_like(_series(model, config, drawn, batch, length))


def _series_features(
    model: Any, config: Any, drawn: torch.Generator, batch: int, length: int
) -> torch.Tensor:
    series = _series(model, config, drawn, batch, length)
    return series.unsqueeze(-1).expand(*series.shape, getattr(config, "num_time_features", 1)).contiguous()


MEDIA = ("pixel_values", "image_grid_thw", "bbox", "image")
"""What is given with tokens."""
MADE: dict[str, tuple[Drawn, ...]] = {
    "input_ids": (_tokens,),
    "decoder_input_ids": (_few_tokens,),
    "attention_mask": (_ones,),
    "token_type_ids": (_zeros,),
    "pixel_values": (_pixels, _patches, _videos, _one_each),
    "image": (_pixels,),
    "image_grid_thw": (_grid,),
    "grid_thw": (_grid,),
    "bbox": (_boxes,),
    "input_features": (_frames, _bins_first, _spectrogram),
    "input_values": (_wave, _frames, _wave_of_channel),
    "hidden_states": (_hidden, _patches, _map),
    "encoder_hidden_states": (_hidden,),
    "inputs_embeds": (_hidden,),
    "query_embeds": (_hidden,),
    "context": (_hidden,),
    "past_values": (_series, _series_of_channels),
    "past_observed_mask": (_series_ones,),
    "past_time_features": (_series_features,),
}
"""Name of an argument of a model -> what may make one, in the order in which it is tried."""
