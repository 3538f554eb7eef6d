"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tile_types import library

GOLDEN = Path(__file__).parent / "golden"

TURNS = 19
"""Days in which each costly case runs once; a prime, so that what cases choose by the day meets all."""

COSTLY = frozenset(
    {
        "capture/test_capture_beside_compile.py",
        "capture/test_capture_branches.py",
        "capture/test_capture_compiled.py",
        "capture/test_capture_counts.py",
        "capture/test_capture_expected.py",
        "capture/test_capture_library.py",
        "capture/test_capture_nested.py",
        "capture/test_capture_objects.py",
        "capture/test_capture_programs.py",
        "capture/test_capture_settings.py",
        "capture/test_capture_shapes.py",
        "capture/test_guard_parts.py",
        "capture/test_random_branches.py",
        "capture/test_standing_tensors.py",
        "formats/test_beside.py",
        "formats/test_damage.py",
        "formats/test_forms.py",
        "formats/test_use.py",
        "integration/test_api.py",
        "integration/test_batch_invariance.py",
        "integration/test_cli.py",
        "integration/test_cpu_spine.py",
        "integration/test_experts.py",
        "integration/test_first_run.py",
        "integration/test_forks.py",
        "integration/test_policy_mma.py",
        "integration/test_rocm_chains.py",
        "integration/test_rocm_compile.py",
        "integration/test_spills.py",
        "integration/test_superopt_cli.py",
        "integration/test_torch_ops.py",
        "integration/test_written_arguments.py",
        "models/test_adapters.py",
        "models/test_attention_parts.py",
        "models/test_autocast.py",
        "models/test_calibration.py",
        "models/test_chain_elements.py",
        "models/test_composed_functions.py",
        "models/test_convolution_layouts.py",
        "models/test_convolutions.py",
        "models/test_cpu_attention.py",
        "models/test_cpu_chains.py",
        "models/test_dynamo_programs.py",
        "models/test_failing.py",
        "models/test_faults.py",
        "models/test_float_contract.py",
        "models/test_folding.py",
        "models/test_gguf_models.py",
        "models/test_gpu_chains.py",
        "models/test_kept_views.py",
        "models/test_memory_order.py",
        "models/test_models.py",
        "models/test_numbers.py",
        "models/test_onnx.py",
        "models/test_onnx_classical.py",
        "models/test_onnx_codes.py",
        "models/test_onnx_graphs.py",
        "models/test_onnx_microsoft.py",
        "models/test_onnx_sizes.py",
        "models/test_onnx_torch.py",
        "models/test_onnx_transposed.py",
        "models/test_open_sizes.py",
        "models/test_open_slices.py",
        "models/test_operand_strides.py",
        "models/test_opinfo.py",
        "models/test_plan_cache.py",
        "models/test_plans.py",
        "models/test_quantized_convolutions.py",
        "models/test_raw_experts.py",
        "models/test_real_parts.py",
        "models/test_recurrent.py",
        "models/test_report.py",
        "models/test_row_products.py",
        "models/test_running_statistics.py",
        "models/test_saved.py",
        "models/test_selection.py",
        "models/test_shared_results.py",
        "models/test_stacked_experts.py",
        "models/test_step_loops.py",
        "models/test_transformers_formats.py",
        "models/test_transformers_loading.py",
        "models/test_upsampling.py",
        "models/test_view_programs.py",
        "models/test_written_results.py",
        "models/test_written_weights.py",
        "numeric/test_cpu_amx.py",
        "numeric/test_cpu_gemm.py",
        "numeric/test_ir_scalars.py",
        "numeric/test_tile_programs.py",
        "property/test_special_values.py",
        "simulate/test_amd_attention.py",
        "simulate/test_amd_blocks.py",
        "simulate/test_amd_experts.py",
        "simulate/test_amd_functions.py",
        "simulate/test_amd_mutants.py",
        "simulate/test_amd_scaled.py",
        "simulate/test_amd_torch.py",
        "simulate/test_attention.py",
        "simulate/test_blocks.py",
        "simulate/test_bounds.py",
        "simulate/test_convolution.py",
        "simulate/test_decoders.py",
        "simulate/test_expert_kernels.py",
        "simulate/test_found_graphs.py",
        "simulate/test_found_plans.py",
        "simulate/test_gated.py",
        "simulate/test_interface.py",
        "simulate/test_machine_code.py",
        "simulate/test_mutants.py",
        "simulate/test_open_chains.py",
        "simulate/test_passes.py",
        "simulate/test_pipelines.py",
        "simulate/test_prologue.py",
        "simulate/test_random_chains.py",
        "simulate/test_scaled.py",
        "simulate/test_sweep.py",
        "simulate/test_tcgen05.py",
        "unit/test_benchmark_peers.py",
        "unit/test_chain_latency.py",
        "unit/test_cost_measured.py",
        "unit/test_cost_middle.py",
        "unit/test_cost_model.py",
        "unit/test_cpu_layout.py",
        "unit/test_cuda_decode.py",
        "unit/test_expert_plans.py",
        "unit/test_gemv_geometry.py",
        "unit/test_gemv_launch.py",
        "unit/test_layouts.py",
        "unit/test_policy.py",
        "unit/test_quick_fakes.py",
        "unit/test_rocm_byte_table.py",
        "unit/test_search.py",
        "unit/test_shards.py",
        "unit/test_shipped_graphs.py",
        "unit/test_spilling.py",
        "unit/test_superopt_attention.py",
        "unit/test_superopt_computers.py",
        "unit/test_superopt_expressions.py",
        "unit/test_superopt_generator.py",
        "unit/test_superopt_shrink.py",
        "unit/test_superopt_verifier.py",
        "unit/test_superoptimize.py",
        "unit/test_superoptimized_calls.py",
        "unit/test_tuning.py",
        "unit/test_types_ops.py",
        "unit/test_types_packing.py",
        "unit/test_user_decoders.py",
        "unit/test_wgmma8_units.py",
    }
)
"""Files of which all cases are costly; elsewhere tests are marked."""


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
        "costly(together, turns): cases take turns day by day, once in `turns` days; those that name the "
        "same `together` share a costly fixture and count as one case; --long runs them all",
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
    """Leave out the costly cases that are those of other days; what is asked for by name runs."""
    if config.getoption("--long") or any("::" in name for name in config.args):
        return
    files: dict[tuple[str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        file = item.nodeid.partition("::")[0].removeprefix("tests/")
        marker = item.get_closest_marker("costly")
        if marker or file in COSTLY:
            given = marker.kwargs if marker else {}
            cases = files.setdefault((file, given.get("turns", TURNS)), {})
            cases.setdefault(given.get("together", item.nodeid), []).append(item)
    left = {item for which, cases in files.items() for item in _of_other_days(*which, [*cases.values()])}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def _of_other_days(file: str, turns: int, cases: list[list[pytest.Item]]) -> Iterator[pytest.Item]:
    """Yield what does not run today; files begin with another case each, which spreads the cost over days."""
    today = int(os.environ["LADDER_TEST_DAY"]) + crc32(file.encode())
    for at, case in enumerate(cases):
        if at % turns != today % turns:
            yield from case


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
