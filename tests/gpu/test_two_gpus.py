"""Sums over peers' memory: bits, CUDA graphs, how processes end when none or one fails.

The kernel alone runs on one GPU too, as two ranks on two streams.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ladder.lower.cuda.peer_source import LARGEST, buffer_bytes
from ladder.runtime.peers import TYPES, Peers, kernel

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

START = """
import os, sys
import torch, torch.distributed as dist
import ladder
from ladder.integrations.distributed import release_collectives
from ladder.integrations.ranks import together
from ladder.runtime import peers

folder, rank = sys.argv[1], int(sys.argv[2])
where = torch.device("cuda", rank)
torch.cuda.set_device(where)
store = f"file://{folder}/store"
dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2, device_id=where)
"""

SUMS = """
def program(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1

group = dist.group.WORLD.group_name
with together(), torch.no_grad():
    fast = ladder.compile(program)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size in (0, 1, 3, 8191, 8192, 60000, 131072 // dtype.itemsize):
            for turn in range(5):  # the plan is a CUDA graph from the third call on
                given = torch.Generator().manual_seed(size + turn)
                both = torch.randn(2, size + 1, generator=given).to(dtype)
                both[0, : size // 2 : 5], both[1, : size // 2 : 7] = float("inf"), float("nan")
                both[:, size // 2 :: 3] = -0.0
                x = both.to(where)[rank, 1:]  # at an address that 8 does not divide
                wanted = ((both[0, 1:] * 2).float() + (both[1, 1:] * 2).float()).to(dtype) + 1
                found = fast(x.clone()).cpu()
                assert torch.equal(found.isnan(), wanted.isnan()), (dtype, size, turn)
                assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7)), (dtype, size, turn)
                y = peers.all_reduce(x.contiguous(), "sum", group)
                every = torch.empty(2, size, dtype=dtype, device=where)
                dist.all_gather_into_tensor(every, y)
                bits = every.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
                assert torch.equal(bits[0], bits[1])
                total, known = (both[0, 1:].float() + both[1, 1:].float()).to(dtype), ~y.cpu().isnan()
                assert torch.equal(y.cpu()[known], total[known])
                assert torch.equal(y.cpu().signbit()[known], total.signbit()[known])
    assert peers.peers_of(group, where) is not None, "NCCL added up"
    integers = torch.full((5,), rank + 1, device=where)
    assert peers.all_reduce(integers, "sum", group).tolist() == [3] * 5
    assert peers.all_reduce(integers.float(), "max", group).tolist() == [2.0] * 5
    assert "whole" in fast.explain().splitlines()[0]
release_collectives()
dist.destroy_process_group()
print("ended")
"""

FAILING = """
import time
with together(silence=3):
    x, group = torch.ones(8192, device=where, dtype=torch.float16), dist.group.WORLD.group_name
    assert (peers.all_reduce(x, "sum", group) == 2).all()
    if rank == 1:
        {how}
    for _ in range(40):
        x = peers.all_reduce(x, "sum", group)
    torch.cuda.synchronize()
"""

ENDS = {
    "raises": ("raise ValueError('no such weight')", "rank 1 has failed: ValueError: no such weight", 1),
    "is killed": ("os.kill(os.getpid(), 9)", "rank 1 has given no sign of life for 3 s", -9),
}


def run(code: str, folder: Path, seconds: float) -> list[tuple[int, str]]:
    """Return the exit status of two processes, and what they say; both must end in time."""
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + code, str(folder), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "LADDER_PEER_MEMORY": "1"},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=seconds - (time.monotonic() - began))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@two_gpus
def test_sums_are_right_the_same_on_both_and_processes_end(tmp_path: Path) -> None:
    for status, text in run(SUMS, tmp_path, 150):
        assert status == 0, text
        assert "ended" in text


@two_gpus
@pytest.mark.parametrize("how", ENDS)
def test_who_waits_for_a_peer_that_fails_ends_within_seconds(how: str, tmp_path: Path) -> None:
    """Starting and compiling take most of the time."""
    action, message, status = ENDS[how]
    (first, said), (second, _) = run(FAILING.replace("{how}", action), tmp_path, 60)
    assert (first, second) == (1, status), said
    assert message in said


@pytest.fixture
def ranks() -> Iterator[list[Peers]]:
    """Return two ranks on one GPU; they are told to wait no longer at the end."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    where = torch.device("cuda", 0)
    buffers = [torch.zeros(buffer_bytes(2), dtype=torch.uint8, device=where) for _ in range(2)]
    made = [Peers(where, rank, [b.data_ptr() for b in buffers], buffers) for rank in range(2)]
    yield made
    for peers in made:
        peers.stop.fill_(1)
    torch.cuda.synchronize()


def finished(streams: list[torch.cuda.Stream]) -> bool:
    """Tell whether all work of streams ends within seconds."""
    limit = time.monotonic() + 20
    while not all(stream.query() for stream in streams):
        if time.monotonic() > limit:
            return False
    return True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_two_ranks_on_one_gpu_add_up_in_graphs(dtype: torch.dtype, ranks: list[Peers]) -> None:
    """A rank's calls are a CUDA graph that is replayed with other values, side by side with the other's."""
    where, sizes = ranks[0].where, (1, 3, 8191, 8192, LARGEST // dtype.itemsize)
    given = [[torch.zeros(n + 1, dtype=dtype, device=where)[1:] for n in sizes] for _ in ranks]
    streams, graphs, found = [torch.cuda.Stream() for _ in ranks], [], []
    kernel(TYPES[dtype], 2, where)  # loaded before a graph is recorded
    for peers, stream, values in zip(ranks, streams, given, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found.append([peers.all_reduce(x) for x in values])
        graphs.append(graph)
    for turn in range(20):
        generator = torch.Generator(where).manual_seed(turn)
        for values in given:
            for x in values:
                x.copy_(torch.randn(x.shape, generator=generator, device=where) * 30)
                x[: len(x) // 3 : 5] = (float("inf"), float("nan"), -0.0)[turn % 3]
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        assert finished(streams), "a rank waits for ever"
        for a, b, first, second in zip(*given, *found, strict=True):
            bits = torch.int32 if dtype.itemsize == 4 else torch.int16
            assert torch.equal(first.view(bits), second.view(bits))
            wanted = (a.float() + b.float()).to(dtype)
            assert torch.equal(first.isnan(), wanted.isnan())
            assert torch.equal(first[~wanted.isnan()].view(bits), wanted[~wanted.isnan()].view(bits))


def test_a_rank_alone_waits_until_it_is_told_to_stop(ranks: list[Peers]) -> None:
    stream, x = torch.cuda.Stream(), torch.ones(8192, device=ranks[0].where)
    kernel("float32", 2, ranks[0].where)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        ranks[0].all_reduce(x)
    time.sleep(0.2)
    assert not stream.query()
    ranks[0].stop.fill_(1)
    assert finished([stream])
