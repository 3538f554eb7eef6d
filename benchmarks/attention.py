"""Attention for few query tokens on a GPU: kernels of ours beside torch's, caches read from HBM.

``python -m benchmarks.attention [--output FILE] [--cases NAME,...] [--policy]``
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    Call,
    capture_long,
    copies_for,
    environment,
    interleaved_us,
    write_record,
)
from ladder.ir.attention import CODES, Attention
from ladder.runtime.cores import usable_cores
from schedules.attention import AttentionSchedule as Plan

TARGET = "cuda/sm_90a"
ROUNDS = 9
LARGEST_ERROR = {"float16": 1e-3, "bfloat16": 8e-3}


@dataclass(frozen=True)
class Case:
    """One row: a problem, its sizes, and how many keys count where a position says so."""

    name: str
    form: Attention
    batch: int
    tokens: int
    keys: int
    seen: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that must be read."""
        return self.form.keys_bytes(self.batch, self.seen or self.keys)


def _form(heads: int = 32, kv: int = 8, size: int = 128, stored: str = "float16", **rest: Any) -> Attention:
    ttype = "bfloat16" if stored == "bfloat16" else "float16"
    return Attention(heads, kv, size, ttype, stored, scale=size**-0.5, **rest)


LLAMA = _form()

CASES = [
    *(Case(f"llama b={b} t={t}", LLAMA, b, 1, t)
      for b, t in ((1, 128), (1, 1024), (1, 2048), (1, 8192), (2, 1024), (2, 8192), (4, 1024), (8, 1024),
                   (8, 4096), (16, 1024), (32, 1024), (32, 8192))),
    Case("llama q=4 b=1 t=1024", LLAMA, 1, 4, 1024),
    Case("llama q=8 b=1 t=1024", LLAMA, 1, 8, 1024),
    Case("llama static b=1 1024 of 8192", _form(position="int64", reach=1), 1, 1, 8192, 1024),
    Case("llama static b=1 1024 of 1024", _form(position="int64", reach=1), 1, 1, 1024, 1024),
    Case("llama mask b=1 t=1024", _form(mask="bool"), 1, 1, 1024),
    Case("llama mask b=32 t=1024", _form(mask="bool"), 32, 1, 1024),
    Case("llama bf16 b=32 t=1024", _form(stored="bfloat16"), 32, 1, 1024),
    *(Case(f"llama {s} b={b} t={t}", _form(stored=s), b, 1, t)
      for s in ("int8", "fp8_e4m3") for b, t in ((1, 1024), (1, 8192), (32, 1024))),
    Case("gpt2 b=1 t=1024", _form(12, 12, 64), 1, 1, 1024),
    Case("gpt2 b=32 t=1024", _form(12, 12, 64), 32, 1, 1024),
    Case("llama q=64 b=1 t=1024", LLAMA, 1, 64, 1024),
    Case("bert b=1 t=128", _form(12, 12, 64), 1, 128, 128),
    Case("bert b=8 t=128", _form(12, 12, 64), 8, 128, 128),
    Case("vit b=1 t=197", _form(12, 12, 64), 1, 197, 197),
    *(Case(f"heads of {size} b={b} t={t}", _form(16, 16, size), b, 1, t)
      for size in (8, 40, 72, 88) for b, t in ((1, 1024), (16, 1024))),
    Case("heads of 72 b=1 t=729 q=729", _form(16, 16, 72), 1, 729, 729),
    Case("heads of 40 b=2 t=77 q=1024", _form(8, 8, 40), 2, 1024, 77),
]  # fmt: skip


WAYS = ((8, 1), (12, 1), (16, 1), (4, 2), (8, 2), (4, 1))
"""Warps, and fragments at a time, that are tried."""


