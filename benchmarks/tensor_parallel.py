"""A decode step of decoder layers over several GPUs: time per layer, what collectives add, errors.

``torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --model 70b --layers 8 --output two.json``.
Layers are cut by outputs and inputs (`ladder.integrations.distributed`), compiled by `ladder.compile`, and
run as CUDA graphs, collectives inside. The same layers without collectives (their sums are wrong) show what
these add; the first process then runs the whole layers alone.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ladder
from benchmarks.harness import (
    environment,
    events,
    relative_error,
    write_record,
)
from benchmarks.model_cases import LAYERS, CachedLayer, Stack, Step
from ladder import knobs
from ladder.integrations.distributed import ColwiseLinear, RowwiseLinear, connected, release_collectives
from ladder.runtime import peers
from tile_types import QuantizedTensor
from tile_types.shards import COLUMNS, ROWS, shard

CUT = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ROWS),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ROWS),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), COLUMNS),
}
"""Linear layer -> the axis of its weight that is cut."""

WAYS = (("NCCL", False), ("peers' memory", True))
"""How sums are made, and whether that is over peers' memory."""

STYLES = {ROWS: ColwiseLinear, COLUMNS: RowwiseLinear}

ROUNDS = 30


def quantized_layer(step: Step, weight: str, group: int, where: torch.device) -> dict[str, QuantizedTensor]:
    """Return the random weights of a layer, the same in every process."""
    with torch.device("meta"):
        layer = CachedLayer(LAYERS[step.model], step.batch, step.context, torch.float16)
    generator = torch.Generator(where).manual_seed(0)
    found = {}
    for name in CUT:
        linear: Any = layer.get_submodule(name)
        n, k = linear.weight.shape
        values = torch.randn(n, k, generator=generator, device=where, dtype=torch.float16) * k**-0.5
        found[name] = ladder.quantize(values, weight, group_size=group)
    return found


def stack(
    step: Step, weights: dict[str, QuantizedTensor], mesh: DeviceMesh | None, connect: bool
) -> nn.Module:
    """Return what a process holds of a stack of layers, all of the same weights in memory of their own.

    Parameters
    ----------
    mesh
        The devices; None for one device that holds all.
    connect
        Whether the layers add up what the devices compute.
    """
    index, count = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    where = next(iter(weights.values())).storage.device
    torch.manual_seed(2)
    with torch.device("meta"):
        layer: Any = CachedLayer(LAYERS[step.model], step.batch, step.context, torch.float16)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight = nn.Parameter(
            (torch.rand(norm.weight.shape) + 0.5).half().to(where), requires_grad=False
        )
    attention = layer.self_attn
    for name in ("keys", "values"):
        whole = torch.randn(getattr(attention, name).shape)
        setattr(attention, name, whole.half().chunk(count, 1)[index].to(where).contiguous())
    attention.heads, attention.kv_heads = attention.heads // count, attention.kv_heads // count
    for name, axis in CUT.items():
        own = shard(weights[name], axis, index, count)
        held = ladder.Linear.from_quantized(own, dtype=torch.float16, device=where, keep_canonical=False)
        layer.set_submodule(name, held)
    stacked = Stack(layer, step.layers).eval()
    for each in stacked.layers if mesh is not None and connect else ():
        for name, axis in CUT.items():
            connected(each.get_submodule(name), mesh, axis, STYLES[axis]())  # type: ignore[arg-type]
    return stacked


