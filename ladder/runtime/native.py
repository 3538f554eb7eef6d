"""CPU kernels of operators that torch lacks or computes slowly: one of each serves all sizes and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from importlib import import_module
from typing import Any

from ladder import faults
from ladder.runtime.build import Job, find_or_build, function_job, load_entry
from ladder.runtime.threads import keep_apart
from targets import TileDevice, host_cpu
from tile_types.errors import MissingToolError

MOST_BYTES = 1 << 30
"""Bytes of an array that a kernel takes at a time: it counts in 32 bits."""


@cache
def entry(module: str, kind: str, *facts: Any) -> Any:
    """Find or build the kernel of `native_job` for this processor, and load it.

    Raises MissingToolError, CompilerError if it cannot be built.
    """
    return _loaded(native_job(host_cpu(), module, kind, *facts))


@cache
def can_build(module: str, kind: str, *facts: Any) -> bool:
    """Tell whether a kernel is there or can be built; warns where a tool is missing."""
    return _built(entry, module, kind, *facts) is not None


def _built(build: Callable[..., Any], *arguments: Any) -> Any:
    """Return a kernel, or None, with a warning, where a tool is missing."""
    try:
        return build(*arguments)
    except MissingToolError as error:
        faults.warn_once(str(error), f"kernels of operators are not built, torch computes them: {error}")
        return None


@cache
def described(kind: str, label: str, form: Any, module: str = "") -> Any:
    """Find or build what ``emit_<kind>(form, name)`` of a module emits, and load it.

    label: Part of the kernel's name.
    form: A frozen dataclass.
    module: By default that of the kind's name.
    Raises MissingToolError, CompilerError if it cannot be built.
    """
    facts = {"native": [kind, label, asdict(form)]}
    job = _job(host_cpu(), module or kind, kind, f"ladder_{kind}_{label}", facts, form)
    return _loaded(job)


def _loaded(job: Job) -> Callable[..., None]:
    """Find or build a kernel, and load it."""
    kernel = load_entry(find_or_build([job])[0], "cpu")

    def call(*arguments: Any) -> None:
        keep_apart()  # a child that is forked must know that its thread had workers
        kernel(*arguments)

    return call


@cache
def described_or_none(kind: str, label: str, form: Any, module: str = "") -> Any:
    """Return what `described` does; None where a tool is missing, with a warning."""
    return _built(described, kind, label, form, module)


def native_job(device: TileDevice, module: str, kind: str, *facts: Any) -> Job:
    """Return the kernel that ``emit_<kind>(*facts, name)`` of a module of `ladder.lower.cpu` emits."""
    name = "_".join(("ladder", kind, *map(str, facts)))
    return _job(device, module, kind, name, {"native": [module, kind, *facts]}, *facts)


def _job(
    device: TileDevice, module: str, kind: str, name: str, facts: Mapping[str, Any], *arguments: Any
) -> Job:
    def emit(name: str) -> Any:
        return getattr(import_module(f"ladder.lower.cpu.{module}"), f"emit_{kind}")(*arguments, name)

    return function_job(facts, name, device, emit)
