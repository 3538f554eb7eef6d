"""Models cut over two processes: the numbers of the whole model, the same in every process, in one graph."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ladder
from ladder.integrations.distributed import only_own, own_experts, shard_experts
from tile_types.errors import UnknownNameError

WORKER = Path(__file__).with_name("distributed_worker.py")
PATHS = [*map(str, WORKER.parents[1:3]), *filter(None, [os.environ.get("PYTHONPATH")])]
"""Where processes find `one_schedule`, and the package `benchmarks`, which is not installed."""
RANKS = 2
SPLITS = {"not awaited"}
"""Programs whose graph breaks at the collective."""


def run_in_a_group(folder: Path, part: str, kernels: Path) -> list[dict[str, Any]]:
    """Return what each process of a group finds."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(rank), str(RANKS), part, str(kernels)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, kernels_of_the_run: Path) -> list[dict[str, Any]]:
    """Return what each process found."""
    pytest.importorskip("transformers", minversion="5")
    return run_in_a_group(tmp_path_factory.mktemp("group"), "everything", kernels_of_the_run / "one schedule")


@pytest.mark.costly(together="what a group finds")
def test_a_sharded_llama_computes_what_the_whole_does(found: list[dict[str, Any]]) -> None:
    for rank in found:
        results = rank["llama"]
        whole = results["whole"].double()
        for way in ("eager", "compiled"):
            assert torch.equal(results[way], found[0]["llama"][way])
            assert (results[way].double() - whole).norm() <= 2e-6 * whole.norm()
        assert results["share"] < 0.53  # of the whole layer's bytes; scales are padded


@pytest.mark.costly(together="what a group finds")
def test_its_plan_is_one_graph_with_collectives_as_steps(found: list[dict[str, Any]]) -> None:
    for rank in found:
        results = rank["llama"]
        assert "whole; 1 graphs" in results["explained"]
        assert results["plan"].count("all_reduce") == 2 * 2 * 2  # title and reason, two layers, two sums
        assert results["plan"].count("all_gather") == 2


@pytest.mark.costly
@pytest.mark.parametrize("part", ["loaded", "stored"])
def test_transformers_cuts_models_while_it_loads_them(
    part: str, tmp_path: Path, kernels_of_the_run: Path
) -> None:
    """By ``tp_plan="auto"``: of full precision, and of files that were saved quantized."""
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    for rank in run_in_a_group(tmp_path, part, kernels_of_the_run / "one schedule"):
        assert "whole; 1 graphs" in rank.pop("explained", "whole; 1 graphs")
        for name, (given, wanted) in rank.items():
            torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.costly(together="what a group finds")
def test_layers_take_and_give_every_layout(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for name, (given, wanted) in rank["layouts"].items():
            torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.costly(together="what a group finds")
def test_collectives_of_eager_programs_are_captured(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for name, (compiled, eager, explained) in rank["programs"].items():
            assert torch.equal(compiled, eager), name
            assert ("whole" in explained.splitlines()[0]) == (name not in SPLITS), explained


@pytest.mark.costly
@pytest.mark.parametrize("by", ["experts", "rows", "columns"])
def test_experts_are_cut_by_expert_and_within(by: str) -> None:
    """Devices' results add up to, or are joined to, those of all experts on one device."""
    torch.manual_seed(0)
    matrices = [ladder.quantize(torch.randn(32, 64), "int4", group_size=32) for _ in range(4)]
    offsets, x = torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32), torch.randn(9, 64)

    def multiplied(held: list[Any], tokens: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        n, k = held[0].shape
        op = ladder.GroupedMatmul(E=len(held), N=n, K=k, weight="int4", activation="float32", group_size=32)
        return op(tokens, op.pack(held), ranges)

    whole, results = multiplied(matrices, x, offsets), []
    for index in range(2):
        held = shard_experts(matrices, by, index, 2)
        ranges = own_experts(offsets, index, 2) if by == "experts" else offsets
        given = x.chunk(2, 1)[index].contiguous() if by == "columns" else x
        result = multiplied(held, given, ranges)
        results.append(only_own(result, ranges) if by == "experts" else result)
    joined = torch.cat(results, 1) if by == "rows" else results[0] + results[1]
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)


def test_an_unknown_way_to_cut_experts_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rows'"):
        shard_experts([], "row", 0, 2)


FAILING = """
import os, sys, time
import torch, torch.distributed as dist
from ladder.integrations.ranks import together

folder, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
with together(silence=2):
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), 9)
    if rank == 1 and how != "none":
        raise ValueError("no such weight")
    if how == "waits":
        dist.all_reduce(torch.ones(3))
    elif how == "computes" or how == "killed":
        time.sleep(300)
"""

ENDS = {
    "none": ("", 0, 0),
    "waits": ("RankFailedError: rank 1 has failed: ValueError: no such weight", 1, 1),
    "computes": ("RankFailedError: rank 1 has failed: ValueError: no such weight", 1, 1),
    "killed": ("rank 1 has given no sign of life for 2 s", 1, -9),
}


def in_the_background() -> None:
    """Ignore SIGINT, as what a shell starts behind ``&`` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.costly
@pytest.mark.parametrize("how", ENDS)
def test_when_a_process_fails_the_other_says_so_within_seconds(how: str, tmp_path: Path) -> None:
    """The group's own timeout is 30 minutes; the test's is what these need to start."""
    message, *codes = ENDS[how]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FAILING, str(tmp_path), str(rank), how],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=in_the_background if how == "computes" else None,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == codes, said
    assert message in said[0]


@pytest.mark.costly
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    """As it says: by torchrun, in two processes."""
    page = Path(ladder.__file__).with_name("integrations") / "README.md"
    (code,) = re.findall(r"<!-- test: torchrun -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "two.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ladder.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "two.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("_c10d_functional.all_reduce") == 2 * 2  # title and reason, two processes
