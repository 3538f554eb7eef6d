"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tile_types import library

GOLDEN = Path(__file__).parent / "golden"

DAYS: Mapping[str, int] = {
    "capture/test_capture_beside_compile.py": 2,
    "capture/test_capture_branches.py": 4,
    "capture/test_capture_compiled.py": 8,
    "capture/test_capture_expected.py": 4,
    "capture/test_capture_nested.py": 4,
    "capture/test_capture_objects.py": 4,
    "capture/test_capture_programs.py": 14,
    "capture/test_capture_shapes.py": 4,
    "capture/test_guard_parts.py": 2,
    "capture/test_standing_tensors.py": 4,
    "formats/test_damage.py": 4,
    "formats/test_use.py": 14,
    "integration/test_api.py": 10,
    "integration/test_batch_invariance.py": 10,
    "integration/test_cli.py": 14,
    "integration/test_experts.py": 8,
    "integration/test_first_run.py": 8,
    "integration/test_forks.py": 8,
    "integration/test_rocm_compile.py": 14,
    "integration/test_spills.py": 8,
    "integration/test_superopt_cli.py": 8,
    "integration/test_torch_ops.py": 10,
    "models/test_attention_parts.py": 14,
    "models/test_calibration.py": 3,
    "models/test_chain_elements.py": 4,
    "models/test_convolution_layouts.py": 10,
    "models/test_cpu_chains.py": 14,
    "models/test_dynamo_programs.py": 4,
    "models/test_failing.py": 4,
    "models/test_faults.py": 4,
    "models/test_float_contract.py": 14,
    "models/test_folding.py": 4,
    "models/test_gpu_chains.py": 10,
    "models/test_kept_views.py": 2,
    "models/test_models.py": 10,
    "models/test_numbers.py": 2,
    "models/test_onnx.py": 10,
    "models/test_onnx_codes.py": 4,
    "models/test_onnx_graphs.py": 4,
    "models/test_onnx_sizes.py": 4,
    "models/test_onnx_torch.py": 8,
    "models/test_onnx_transposed.py": 2,
    "models/test_open_sizes.py": 10,
    "models/test_open_slices.py": 10,
    "models/test_operand_strides.py": 4,
    "models/test_opinfo.py": 14,
    "models/test_plan_cache.py": 8,
    "models/test_plans.py": 8,
    "models/test_quantized_convolutions.py": 2,
    "models/test_real_parts.py": 4,
    "models/test_recurrent.py": 4,
    "models/test_report.py": 4,
    "models/test_row_products.py": 6,
    "models/test_running_statistics.py": 2,
    "models/test_saved.py": 10,
    "models/test_stacked_experts.py": 8,
    "models/test_transformers_formats.py": 8,
    "models/test_transformers_loading.py": 4,
    "models/test_upsampling.py": 14,
    "models/test_view_programs.py": 8,
    "models/test_written_weights.py": 3,
    "numeric/test_cpu_gemm.py": 10,
    "numeric/test_ir_scalars.py": 2,
    "numeric/test_tile_programs.py": 4,
    "property/test_special_values.py": 10,
    "simulate/test_amd_attention.py": 14,
    "simulate/test_amd_experts.py": 4,
    "simulate/test_amd_mutants.py": 4,
    "simulate/test_amd_scaled.py": 4,
    "simulate/test_attention.py": 4,
    "simulate/test_blocks.py": 14,
    "simulate/test_bounds.py": 4,
    "simulate/test_convolution.py": 4,
    "simulate/test_decoders.py": 4,
    "simulate/test_expert_kernels.py": 4,
    "simulate/test_found_graphs.py": 14,
    "simulate/test_found_plans.py": 8,
    "simulate/test_gated.py": 10,
    "simulate/test_machine_code.py": 4,
    "simulate/test_mutants.py": 14,
    "simulate/test_open_chains.py": 3,
    "simulate/test_passes.py": 8,
    "simulate/test_pipelines.py": 14,
    "simulate/test_prologue.py": 4,
    "simulate/test_random_chains.py": 2,
    "simulate/test_scaled.py": 14,
    "simulate/test_sweep.py": 14,
    "simulate/test_tcgen05.py": 10,
    "unit/test_benchmark_peers.py": 8,
    "unit/test_chain_latency.py": 2,
    "unit/test_cost_model.py": 3,
    "unit/test_cuda_decode.py": 8,
    "unit/test_expert_plans.py": 4,
    "unit/test_gemv_launch.py": 2,
    "unit/test_layouts.py": 4,
    "unit/test_policy.py": 14,
    "unit/test_rocm_byte_table.py": 6,
    "unit/test_search.py": 4,
    "unit/test_shipped_graphs.py": 3,
    "unit/test_spilling.py": 4,
    "unit/test_superopt_attention.py": 8,
    "unit/test_superopt_computers.py": 6,
    "unit/test_superopt_generator.py": 14,
    "unit/test_superopt_shrink.py": 4,
    "unit/test_superopt_verifier.py": 14,
    "unit/test_superoptimize.py": 10,
    "unit/test_tuning.py": 6,
    "unit/test_user_decoders.py": 10,
    "unit/test_wgmma8_units.py": 4,
}
"""Files of costly tests -> days, 14 at most, in which each of their cases that is not `daily` runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing")
    parser.addoption("--long", action="store_true", help="also run tests that take many minutes")


def pytest_configure(config: pytest.Config) -> None:
    # Set before workers start, which must collect the same tests.
    os.environ.setdefault("LADDER_TEST_DAY", str(date.today().toordinal()))
    os.environ.setdefault("LADDER_STRICT", "1")
    # Threads of several test processes share the cores: one that waits must not keep a core busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.disable()  # until all tests are collected: what that makes stays
    config.addinivalue_line(
        "markers",
        "daily(count, among, together): run so many cases of a test, or of the tests that name the same "
        "group, others every day; tests that name the same `together` share a costly fixture and count "
        "as one case; --long runs them all",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a run of neighbouring tests, which share what a process keeps; the idle take over."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Keep what all tests share out of every later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # young objects are looked at less often
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of `daily` tests that are those of other days; what is asked for by name runs."""
    if config.getoption("--long") or any("::" in name for name in config.args):
        return
    cases: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if marker := item.get_closest_marker("daily"):
            group = marker.kwargs.get("among", item.nodeid.partition("[")[0])
            case = marker.kwargs.get("together", item.nodeid)
            cases.setdefault(group, {}).setdefault(case, []).append(item)
        elif (file := _file_of(item)) in DAYS:
            cases.setdefault(file, {})[item.nodeid] = [item]
    left = {item for those in cases.values() for item in _of_other_days(list(those.values()))}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0].removeprefix("tests/")