def compiled(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """Return the recorded CUDA graph of a model, its result, and what became of it."""
    start = time.perf_counter()
    fast = ladder.compile(model)
    fast(*arguments)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    result = fast(*arguments).clone()  # the plan's: the first call's is the recorded run's
    for _ in range(4):
        fast(*arguments)
    torch.cuda.synchronize()
    graphs = [graph for built in fast.models for graph in built.executable.recorded()]
    plan = fast.plan().splitlines()
    about = {
        "compile_s": round(seconds, 2),
        "outcome": fast.outcome,
        "refused": list(fast.refused),
        "graphs": len(graphs),
        "collectives": sum(line.startswith("library") and "c10d" in line for line in plan),
        "plan": plan[:24],
    }
    return (fast, graphs[0] if len(graphs) == 1 else None), result, about


def us(call: Callable[[], Any], together: bool, rounds: int = ROUNDS, per: int = 4) -> float:
    """Return the median microseconds of a call, of the slower process; ``per`` calls follow each other."""
    times = []
    for _ in range(rounds):
        if together:
            dist.barrier()
        torch.cuda.synchronize()
        begin, end = events()
        begin.record()
        for _ in range(per):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / per)
    found = torch.tensor([statistics.median(times[3:])], device="cuda")
    if together:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def measured(
    model: nn.Module, arguments: tuple[Any, ...], layers: int, together: bool
) -> tuple[dict[str, Any], Any]:
    """Return times of a model, and its result."""
    (fast, graph), result, about = compiled(model, arguments)
    run = fast if graph is None else graph.replay
    row = {"us_per_layer": us((lambda: run(*arguments)) if graph is None else run, together) / layers}
    row["call_us_per_layer"] = us(lambda: fast(*arguments), together, per=1) / layers
    return {**row, **about}, result


def collective_us(width: int) -> dict[str, float]:
    """Return microseconds of one all-reduce of a token, in a CUDA graph of many, by NCCL and by plans."""
    x = torch.randn(1, width, device="cuda").half()
    group, operators = dist.group.WORLD.group_name, torch.ops._c10d_functional  # type: ignore[union-attr]

    def functional() -> torch.Tensor:
        return operators.wait_tensor(operators.all_reduce(x, "sum", group))  # type: ignore[no-any-return]

    ways: dict[str, Callable[[], Any]] = {
        "functional": functional,
        "in place": lambda: dist.all_reduce(x),
        "peers' memory": lambda: peers.all_reduce(x, "sum", group),
    }
    return {name: graph_us(call, 20) for name, call in ways.items()}


def graph_us(call: Callable[[], Any], count: int) -> float:
    """Return microseconds of a call in a CUDA graph of many."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    return us(graph.replay, True) / count


SIZES = (1, 4096, 8192, 32768, 131072, 262144, 524288)
"""Numbers of a summand; of the largest plans leave the two widest types to NCCL."""


def sums_by_size() -> dict[str, Any]:
    """Return, for each type and size, microseconds of both ways, whether ranks' bits agree, and the error."""
    group, found = dist.group.WORLD.group_name, {}  # type: ignore[union-attr]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size in SIZES:
            generator = torch.Generator("cuda").manual_seed(dist.get_rank())
            x = torch.randn(size, device="cuda", generator=generator).to(dtype)
            total = peers.all_reduce(x, "sum", group)
            every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(every, x)
            wanted = torch.stack([each.float() for each in every]).sum(0).to(dtype)
            dist.all_gather(every, total)
            nccl = x.clone()
            taken = peers.peers_of(group, x.device)
            found[f"{dtype} {size}"] = {
                "over peers": taken is not None and taken.takes(x, "sum"),
                "right": torch.equal(total, wanted),
                "ranks_equal": all(torch.equal(every[0], other) for other in every),
                "us": graph_us(functools.partial(peers.all_reduce, x, "sum", group), 20),
                "nccl_us": graph_us(functools.partial(dist.all_reduce, nccl), 20),
            }
    return found


def peer_us(width: int) -> dict[str, Any]:
    """Return microseconds of torch's one-shot all-reduce over peers' memory, or why there is none."""
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")

    found: dict[str, Any] = {}
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        try:
            buffer = symmetric.empty(1, width, dtype=dtype, device="cuda")
            symmetric.rendezvous(buffer, group)
            x = torch.ones(1, width, dtype=dtype, device="cuda")
            operator = torch.ops.symm_mem.one_shot_all_reduce_copy
            total = operator(buffer, x, "sum", group)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(20):
                    operator(buffer, x, "sum", group)
            right = bool((total == dist.get_world_size()).all())
            found[str(dtype)] = {"us": us(graph.replay, True) / 20, "right": right}
        except Exception as error:
            found[str(dtype)] = f"{type(error).__name__}: {error}"[:300]
    return found