def candidates(case: Case) -> list[Plan]:
    """Return the schedules that are tried."""
    rows = 8 if case.tokens * case.form.group <= 8 else 16
    heads = case.batch * case.form.kv_heads * -(-case.tokens * case.form.group // rows)
    clusters = [c for c in (1, 2, 4, 8) if 48 <= heads * c <= 270] or [1 if heads > 48 else 8]
    found = [Plan(rows, w, c, f) for c, (w, f) in itertools.product(clusters, WAYS)]
    chosen = policy(case)
    found = [plan for plan in found if rows == 8 or (plan.fragments == 1 and plan.warps <= 8)]
    return [chosen, *(plan for plan in found if plan != chosen)]


def policy(case: Case) -> Plan:
    """Return the schedule that plans of models take."""
    from schedules.attention import choose
    from targets import get_device

    keys = case.seen or case.keys
    found = choose(case.form, get_device(TARGET), (case.batch, case.tokens, keys)).schedule
    assert isinstance(found, Plan)
    return found


def symbol(form: Attention, plan: Plan) -> str:
    """Return a kernel's name."""
    import zlib

    return f"attention_{zlib.crc32(repr((form, plan)).encode()):08x}"


def build(job: tuple[Attention, Plan, str]) -> tuple[str, dict[str, Any]]:
    """Compile one kernel in a process of its own."""
    from ladder.lower.build import build_function
    from ladder.lower.cuda.attention import emit
    from targets import get_device

    form, plan, folder = job
    device, name = get_device(TARGET), symbol(form, plan)
    place = Path(folder) / name
    place.mkdir(exist_ok=True)
    built = build_function(lambda name: emit(form, device, plan, name), name, device, place)
    return str(built.path), dict(next(iter(built.resources.values())))


class Data:
    """Tensors of a case; keys and values in copies that exceed the L2."""

    def __init__(self, case: Case) -> None:
        import torch

        torch.manual_seed(0)
        form, self.case = case.form, case
        self.dtype = getattr(torch, form.ttype)
        make: Any = lambda *shape: torch.randn(*shape, device="cuda", dtype=self.dtype)  # noqa: E731
        self.q = make(case.batch, case.tokens, form.heads, form.size).transpose(1, 2)
        self.sets = [self._keys(make) for _ in range(copies_for(case.nbytes))]
        self.mask = None
        if form.mask:
            self.mask = torch.rand(case.batch, 1, case.tokens, case.keys, device="cuda") < 0.9
        self.position = torch.full((1, 1), case.seen - 1, device="cuda") if form.position else None

    def _keys(self, make: Any) -> dict[str, Any]:
        import torch

        case, form = self.case, self.case.form
        shape, found = (case.batch, form.kv_heads, case.keys, form.size), {}
        for name in "kv":
            values = make(*shape)
            if form.stored in CODES:
                limit = 127.0 if form.stored == "int8" else 448.0
                scale = values.float().abs().amax(-1, keepdim=True) / limit
                units = values.float() / scale
                stored = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[form.stored]
                found[name] = (units.round() if form.stored == "int8" else units).to(stored)
                found[f"{name}_scale"] = scale
            else:
                found[name] = values
        return found

    def ours(self, entry: Any) -> tuple[list[Call], Any]:
        """Return one call per copy, and the result of all."""
        import torch

        from ladder.runtime.model.attention import arguments

        case = self.case
        out = torch.zeros(
            case.batch, case.tokens, case.form.heads, case.form.size, device="cuda", dtype=self.dtype
        )
        turned = out.transpose(1, 2)
        calls: list[Call] = []
        for keys in self.sets:
            given = {"q": self.q, "out": turned, **keys}
            if self.mask is not None:
                given["mask"] = self.mask.view(torch.uint8)
            if self.position is not None:
                given["position"] = self.position
            calls.append(partial(entry, *arguments(case.form, given)))
        return calls, turned

    def torchs(self, backend: str) -> list[Call]:
        """Return one call of torch's per copy; 8-bit keys are decoded before, outside of the timing."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        attend, mask = torch.nn.functional.scaled_dot_product_attention, self.mask
        if self.position is not None:
            mask = (torch.arange(self.case.keys, device="cuda") <= self.position).expand(
                1, 1, self.case.tokens, -1
            )

        def call(k: Any, v: Any) -> Any:
            grouped = self.case.form.group > 1
            if backend == "default":
                return attend(self.q, k, v, mask, enable_gqa=grouped)
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return attend(self.q, k, v, mask, enable_gqa=grouped)

        pairs = [tuple(self.decoded(keys, name) for name in "kv") for keys in self.sets]
        return [partial(call, k, v) for k, v in pairs]

    def decoded(self, keys: dict[str, Any], name: str) -> Any:
        """Return keys or values in q's type."""
        if f"{name}_scale" not in keys:
            return keys[name]
        return (keys[name].float() * keys[f"{name}_scale"]).to(self.dtype)

    def exact(self, copy: int) -> Any:
        """Return the result in float64."""
        import torch

        keys, form = self.sets[copy], self.case.form
        k, v = (
            keys[n].double() * (keys[f"{n}_scale"].double() if form.stored in CODES else 1.0) for n in "kv"
        )
        k, v = (x.repeat_interleave(form.group, dim=1) for x in (k, v))
        scores = self.q.double() @ k.mT * form.scale
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf)
        if self.position is not None:
            scores = scores[..., : self.case.seen]
            v = v[:, :, : self.case.seen]
        return torch.softmax(scores, -1) @ v


