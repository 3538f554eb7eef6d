"""``ladder explain``: the plan of a product, one stage of its kernel for M, or how a program is captured."""

from __future__ import annotations

import torch

from ladder.api.evidence import Evidence
from ladder.cli.problem import Problem
from tile_types.errors import CompilerError, DeviceError, MissingToolError


def explain_summary(problem: Problem) -> tuple[str, Evidence | None]:
    """Return how the product is compiled for every M, and what the code of the kernel for its M says.

    Without a compiler for the target, the first is all there is, and it says so.
    """
    lowered = problem.operator().lower(problem.device)
    text = lowered.explain()
    if not problem.device.is_gpu or not problem.m:
        return text, None
    try:
        evidence = lowered.evidence(problem.m)
    except (CompilerError, MissingToolError) as error:
        return f"{text}\n\nno evidence: {error}", None
    lines = [f"  {name}: {line}" for name, line in evidence.as_text().items()]
    return "\n".join([text, "", f"the kernel for M={problem.m}:", *lines]), evidence


def explain_program(target: str, device: str, *, guards: bool) -> str:
    """Return how a program is captured and compiled.

    target: ``python:module:function``; the function returns a model, or it and its arguments.
    device: Name of a target on this machine.
    guards: Print every condition that a call is checked against.
    """
    from ladder.api.model import compile as ladder_compile  # products are explained without what captures
    from ladder.cli.model_report import placed

    _, where, model, arguments = placed(target, device)
    if where is None:
        raise DeviceError(f"{device} is not on this machine, where the program has to run to be captured")
    fast = ladder_compile(model)
    with torch.no_grad():
        for _ in range(2):
            fast(*arguments)
    text: str = fast.explain(guards=guards)
    return text


def explain_stage(problem: Problem, stage: str) -> str:
    """Return the text of one stage of the kernel that serves the problem's M.

    Raises UnknownNameError if the target has no such stage.
    """
    return problem.operator().lower(problem.device).source(stage, problem.m)