def dequantized_error(step: Step, weights: dict[str, QuantizedTensor], result: torch.Tensor) -> float:
    """Return the error of one layer's result against float32 on the decoded weights."""
    stacked: Any = stack(step, weights, None, False)
    plain = stacked.layers[0]
    for name in CUT:
        matrix = torch.as_tensor(weights[name].dequantize("float32"))
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(matrix, requires_grad=False)
        plain.set_submodule(name, linear)
    plain.float()
    arguments = [x.float() if x.is_floating_point() else x for x in step.arguments(str(result.device))]
    return relative_error(result, plain(*arguments))


def run(options: argparse.Namespace, mesh: DeviceMesh, keep: Callable[[str, Any], None]) -> None:
    """Measure everything; what is known so far is kept at each step."""
    where = torch.device("cuda", torch.cuda.current_device())
    step = Step(options.model, 1, 1, options.context, options.layers)
    start = time.perf_counter()
    weights = quantized_layer(step, options.weight, options.group_size, where)
    keep("quantize_s", time.perf_counter() - start)
    arguments = step.arguments(str(where))
    keep("all_reduce_us", collective_us(LAYERS[step.model].width))
    cut: dict[Any, Any] = {}
    results: dict[int, torch.Tensor] = {}
    for way, over_peers in WAYS:
        release_collectives()  # the group decides anew
        with knobs.override(peer_memory=over_peers):
            for count in sorted({1, step.layers}):
                sized = Step(options.model, 1, 1, options.context, count)
                model = stack(sized, weights, mesh, True)
                row, result = measured(model, arguments, count, True)
                row["error_to_nccl"] = relative_error(result, results.setdefault(count, result))
                every = [torch.empty_like(result) for _ in range(mesh.size())]
                dist.all_gather(every, result)
                row["ranks_equal"] = all(torch.equal(every[0], other) for other in every)
                cut[way, count] = row
                keep(f"cut, {count} layers, {way}", row)
                del model
    sums, _ = measured(stack(step, weights, mesh, False), arguments, step.layers, True)
    keep("without collectives", sums)
    alone = sums["us_per_layer"]
    added = {way: (cut[way, step.layers]["us_per_layer"] - alone) / 2 for way, _ in WAYS}
    keep("added_us_per_all_reduce", added)
    if mesh.get_local_rank() == 0:
        for count in sorted({1, step.layers}):
            sized = Step(options.model, 1, 1, options.context, count)
            row, whole = measured(stack(sized, weights, None, False), arguments, count, False)
            row["cut_is_faster_by"] = {
                way: row["us_per_layer"] / cut[way, count]["us_per_layer"] for way, _ in WAYS
            }
            row["error_of_cut"] = relative_error(results[count], whole)
            keep(f"one GPU, {count} layers", row)
        one = Step(options.model, 1, 1, options.context, 1)
        keep("errors against float32, one layer", {
            "cut": dequantized_error(one, weights, results[1]),
        })  # fmt: skip
    dist.barrier()
    keep("sums by size", sums_by_size())
    keep("peer_all_reduce_us", peer_us(LAYERS[step.model].width))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(LAYERS), default="70b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--weight", default="int4")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(where)
    dist.init_process_group("nccl", device_id=where)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    report: dict[str, Any] = {"command": sys.argv[1:], "environment": environment()} if rank == 0 else {}

    def keep(name: str, value: Any) -> None:
        if rank == 0:
            report[name] = copy.deepcopy(value)
            shown = {k: v for k, v in value.items() if k != "plan"} if isinstance(value, dict) else value
            print(f"{name}: {json.dumps(shown, default=str)}", flush=True)
            if options.output is not None:
                write_record(options.output, report)

    with torch.no_grad(), knobs.override(peer_memory=True):
        run(options, mesh, keep)
    release_collectives()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