def _of_other_days(cases: list[list[pytest.Item]]) -> list[pytest.Item]:
    first = cases[0][0]
    if marker := first.get_closest_marker("daily"):
        days = -(-len(cases) // marker.args[0])
    else:
        days = DAYS[_file_of(first)]
    today = int(os.environ["LADDER_TEST_DAY"]) % days
    return [item for at, case in enumerate(cases) if at % days != today for item in case]


def pytest_report_header(config: pytest.Config) -> str:
    return f"rotating choices are those of LADDER_TEST_DAY={os.environ['LADDER_TEST_DAY']}"


@pytest.fixture(autouse=True)
def _types_of_the_library() -> Iterator[None]:
    """Forget the types that a test registers when it ends: other tests go through all there are."""
    before = dict(library._TYPES)
    yield
    if library._TYPES.keys() != before.keys():
        library._TYPES.clear()
        library._TYPES.update(before)


@pytest.fixture(scope="session")
def kernels_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder, empty at first, shared by all workers: each kernel is built once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def one_schedule(kernels_of_the_run: Path) -> Iterator[None]:
    """Build one kernel for a product, whatever M; tests/numeric/test_cpu_gemm.py goes through schedules."""
    from one_schedule import plans_of_one_schedule

    with plans_of_one_schedule(kernels_of_the_run / "one schedule"):
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``check(file name, text)``: compares with tests/golden/<file name>, or writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path.name} is missing; run pytest with --update-golden and review the file"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path.name} differs; --update-golden accepts the new text"
        )

    return check


@pytest.fixture
def long_test(request: pytest.FixtureRequest) -> None:
    """Skip a test that takes many minutes unless --long is given."""
    if not request.config.getoption("--long"):
        pytest.skip("takes many minutes; run it with --long")
