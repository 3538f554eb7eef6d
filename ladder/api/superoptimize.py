"""`superoptimize`: from a torch function to kernels that are searched, proved, built, checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder.api.fused_trials import Progress
from ladder.api.superopt_calls import Contract, copies, require_pure
from ladder.api.superopt_parts import Partitioned, partitioned
from ladder.api.superopt_task import Superoptimized, Task, require_provable, require_type
from ladder.api.tensor_program import decoded, name_of, packed_types, recorded, translated
from ladder.runtime.compile import target_of
from ladder.superopt.generator import Limits
from tile_types.errors import ConversionError, VerificationError
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

    What was found for the same program, shapes, types and device is taken from the database in the cache
    folder. A function with operators outside of what can be proved is cut into parts: those that can be are
    superoptimized each, the rest runs as `ladder.compile` runs it.

    Parameters
    ----------
    function
        Takes the tensors and returns one: matrix products, element-wise operators, sums, maxima,
        softmax, root mean squares. Quantized inputs reach it decoded, ``[N, K]``. It writes into nothing.
    inputs
        Examples: kernels are made for their shapes, types and device. Of `ladder.quantize`, too. They are
        not changed, and whether they share memory does not matter.
    limits
        Of the search; by default those of program and device, and `SECONDS`.
    target
        Device to build for, if not that of the inputs: nothing is run or timed then.
    trials
        Kernels that are built, best first by a model; the fastest is taken.
    checkpoint
        File from which an interrupted search goes on.
    seed
        Of the data of the stability tests. Proofs draw their own seeds.
    step
        Told what is being done.
    reuse
        Whether the database is read; what is found is kept in it either way.
    constants
        Positions of inputs that nothing writes while the kernels may run, such as weights: GPU kernels then
        load them before the kernels launched earlier have ended. A call that finds one of them written since
        the call before, or another tensor in its place, waits for those first.

    Returns
    -------
    Superoptimized
        A callable with its certificate; `Partitioned`, with those of its parts, if it was cut.

    Raises
    ------
    ConversionError
        Names what of the function block graphs cannot express, if no part of it can be optimised.
    VerificationError
        Names what of it is outside LAX, so that equality cannot be decided, likewise.
    ScheduleError
        If no graph was found, or none can be lowered.
    """
    given = decoded(inputs)
    tensors = copies(name_of(function), given)
    task = Task(
        target_of(tensors[0].device), limits, target, trials, checkpoint, seed, step, reuse, constants
    )
    found = recorded(function, tensors)
    require_pure(found.name, found.module, given, tensors)
    contract = Contract.of(function, inputs, tensors, found)
    try:
        require_type(found.results[0], tensors)
        program = translated(found.name, found.module, found.examples, tensors, packed_types(inputs))
        require_provable(program)
    except (ConversionError, VerificationError) as error:
        return replace(partitioned(found, inputs, tensors, task, error), contract=contract)
    examples = [x if isinstance(x, QuantizedTensor) else y for x, y in zip(inputs, tensors, strict=True)]
    return replace(task.run(program, function, examples, constants), contract=contract)
