"""ONNX's own backend suite through `ladder.compile`: how many models are right, wrong, refused.

A model is right if each result has the type, the shape and, within the suite's tolerance, the numbers of the
suite. Two units in the last place are tolerated in types of 16 bits, one unit of the largest in float32: sums
may be taken in another order. Random numbers count as right if type and shape are.

    python -m benchmarks.onnx_suite --output onnx_suite.json            # plans as torch runs them, a minute
    python -m benchmarks.onnx_suite --kernels --every 9                 # kernels of ours, every ninth model
"""

from __future__ import annotations

import argparse
import glob
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper

import ladder
from benchmarks.harness import (
    command,
    write_record,
)
from ladder.runtime.onnx_ops.signals import DRAWS
from ladder.runtime.onnx_ops.values import array_of, value_of

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
TRAINING = "ai.onnx.preview.training"
UNITS = {np.dtype(np.float16): 2**-9, np.dtype(ml_dtypes.bfloat16): 2**-6}
"""Type -> relative tolerance: two units in the last place."""


def cases() -> list[Any]:
    """Return the suite's cases by kind and name."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(at, case) for at, kind in enumerate(KINDS) for case in load_model_tests(kind=kind)]
    return [case for _, case in sorted(found, key=lambda pair: (pair[0], pair[1].name))]


def data_of(case: Any) -> tuple[Any, list[tuple[list[Any], list[Any]]]]:
    """Return the model of a case and its pairs of operands and results, as arrays, lists or None."""
    if case.model is not None:
        return case.model, [([*map(_plain, a)], [*map(_plain, b)]) for a, b in case.data_sets]
    model = onnx.load(os.path.join(case.model_dir, "model.onnx"))
    sets = []
    for folder in sorted(glob.glob(os.path.join(case.model_dir, "test_data_set_*"))):
        operands = _stored(folder, "input", list(model.graph.input))
        sets.append((operands, _stored(folder, "output", list(model.graph.output))))
    return model, sets


def _plain(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _stored(folder: str, name: str, infos: Sequence[Any]) -> list[Any]:
    paths = [os.path.join(folder, f"{name}_{at}.pb") for at in range(len(infos))]
    return [_read(path, info.type) for path, info in zip(paths, infos, strict=True) if os.path.exists(path)]


def _read(path: str, kind: Any) -> Any:
    holder, convert = {
        "tensor_type": (onnx.TensorProto(), numpy_helper.to_array),
        "sequence_type": (onnx.SequenceProto(), numpy_helper.to_list),
        "optional_type": (onnx.OptionalProto(), numpy_helper.to_optional),
    }[kind.WhichOneof("value")]
    holder.ParseFromString(Path(path).read_bytes())
    return convert(holder)


def argument(value: Any) -> Any:
    """Return an operand as `ladder.compile` takes it."""
    if isinstance(value, list | tuple):
        return [argument(item) for item in value]
    return None if value is None else value_of(np.asarray(value))


def compare(found: Any, wanted: Any, rtol: float, atol: float, *, exact: bool = True) -> None:
    """Raise AssertionError unless a result is what the suite has.

    Parameters
    ----------
    found, wanted
        Tensors, arrays, lists or None.
    rtol, atol
        The suite's tolerance.
    exact
        Whether numbers are compared, beside type and shape.
    """
    if wanted is None or isinstance(wanted, list | tuple):
        assert (found is None) == (wanted is None), "a value where there is none, or none where there is one"
        assert wanted is None or len(found) == len(wanted), "another number of elements"
        for pair in zip(found or (), wanted or (), strict=True):
            compare(*pair, rtol, atol, exact=exact)
        return
    a, b = array_of(found), np.asarray(wanted)
    assert a.shape == b.shape, f"shape {a.shape} instead of {b.shape}"
    if b.dtype.kind in "OUS":
        texts = ([t.decode() if isinstance(t, bytes) else str(t) for t in x.reshape(-1)] for x in (a, b))
        assert next(texts) == next(texts), "other text"
        return
    assert a.dtype == b.dtype, f"type {a.dtype} instead of {b.dtype}"
    rtol = max(rtol, UNITS.get(b.dtype, 0.0 if b.dtype.isbuiltin == 1 else 2**-6))
    a, b = (x if x.dtype.isbuiltin == 1 else x.astype(np.float32) for x in (a, b))
    if exact:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=max(atol, _noise(b)))


def _noise(wanted: np.ndarray) -> float:
    """Return what float32 sums of numbers as large as the largest are off by."""
    if wanted.dtype != np.float32 or not wanted.size:
        return 0.0
    return float(np.nan_to_num(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))) * 2**-23


def outcome(case: Any) -> dict[str, Any]:
    """Compile and run one case; returns its row."""
    model, sets = data_of(case)
    operators = sorted({node.op_type for node in model.graph.node})
    version = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    row: dict[str, Any] = {"name": case.name, "operators": operators, "opset": version}
    row["aside"] = "training" if TRAINING in version else "strings" if _has_text(model) else ""
    draws = bool(DRAWS & set(operators)) or "training_dropout" in case.name
    try:
        fast = ladder.compile(model)
        for operands, wanted in sets:
            found = fast(*map(argument, operands))
            results = (found,) if len(fast.outputs) == 1 else found
            for pair in zip(results, wanted, strict=True):
                compare(*pair, case.rtol, case.atol, exact=not draws)
        return {**row, "result": "right"}
    except AssertionError as error:
        return {**row, "result": "wrong", "why": " ".join(str(error).split())[:300]}
    except ladder.LadderError as error:
        return {**row, "result": "refused", "why": " ".join(str(error).split())[:300]}
    except Exception as error:
        return {**row, "result": "unclear", "why": f"{type(error).__name__}: {error}"[:300]}


def _has_text(model: Any) -> bool:
    infos = [*model.graph.input, *model.graph.output]
    return any(b"elem_type: 8 " in f"{info.type} ".replace("\n", " ").encode() for info in infos)


def run(every: int, kernels: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of every so many cases."""
    from ladder.runtime.model import build

    chosen = cases()[::every]
    with mock.patch.object(build, "build_kernels", build.build_kernels if kernels else without_kernels):
        for case in chosen:
            yield outcome(case)


def without_kernels(parts: Any, requests: Any, device: Any) -> Any:
    """Take the place of `build_kernels`: torch runs all parts but products of quantised weights."""
    from ladder.runtime.model import build

    if requests:
        raise ladder.LadderError("this model needs kernels")
    own = [n for n, part in enumerate(parts) if part.kind in build.JOBS and not build.is_empty(part)]
    return {}, [], dict.fromkeys(own, "no kernels were asked for")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="run every so many models")
    parser.add_argument("--kernels", action="store_true", help="build kernels of ours")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.time()
    rows = list(run(chosen.every, chosen.kernels))
    counted = [row for row in rows if not row["aside"]]
    summary = Counter(row["result"] for row in counted)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "onnx": onnx.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": command(),
        "seconds": time.time() - begin,
        "models": len(counted),
        "strings and training, aside": dict(Counter(row["result"] for row in rows if row["aside"])),
        **summary,
        "share right": summary["right"] / len(counted),
        "rows": [row for row in rows if row["result"] != "right"],
    }
    print({name: value for name, value in report.items() if name != "rows"})
    for row in report["rows"]:
        print(row["result"], row["aside"], row["name"], row.get("why", "")[:160])
    if chosen.output:
        write_record(chosen.output, report)


if __name__ == "__main__":
    main()
