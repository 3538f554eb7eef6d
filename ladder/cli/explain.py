"""``ladder explain``: the plan of a product, or one stage of the kernel that serves its M."""

from __future__ import annotations

from ladder.api.evidence import Evidence
from ladder.cli.problem import Problem
from tile_types.errors import CompilerError, MissingToolError


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


def explain_stage(problem: Problem, stage: str) -> str:
    """Return the text of one stage of the kernel that serves the problem's M.

    Raises
    ------
    UnknownNameError
        If the target has no such stage.
    """
    return problem.operator().lower(problem.device).source(stage, problem.m)
