"""`superoptimize`: from a torch function to kernels that are searched, proved, built, checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from ladder.api.fused_trials import Progress, torch_seconds
from ladder.api.superopt_calls import Contract, copies, readable, require_pure
from ladder.api.superopt_parts import Partitioned, as_torch, partitioned
from ladder.api.superopt_task import Superoptimized, Task, require_provable, require_type
from ladder.api.tensor_program import Recorded, decoded, name_of, packed_types, recorded, translated
from ladder.runtime.compile import target_of
from ladder.superopt.generator import Limits
from tile_types.errors import (
    ConversionError,
    ScheduleError,
    ShapeError,
    ValueRangeError,
    VerificationError,
    path_of,
    require_callable,
    require_kind,
    sequence_of,
    whole_number,
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
    checkpoint: Path | str | None = None,
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
    A callable with its certificate; `Partitioned`, with those of its parts, if it was cut. Its text says of
    each part what runs it, and where nothing was found, why; torch runs as it is what cannot be cut.

    Raises
    ------
    DTypeError, ShapeError, ValueRangeError
        If an argument is not of the kinds above.
    """
    given = _given(function, inputs)
    _require_options(len(given), limits, trials, constants)
    file = _checkpoint(checkpoint, seed, step, reuse)
    task = Task(_here(given), limits, target, trials, file, seed, step, reuse, constants)
    task.device  # noqa: B018  a target that is not known is an error, not a reason to run in torch
    try:
        with torch.random.fork_rng():
            return _made(function, inputs, given, task)
    except (ConversionError, VerificationError, ScheduleError) as error:
        return as_torch(function, inputs, error)


def _made(
    function: Callable[..., Any], inputs: Sequence[Any], given: Sequence[torch.Tensor], task: Task
) -> Superoptimized | Partitioned:
    """Return kernels for a function, or for its parts, with its contract; raises if it is not taken apart."""
    tensors = copies(name_of(function), given)
    found = recorded(function, tensors)
    require_pure(found, given, tensors)
    contract = Contract.of(function, inputs, tensors, found)
    made = replace(_optimised(function, inputs, tensors, found, task), contract=contract)
    return _beside_torch(made, function, inputs) if task.is_here else made


def _given(function: object, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs as tensors; raises unless they are, and the function can be called."""
    require_callable(function, "superoptimize takes a function of tensors")
    sequence_of((torch.Tensor, QuantizedTensor), inputs, "inputs must be a list or tuple of tensors")
    if not inputs:
        raise ShapeError("inputs is empty: superoptimize takes an example of each tensor of the function")
    return decoded(inputs)


def _require_options(count: int, limits: object, trials: object, constants: object) -> None:
    """Check the options of a function of so many tensors; raises DTypeError or ShapeError."""
    require_kind(limits, (Limits, type(None)), "limits must be ladder.superopt.generator.Limits")
    if whole_number(trials, "trials") < 1:
        raise ShapeError(f"trials must be 1 or more, got {trials}")
    require_kind(constants, Collection, "constants is a list of numbers of inputs")
    for number in cast(Collection[object], constants):
        if number not in range(count):
            raise ShapeError(f"constants are numbers of inputs, 0 to {count - 1}; got {number!r}")


def _checkpoint(path: object, seed: int | None, step: object, reuse: object) -> Path | None:
    """Return the file of a checkpoint; raises DTypeError or ValueRangeError for how no search runs."""
    require_kind(seed, (int, type(None)), "seed is a whole number")
    if seed is not None and (seed < 0 or isinstance(seed, bool)):
        raise ValueRangeError(f"seed is a whole number, at least 0, got {seed}")
    if step is not None:
        require_callable(step, "step is a function of a text and a share")
    require_kind(reuse, bool, "reuse must be True or False")
    return None if path is None else path_of(path, "checkpoint")


def _here(tensors: Sequence[torch.Tensor]) -> str:
    """Return the name of the device that inputs are on."""
    return target_of(tensors[0].device)


def _optimised(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    found: Recorded,
    task: Task,
) -> Superoptimized | Partitioned:
    """Return the function's kernels, or those of its parts if it has none as a whole."""
    given = [
        x if isinstance(x, QuantizedTensor) else y.contiguous() for x, y in zip(inputs, tensors, strict=True)
    ]
    try:
        if found.order is not None:
            raise ConversionError(f"{found.name} returns a tuple; block graphs have one result")
        require_type(found.results[0], tensors)
        program = translated(found.name, found.module, found.examples, tensors, packed_types(inputs))
        require_provable(program)
        return task.run(program, function, given, task.constants)
    except (ConversionError, VerificationError, ScheduleError) as error:
        return partitioned(found, inputs, tensors, task, error)


def _beside_torch(
    made: Superoptimized | Partitioned, function: Callable[..., Any], inputs: Sequence[Any]
) -> Superoptimized | Partitioned:
    """Return what was made with the times of calls with the examples, where those are not known yet.

    Those of kernels are of contiguous tensors: where the examples are not, copies of them count.
    """
    assert made.contract is not None
    run: Callable[..., Any] | None = (
        made.run if isinstance(made, Partitioned) else replace(made, contract=None, unfused=None)
    )
    if isinstance(made, Superoptimized) and not made.contract.example.copied:
        return made
    assert run is not None  # kernels are for this device
    own = torch_seconds(lambda *given: run(*map(readable, given)), inputs)
    beside = torch_seconds(function, inputs)
    timed = replace(made, torch=beside, unfused=function if beside < own else None)
    return timed if isinstance(timed, Superoptimized) else replace(timed, seconds=own)
