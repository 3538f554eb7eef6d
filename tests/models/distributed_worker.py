"""What each process of `test_distributed` runs: it computes, and leaves what it found for the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_schedule import plans_of_one_schedule
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import ladder
from benchmarks import zoo
from ladder.integrations.distributed import ColwiseLinear, RowwiseLinear
from ladder.integrations.dynamo import backend

zoo.import_torchvision()


def llama() -> Any:
    """Return a tiny quantized Llama, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config).eval()
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(bias)
    return ladder.quantize_(model, "int4", group_size=32)


def plan() -> dict[str, Any]:
    """Return the styles of Llama's layers."""
    by_outputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    by_inputs = ("self_attn.o_proj", "mlp.down_proj")
    return {
        **{f"model.layers.*.{name}": ColwiseLinear() for name in by_outputs},
        **{f"model.layers.*.{name}": RowwiseLinear() for name in by_inputs},
        "lm_head": ColwiseLinear(output_layouts=Replicate()),
    }


def sharded_llama(mesh: DeviceMesh) -> dict[str, Any]:
    """Run the model whole, sharded, and sharded and compiled."""
    ids, model = torch.arange(7)[None] * 5, llama()
    whole = model(ids, use_cache=False).logits
    bytes_whole = model.model.layers[0].mlp.down_proj.weight_nbytes
    parallelize_module(model, mesh, plan())
    eager = model(ids, use_cache=False).logits
    fast = ladder.compile(model)
    compiled = [fast(ids, use_cache=False).logits for _ in range(3)]
    return {
        "whole": whole,
        "eager": eager,
        "compiled": compiled[-1],
        "explained": fast.explain(),
        "plan": fast.plan(),
        "share": model.model.layers[0].mlp.down_proj.weight_nbytes / bytes_whole,
    }


def loading(mesh: DeviceMesh, folder: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a small model, and what loads it quantized, and what loads it over the mesh."""
    import transformers
    from transformers.distributed import DistributedConfig

    from ladder.integrations.transformers import LadderConfig

    os.environ.update(RANK=str(mesh.get_local_rank()), LOCAL_RANK="0", WORLD_SIZE=str(mesh.size()))
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    if mesh.get_local_rank() == 0:
        model.save_pretrained(folder / "plain")
    dist.barrier()
    spread = {"distributed_config": DistributedConfig(tp_size=mesh.size(), tp_plan="auto")}
    return model, {"quantization_config": LadderConfig("int4", group_size=16)}, spread


def loaded(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Return logits and tokens of a model that is quantized and cut while it is loaded, and of the whole."""
    model, quantized, spread = loading(mesh, folder)
    ids, load = torch.arange(6)[None], type(model).from_pretrained
    whole, part = load(folder / "plain", **quantized), load(folder / "plain", **quantized, **spread)
    fast = ladder.compile(part)
    for _ in range(2):
        compiled = fast(ids, use_cache=False).logits
    tokens = [m.generate(ids, max_new_tokens=6, do_sample=False).float() for m in (part, whole)]
    return {
        "eager": (part(ids).logits, whole(ids).logits),
        "compiled": (compiled, whole(ids).logits),
        "tokens": tokens,
        "explained": fast.explain(),
    }


def stored(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Return logits of a model that was saved quantized, cut while it is loaded, and of the whole."""
    from ladder.integrations.transformers import load_pretrained

    model, quantized, spread = loading(mesh, folder)
    whole = type(model).from_pretrained(folder / "plain", **quantized)
    if mesh.get_local_rank() == 0:
        whole.save_pretrained(folder / "quantized")
    dist.barrier()
    ids, part = torch.arange(6)[None], load_pretrained(type(model), folder / "quantized", **spread)
    return {"eager": (part(ids).logits, whole(ids).logits)}


def layouts(mesh: DeviceMesh) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return what layers of every layout give, and what they should."""
    torch.manual_seed(1)
    linear = torch.nn.Linear(64, 48)
    index, count, x = mesh.get_local_rank(), mesh.size(), torch.randn(4, 64)

    def made(style: Any, given: torch.Tensor) -> torch.Tensor:
        layer = ladder.Linear.from_linear(linear, "int8", group_size=32)
        return parallelize_module(layer, mesh, style)(given)

    wanted = ladder.Linear.from_linear(linear, "int8", group_size=32)(x)
    rows, columns = wanted.chunk(count)[index], wanted.chunk(count, 1)[index]
    mine = x.chunk(count, 1)[index]
    return {
        "colwise": (made(ColwiseLinear(), x), columns),
        "colwise, gathered": (made(ColwiseLinear(output_layouts=Replicate()), x), wanted),
        "colwise of rows": (made(ColwiseLinear(input_layouts=Shard(0)), x.chunk(count)[index]), columns),
        "rowwise": (made(RowwiseLinear(), mine), wanted),
        "rowwise, split": (made(RowwiseLinear(input_layouts=Replicate()), x), wanted),
        "rowwise, scattered": (made(RowwiseLinear(output_layouts=Shard(0)), mine), rows),
        "rowwise, DTensor": (made(RowwiseLinear(use_local_output=False), mine).full_tensor(), wanted),
    }


def _gather(x: torch.Tensor) -> torch.Tensor:
    found = x.new_empty(2 * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(found, x)
    return found


def _scatter(x: torch.Tensor) -> torch.Tensor:
    found = x.new_empty(x.shape[0] // 2, *x.shape[1:])
    dist.reduce_scatter_tensor(found, x, op=dist.ReduceOp.MAX)
    return found


def _in_place(x: torch.Tensor, **options: Any) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, **options)
    return y


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.broadcast(y, src=1)
    return y


def _functional(x: torch.Tensor) -> torch.Tensor:
    return torch.distributed._functional_collectives.all_reduce(x * 2, "sum", dist.group.WORLD)


def _argument(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x + 1


def _not_awaited(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 3
    work.wait()
    return y + z


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": _in_place,
    "all_reduce of a group": lambda x: _in_place(x, group=dist.group.WORLD),
    "all_reduce, product": lambda x: _in_place(x, op=dist.ReduceOp.PRODUCT),
    "all_reduce of an argument": _argument,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _gather,
    "reduce_scatter_tensor": _scatter,
    "functional": _functional,
    "not awaited": _not_awaited,
}


def programs(mesh: DeviceMesh) -> dict[str, tuple[torch.Tensor, torch.Tensor, str]]:
    """Return results of programs with collectives, compiled and eager, and what became of them."""
    found = {}
    for name, program in PROGRAMS.items():
        fast = ladder.compile(program)
        for _ in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(mesh.get_local_rank()))
            compiled = fast(x.clone()) + 0
        found[name] = (compiled, program(x.clone()) + 0, fast.explain())
    through = torch.compile(_functional, backend=backend, fullgraph=True)
    found["torch.compile"] = (through(x), _functional(x) + 0, "whole")
    return found


def everything(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Return what needs no package but torch and transformers."""
    return {"llama": sharded_llama(mesh), "layouts": layouts(mesh), "programs": programs(mesh)}


PARTS = {"everything": everything, "loaded": loaded, "stored": stored}


def main(folder: Path, rank: int, count: int, part: str, kernels: Path) -> None:
    """Run a part, and save what it returns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    with torch.no_grad(), plans_of_one_schedule(kernels):
        found = PARTS[part](init_device_mesh("cpu", (count,)), folder)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
