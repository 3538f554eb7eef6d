"""`superoptimize`: from a torch function to kernels that are searched, proved, built, checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ladder.api.fused_trials import Progress, torch_seconds
from ladder.api.superopt_calls import Contract, copies, require_pure
from ladder.api.superopt_parts import Partitioned, partitioned
from ladder.api.superopt_task import Superoptimized, Task, require_provable, require_type
from ladder.api.tensor_program import Recorded, decoded, name_of, packed_types, recorded, translated
from ladder.runtime.compile import target_of
from ladder.superopt.generator import Limits
from tile_types.errors import (
    ConversionError,
    ScheduleError,
    VerificationError,
    require_callable,
    sequence_of,
)
from tile_types.quantized import QuantizedTensor

TRIALS = 16
"""Kernels that are built and timed."""


def superoptimize(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    limits: Limits | None = None,
    target: str | None = None,
    trials: int = TRIALS,
    checkpoint: Path | None = None,
    seed: int | None = None,
    step: Progress | None = None,
    reuse: bool = True,
    constants: Collection[int] = (),
) -> Superoptimized | Partitioned:
    """Search, prove, build and time fused kernels for a function.

    What was found before is taken from the database in the cache folder, and functions with operators outside
    of what can be proved are cut into parts: ladder/superopt/README.md, "Using it".

    Parameters
    ----------
    function
        Takes the tensors and returns one. Quantized inputs reach it decoded, ``[N, K]``. It writes nothing.
    inputs
        Examples, which are not changed: kernels are made for their shapes, types and device.
    limits
        Of the search; by default those of program and device, and `SECONDS`.
    target
        Device to build for, if not that of the inputs: nothing is run or timed then.
    trials
        Kernels that are built, best first by a model; the fastest is taken.
    checkpoint
        File from which an interrupted search goes on.
    seed, step
        Of the data of the stability tests, proofs draw their own; told what is being done.
    reuse
        Whether the database is read; what is found is kept in it either way.
    constants
        Inputs that nothing writes while the kernels may run, such as weights (superopt/README.md).

    Returns
    -------
    Superoptimized
        A callable with its certificate; `Partitioned`, with those of its parts, if it was cut.

    Raises
    ------
    ConversionError, VerificationError
        If no part of the function is what block graphs express and equality can be decided of; names why.
    ScheduleError
        If no graph was found of any part, or none can be lowered.
    """
    given = _given(function, inputs)
    tensors = copies(name_of(function), given)
    where = target_of(tensors[0].device)
    task = Task(where, limits, target, trials, checkpoint, seed, step, reuse, constants)
    found = recorded(function, tensors)
    require_pure(found.name, found.module, given, tensors)
    contract = Contract.of(function, inputs, tensors, found)
    return replace(_optimised(function, inputs, tensors, found, task), contract=contract)


def _given(function: object, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs as tensors; raises unless they are, with elements, and the function can be called."""
    require_callable(function, "superoptimize takes a function of tensors")
    sequence_of((torch.Tensor, QuantizedTensor), inputs, "inputs must be a list or tuple of tensors")
    given = decoded(inputs)
    for number, tensor in enumerate(given):
        if not tensor.numel():
            raise ConversionError(f"input {number} has no elements: kernels are made for extents from 1 on")
    return given


def _optimised(
    function: Callable[..., Any], inputs: Sequence[Any], tensors: Sequence[Any], found: Recorded, task: Task
) -> Superoptimized | Partitioned:
    """Return the function's kernels, or those of its parts if it has none as a whole."""
    examples = [x if isinstance(x, QuantizedTensor) else y for x, y in zip(inputs, tensors, strict=True)]
    try:
        require_type(found.results[0], tensors)
        program = translated(found.name, found.module, found.examples, tensors, packed_types(inputs))
        require_provable(program)
        return task.run(program, function, examples, task.constants)
    except (ConversionError, VerificationError, ScheduleError) as error:
        parts = partitioned(found, inputs, tensors, task, error)
    if parts.run is None:
        return parts
    own, torch = (torch_seconds(call, examples) for call in (parts.run, function))
    return replace(parts, seconds=own, torch=torch, unfused=function if torch < own else None)
