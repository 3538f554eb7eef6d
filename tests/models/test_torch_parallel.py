"""torch's own ways to train and serve on several devices, over quantized layers: two processes by gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_distributed import PATHS, RANKS

PROGRAM = """
import os, sys
sys.path[:0] = {paths!r}
import torch, ladder
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

folder, rank, part = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size={ranks})
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))


def model(seed=0, weight="int8", bias=True):
    torch.manual_seed(seed)
    layers = nn.Linear(64, 96, bias=bias), nn.ReLU(), nn.Linear(96, 48, bias=bias)
    return ladder.quantize_(nn.Sequential(*layers).eval(), weight, group_size=16)


def data_parallel():
    own, wanted = model(rank), model(0)(x)
    whole = nn.parallel.DistributedDataParallel(nn.Sequential(own, nn.Linear(48, 8)))
    whole(x).sum().backward()
    assert torch.equal(own(x), wanted)  # all have the first one's weights
    if rank:  # what was quantized here is no more: nothing says it is
        for stale in (lambda: own[0].half(), lambda: own[0].weight):
            try:
                stale()
            except (ladder.LadderError, AttributeError):
                continue
            raise AssertionError
        packed = ladder.Linear(64, 96, weight="int8", group_size=16)
        packed.load_state_dict(own[0].state_dict())
        assert torch.equal(packed(x), own[0](x))
    else:
        own[0].half()(x.half())


def sharded():
    from torch.distributed.fsdp import fully_shard
    whole = nn.Sequential(model(), nn.Linear(48, 8))
    wanted = whole(x)
    fully_shard(whole[0][0]), fully_shard(whole)
    whole(x).sum().backward()
    assert torch.equal(whole(x), wanted)


def tensor_parallel():
    mesh, styles = init_device_mesh("cpu", ({ranks},)), {{"0": ColwiseParallel(), "2": RowwiseParallel()}}
    for weight, bias in (("int8", True), ("nf4", True), ("int8", False)):
        own = model(0, weight, bias)
        if not bias:
            own[0].bias = None
        wanted = own(x)
        parallelize_module(own, mesh, styles)
        given = x.clone().requires_grad_()
        y = own(given)
        y.sum().backward()
        assert (y - wanted).abs().max() <= 1e-5
        same = x.clone().requires_grad_()
        model(0, weight, bias)(same).sum().backward()
        assert (given.grad - same.grad).abs().max() <= 1e-5
    layer = model()[0]
    for shape, axis in (((5, 64), 0), ((3, 4, 64), 1), ((3, 64), -1), ((1, 64), 0), ((64,), 0), ((0, 64), 0)):
        rows = torch.ones(shape) * torch.arange(64)
        for lies in (Shard(axis % len(shape)), Replicate()):
            y = layer(distribute_tensor(rows, mesh, [lies]))
            assert torch.equal(y.full_tensor(), layer(rows)), (shape, lies)


def checkpoints():
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    for kept in (True, False):
        one, other = (model(seed) for seed in (0, 1))
        if not kept:
            one, other = (ladder.Linear.from_linear(nn.Linear(64, 8), keep_canonical=False) for _ in range(2))
        where = f"{{folder}}/{{kept}}"
        checkpoint.save(get_model_state_dict(one), checkpoint_id=where)
        state = get_model_state_dict(other)
        checkpoint.load(state, checkpoint_id=where)
        set_model_state_dict(other, state)
        if rank == 0:
            assert torch.equal(other(x), one(x))


def stages():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    own = model()
    stage = PipelineStage(own[:2] if rank == 0 else own[2:], rank, {ranks}, torch.device("cpu"))
    with torch.no_grad():
        y = ScheduleGPipe(stage, n_microbatches=2).step(*([x] if rank == 0 else []))
    assert rank == 0 or torch.equal(y, own(x))


globals()[part]()
dist.destroy_process_group()
"""


@pytest.mark.costly
@pytest.mark.parametrize("part", ["data_parallel", "sharded", "tensor_parallel", "checkpoints", "stages"])
def test_quantized_layers_run_under(part: str, tmp_path: Path) -> None:
    text = PROGRAM.format(paths=PATHS, ranks=RANKS)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(tmp_path), str(rank), part], stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, said
