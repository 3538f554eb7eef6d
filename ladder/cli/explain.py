"""``ladder explain``: the plan of a product, or one stage of the kernel that serves its M."""

from __future__ import annotations

from ladder.cli.problem import Problem


def explain_summary(problem: Problem) -> str:
    """Return how the product is compiled for every M; needs no compiler."""
    return problem.operator().explain(problem.device)


def explain_stage(problem: Problem, stage: str) -> str:
    """Return the text of one stage of the kernel that serves the problem's M.

    Raises
    ------
    UnknownNameError
        If the target has no such stage.
    """
    return problem.operator().lower(problem.device).source(stage, problem.m)
