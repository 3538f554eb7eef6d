"""The plan cache: imported and partitioned graphs of earlier processes, by graph, arguments and device.

A warm start imports nothing; it looks up kernels by the requests of the parts, as a cold start does.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
import torch.fx

from ladder import knobs
from ladder.frontend.fx_facts import facts_of, facts_of_symbols
from ladder.frontend.torch_fx import import_fx
from ladder.installation import cache_root
from ladder.runtime.cache import Identity, KernelCache, cache_key, source_digest
from ladder.runtime.compile import target_of
from ladder.runtime.model.found import shipped_graphs
from ladder.runtime.model.prepared import Prepared, from_data, prepare, to_data
from ladder.superopt.generator.stored import FOLDER as DATABASE
from schedules.tuning import shipped_digest
from targets import TileDevice, get_device
from tile_types.errors import CacheError, LadderError
from tile_types.identity import own_values
from tile_types.library import own_types

log = logging.getLogger("ladder.model")

FOLDER = "models"
"""One of `ladder.runtime.cache.NOTES`."""

SOURCES = ("ladder/frontend",)
"""Packages whose source text is part of the key, beside those that decide a kernel: they import graphs."""


def prepared_for(
    module: torch.fx.GraphModule,
    examples: list[Any],
    place: torch.device,
    search: float = 0.0,
    **options: Any,
) -> Prepared:
    """Return what `import_fx` and `prepare` make of a graph: from the cache, where it has been made before.

    module, examples: The graph and its arguments.
    search: As of `prepare`: a plan that was made without is made again.
    **options: Of `import_fx`.
    Raises ImportRefused, LadderError as those two.
    """
    device = get_device(target_of(place))
    key = _key(module, examples, device, {**options, "search": search > 0})
    found = _read(key) if key else None
    if found is None:
        known = facts_of_symbols(examples) if key else {}
        found = prepare(import_fx(module, examples, **options), device, search)
        if key and known == facts_of_symbols(examples):  # a note would not repeat what tracing decided
            _write(key, found)
    return found


def _key(
    module: torch.fx.GraphModule, examples: list[Any], device: TileDevice, options: dict[str, Any]
) -> str:
    """Return the name of a note; empty where none is kept: passes that are dumped must run."""
    settings = knobs.settings
    facts = facts_of(module, examples) if settings.cache and settings.dump is None else None
    if facts is None:
        return ""
    folder = cache_root() / "tuning"
    measured = folder.stat().st_mtime_ns if folder.is_dir() else 0
    facts |= {
        "strict": settings.strict,
        "gated": [settings.gated_products, settings.prologues],
        "options": options,
        "of_model": module.meta.get("of_model"),
        "importer": source_digest(SOURCES),
        "types": own_values(*own_types()),
    }
    own = cache_root() / DATABASE
    searched = own.stat().st_mtime_ns if own.is_dir() else 0
    facts["found"] = [settings.found_graphs, shipped_graphs(), searched] if device.is_gpu else []
    facts["schedules"] = [shipped_digest(), measured]  # what is left to torch is chosen by them
    return cache_key(facts, Identity.of(None, device, compiled=False))


def _read(key: str) -> Prepared | None:
    data = KernelCache().read_note(FOLDER, key)
    if data is None:
        return None
    try:
        return from_data(data)
    except (LadderError, LookupError, TypeError, ValueError) as error:
        log.warning("the cached plan %s cannot be read (%s); it is imported again", key, error)
        return None


def _write(key: str, prepared: Prepared) -> None:
    data = to_data(prepared)
    if data is not None:
        with contextlib.suppress(CacheError):  # `find_or_build` warns of it
            KernelCache().write_note(FOLDER, key, data)
