"""Random sparse programs that differ, how often they are accepted, and how often small fields would.

``python tests/superopt_random.py --pairs 1000000 --output FILE.json`` tests so many pairs and writes counts
of verdicts after every chunk; an interrupted run goes on from its file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from superopt_programs import Pair, Value, differ, mutated, mutations, program

from ladder.ir import Field, Graph, finite_domain, interpret
from ladder.ir.modular import UndefinedResidueError
from ladder.superopt.verifier import verify_equal
from ladder.superopt.verifier.bound import bound_of
from ladder.superopt.verifier.certificate import DELTA
from ladder.superopt.verifier.equivalence import forms_of
from ladder.superopt.verifier.forms import Bounding

SHAPES = {"a": (1, 2), "b": (1, 2), "w": (2, 2)}

CHUNK = 1_000
"""Pairs of one seed."""

OPERATORS = ("add", "sub", "mul", "div", "matmul", "exp", "silu", "square", "sqrt", "sum", "scale")


def _step(values: list[tuple[Value, bool]], generator: np.random.Generator) -> tuple[Value, bool] | None:
    """Apply one random operator; the flag says whether a value has passed an exponential."""
    (x, passed), (y, other) = (values[i] for i in generator.integers(0, len(values), 2))
    choice = generator.choice(OPERATORS)
    if choice in ("add", "sub", "mul", "div") and x.shape == y.shape:
        return x.op(str(choice), y), passed or other
    if choice == "matmul" and x.shape[-1] == y.shape[0]:
        return x @ y, passed or other
    if choice in ("exp", "silu") and not passed:
        return x.op(str(choice)), True
    if choice == "square":
        return x.square(), passed
    if choice == "sqrt" and not passed:
        return x.sqrt(), False
    if choice == "sum":
        return x.sum(1), passed
    return (x * float(generator.integers(2, 5)), passed) if choice == "scale" else None


def random_program(generator: np.random.Generator, length: int) -> Graph:
    def body(*inputs: Value) -> Value:
        values = [(value, False) for value in inputs]
        while len(values) < len(inputs) + length:
            step = _step(values, generator)
            if step is not None:
                values.append(step)
        return values[-1][0]

    return program(body, SHAPES)


def random_pairs(count: int, seed: int) -> Iterator[Pair]:
    """Yield pairs that float64 shows to differ: a program, and itself with one node changed."""
    generator = np.random.default_rng(seed)
    found = 0
    while found < count:
        one = random_program(generator, int(generator.integers(2, 5)))
        changes = [(node, *mutation) for node in one.nodes for mutation in mutations(node)]
        for position in generator.permutation(len(changes))[:4]:
            node, what, change = changes[position]
            other = mutated(one, node, change)
            if other is not None and found < count and differ(one, other, points=1):
                found += 1
                yield Pair(f"{found}: {what}", one, other)


def _sampled(graph: Graph, field: Field, generator: np.random.Generator) -> list[Any]:
    return [field.random(node.tile.known_shape, generator) for node in graph.inputs]


def measured_false_accepts(pairs: int, draws: int, p: int, seed: int) -> tuple[float, float, int]:
    """Return the rate of draws over a small field that are defined and agree, the mean bound, and the draws.

    Only pairs whose bound says something (below 1) are taken.
    """
    generator = np.random.default_rng(seed)
    q = (p - 1) // 2
    accepted, bounds = 0, []
    for pair in random_pairs(pairs, seed):
        boundings = [Bounding(), Bounding()]
        graphs = (pair.first, pair.second)
        forms = [forms_of(graph, each) for graph, each in zip(graphs, boundings, strict=True)]
        if any(form[0].shape != forms[0][0].shape for form in forms):
            continue
        bound = bound_of(*forms, any(each.exponentials for each in boundings))
        if bound.zippel(p, q) >= 1:
            continue
        for _ in range(draws):
            bounds.append(bound.zippel(p, q))
            accepted += _agrees(graphs, bound.terms, Field(p, q, 4), generator)
    return accepted / len(bounds), float(np.mean(bounds)), len(bounds)


def _agrees(graphs: tuple[Graph, Graph], points: int, field: Field, generator: np.random.Generator) -> bool:
    operands = _sampled(graphs[0], field, generator)
    try:
        for point in range(1, points + 1):
            domain = finite_domain(Field(field.p, field.q, pow(4, point, field.p)))
            a, b = (interpret(graph, operands, domain)[0].p for graph in graphs)
            if not np.array_equal(a, b):
                return False
    except UndefinedResidueError:
        return False
    return True


def counted(seed: int) -> tuple[int, dict[str, Any]]:
    """Return the seed, how often each verdict was given to its pairs, and why some were refused."""
    began = time.perf_counter()
    verdicts, reasons, accepted = Counter[str](), Counter[str](), []
    for pair in random_pairs(CHUNK, seed):
        certificate = verify_equal(pair.first, pair.second)
        verdicts[certificate.verdict] += 1
        if certificate.verdict == "refused":
            reasons[certificate.reason.split(":")[0]] += 1
        if certificate.equal:
            accepted.append([str(pair.first), str(pair.second)])
    return seed, {
        "verdicts": dict(verdicts), "reasons": dict(reasons), "accepted": accepted,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def report_of(chunks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return counts over all chunks, with the bound on each and the confidence that the counts alone give."""
    verdicts = sum((Counter(chunk["verdicts"]) for chunk in chunks.values()), Counter[str]())
    reasons = sum((Counter(chunk["reasons"]) for chunk in chunks.values()), Counter[str]())
    pairs = verdicts.total()
    return {
        "what": "random sparse pairs of programs that float64 shows to differ",
        "command": "python tests/superopt_random.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "pairs": pairs,
        "accepted": verdicts["equal"],
        "different": verdicts["different"],
        "refused": verdicts["refused"],
        "reasons_of_refusals": dict(reasons),
        "proved_bound_per_pair": DELTA,
        "proved_bound_of_any": pairs * DELTA,
        "rate_below_with_95_percent_confidence": 3.0 / max(1, pairs),
        "cpu_seconds": round(sum(chunk["seconds"] for chunk in chunks.values()), 1),
        "chunks": chunks,
    }


def main() -> None:
    """Test pairs, chunk by chunk."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    path: Path = options.output
    chunks = json.loads(path.read_text())["chunks"] if path.exists() else {}
    missing = -(-(options.pairs - report_of(chunks)["pairs"]) // CHUNK)
    left = [seed for seed in range(1, 1 + len(chunks) + max(0, missing)) if str(seed) not in chunks][:missing]
    with ProcessPoolExecutor(options.processes) as pool:
        for task in as_completed([pool.submit(counted, seed) for seed in left]):
            seed, chunk = task.result()
            chunks[str(seed)] = chunk
            report = report_of(chunks)
            path.write_text(json.dumps(report) + "\n")
            print(f"{report['pairs']} pairs: {report['accepted']} accepted", flush=True)


if __name__ == "__main__":
    main()