def measure(case: Case, kernels: dict[Plan, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Time a case."""
    import torch

    from ladder.runtime.library import load_module

    data, graphs, notes = Data(case), {}, {}
    exact = data.exact(len(data.sets) - 1)
    bound = LARGEST_ERROR[case.form.ttype]
    for plan, (path, resources) in kernels.items():
        try:
            entry = load_module(Path(path), "cuda")[symbol(case.form, plan)]
            calls, out = data.ours(entry)
            calls[-1]()
            error = float((out.double() - exact).norm() / exact.norm())
            notes[str(plan)] = {"error": error, "registers": resources.get("registers")}
            if not error < bound:
                notes[str(plan)]["wrong"] = True
            graphs[str(plan)] = capture_long(calls)
        except Exception as failure:
            notes[str(plan)] = {"failed": repr(failure)[:300]}
    for backend in ("default", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
        try:
            calls = data.torchs(backend)
            calls[0]()
            graphs[f"torch {backend}"] = capture_long(calls)
        except RuntimeError as failure:
            notes[f"torch {backend}"] = {"failed": repr(failure)[:120]}
    times = {name: statistics.median(found) for name, found in interleaved_us(graphs, ROUNDS).items()}
    del graphs, data
    torch.cuda.empty_cache()
    return {"case": case.name, "bytes": case.nbytes, "times": times, "notes": notes}


def show(row: dict[str, Any]) -> Iterator[str]:
    """Yield lines for people."""
    times = row["times"]
    torchs = {name: t for name, t in times.items() if name.startswith("torch")}
    ours = sorted((t, name) for name, t in times.items() if not name.startswith("torch"))
    best = min(torchs.values(), default=math.nan)
    text = ", ".join(f"{name[6:]} {t:.2f}" for name, t in torchs.items())
    yield f"{row['case']}: torch {text} us; {row['bytes'] / 4.25e6:.2f} us at 4.25 TB/s"
    chosen = next(iter(row["notes"]))
    yield f"    policy: {times.get(chosen, math.nan):.2f} us of best {ours[0][0]:.2f}  {chosen}"
    for t, name in ours[:6]:
        error = row["notes"][name]["error"]
        rate = row["bytes"] / t / 1e6
        yield f"    {t:7.2f} us  x{best / t:.2f}  {rate:.2f} TB/s  error {error:.1e}  {name}"
    for name, note in row["notes"].items():
        if "failed" in note or "wrong" in note:
            yield f"    {name}: {note}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="")
    parser.add_argument("--cases", default="", help="names, comma-separated")
    parser.add_argument("--policy", action="store_true", help="only the schedules that plans take")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    arguments = parser.parse_args()
    chosen = arguments.cases.split(",") if arguments.cases else [case.name for case in CASES]
    cases = [case for case in CASES if case.name in chosen]
    tried = {case.name: [policy(case)] if arguments.policy else candidates(case) for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        jobs = list(dict.fromkeys((case.form, plan, folder) for case in cases for plan in tried[case.name]))
        with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
            built = {job[:2]: found for job, found in zip(jobs, pool.map(build, jobs), strict=True)}
        print(f"{len(built)} kernels", flush=True)
        rows = []
        for case in cases:
            rows.append(measure(case, {plan: built[case.form, plan] for plan in tried[case.name]}))
            print("\n".join(show(rows[-1])), flush=True)
            if arguments.output:
                write_record(arguments.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
