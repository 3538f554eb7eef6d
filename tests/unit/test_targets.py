"""Devices are data that hold together, and detection reads facts, not marketing names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ladder.movement.choose import machine_of
from ladder.movement.model import HOPPER
from targets import detect, get_device, host_cpu, list_devices, visible_gpus
from targets.cpu import cpu_device, mcpu_for
from targets.detect import cpu_features, device_for_capability, rocm_architectures
from tile_types.errors import ConversionError, DeviceError, UnknownNameError

DESIGN_DEVICES = {
    *(f"cuda/sm_{arch}" for arch in ("70", "75", "80", "86", "89", "90a", "100a", "103a")),
    *(f"rocm/gfx{arch}" for arch in ("90a", "942", "950", "1100", "1201")),
    "cpu/amx", "cpu/avx512_vnni", "cpu/avx512_bf16", "cpu/avx2", "cpu/dotprod",
}  # fmt: skip

# Dense tensor-core peaks in TFLOP/s (TOP/s) of the vendors' datasheets.
DATASHEET = [
    ("sm_70", "float16", 125),
    ("sm_75", "float16", 65),
    ("sm_80", "float16", 312),
    ("sm_80", "int8", 624),
    ("sm_86", "float16", 154.8),
    ("sm_89", "fp8_e4m3", 733),
    ("sm_90a", "float16", 989),
    ("sm_90a", "fp8_e4m3", 1979),
    ("gfx90a", "float16", 181),
    ("gfx942", "float16", 1307.4),
    ("gfx942", "int8", 2614.9),
    ("gfx950", "float16", 2516),
    ("gfx1100", "float16", 122.8),
    ("gfx1201", "float16", 195),
    ("gfx1201", "fp8_e4m3", 389),
]

ZEN4_CPUINFO = """processor\t: 0
flags\t\t: fpu sse4_2 avx avx2 fma f16c bmi1 bmi2 avx512f avx512bw avx512cd avx512dq avx512vl avx512ifma \
avx512vbmi avx512_vbmi2 avx512_bf16 avx512_vnni avx512_bitalg avx512_vpopcntdq gfni
"""
GRAVITON_CPUINFO = "processor\t: 0\nFeatures\t: fp asimd evtstrm asimdhp asimddp\n"


def test_every_device_of_the_design_is_there() -> None:
    assert {device.name for device in list_devices()} == DESIGN_DEVICES


@pytest.mark.parametrize(("arch", "operand", "tera"), DATASHEET)
def test_peaks_equal_the_datasheet(arch: str, operand: str, tera: float) -> None:
    device = get_device(arch)
    assert device.peak(device.core_for(operand)) / 1e12 == pytest.approx(tera, rel=0.02)


def test_layers_shrink_and_quicken_towards_the_core() -> None:
    for device in list_devices():
        bandwidths = [layer.bandwidth for layer in device.layers]
        assert bandwidths == sorted(bandwidths), device.name
        assert device.layers[0].name == "dram"
        assert device.layers[-1].name == "register"
        assert all(0 < layer.sustained <= 1 for layer in device.layers)
        assert device.shared_per_block <= device.shared_per_unit


def test_names_and_aliases() -> None:
    hopper = get_device("sm_90a")
    assert hopper is get_device("cuda/sm_90a")
    assert get_device(hopper) is hopper
    assert hopper.compute_capability == (9, 0)
    assert hopper.tvm_target["arch"] == "sm_90a"
    assert hopper.is_gpu
    assert "wgmma" in hopper.features
    assert get_device("sm_100a").compute_capability == (10, 0)
    with pytest.raises(UnknownNameError, match="sm_90a"):
        get_device("cuda/sm_90")
    with pytest.raises(DeviceError, match="shared"):
        hopper.layer("lds")


def test_missing_core_names_those_that_exist() -> None:
    with pytest.raises(ConversionError, match=r"sm_80.*fp8_e4m3.*bfloat16, float16, int8"):
        get_device("sm_80").core_for("fp8_e4m3")
    with pytest.raises(ConversionError, match="float16"):
        get_device("sm_70").core_for("bfloat16")


def test_cpu_features_come_from_flags() -> None:
    zen4 = cpu_features(ZEN4_CPUINFO)
    assert {"avx512_vbmi", "avx512_bf16", "avx512_vnni"} <= zen4
    assert mcpu_for(zen4) == "znver4"
    device = cpu_device("cpu/test", "", zen4, 4)
    assert device.core_for("int8").name == "avx512_vnni"
    assert device.core_for("bfloat16").name == "avx512_bf16"
    assert device.tvm_target["num-cores"] == 4
    arm = cpu_features(GRAVITON_CPUINFO)
    assert arm == {"asimd", "asimdhp", "dotprod"}
    assert cpu_device("cpu/arm", "", arm, 1).core_for("int8").name == "dotprod"
    assert mcpu_for(frozenset({"avx2", "fma", "f16c", "bmi2"})) == "x86-64-v3"
    assert mcpu_for(frozenset()) == "x86-64"


def test_amx_is_preferred_where_present() -> None:
    amx = get_device("cpu/amx")
    assert amx.core_for("int8").name == "amx_int8"
    assert amx.core_for("bfloat16").name == "amx_bf16"
    assert amx.tvm_target["mcpu"] == "sapphirerapids"


def test_host_is_a_cpu_that_can_multiply_everything() -> None:
    host = host_cpu()
    assert get_device("cpu") is host
    assert get_device(host.name).vendor == "cpu"
    assert host.units >= 1
    for operand in ("float32", "float16", "bfloat16", "int8"):
        assert host.core_for(operand, "cpu")


def test_gpus_are_matched_by_compute_capability() -> None:
    assert device_for_capability((9, 0)) == "cuda/sm_90a"
    assert device_for_capability((8, 9)) == "cuda/sm_89"
    assert device_for_capability((3, 5)) is None
    assert device_for_capability((10, 3)) == "cuda/sm_103a"
    for gpu in visible_gpus():
        name = device_for_capability(gpu.capability)
        assert gpu.device == name if name is None else get_device(str(gpu.device)).row == name


H200 = (132, 3_201_000, 6144, 60 << 20)
"""What the driver says of one: multiprocessors, kHz and bits of the memory, bytes of L2."""


@pytest.mark.parametrize(
    ("capability", "told", "name"),
    [
        ((9, 0), H200, "cuda/sm_90a"),
        ((9, 0), (132, 2_619_000, 5120, 50 << 20), "cuda/sm_90a:132sm-3352gbs-50mib"),
        ((9, 0), (114, 1_593_000, 5120, 50 << 20), "cuda/sm_90a:114sm-2039gbs-50mib"),
        ((8, 6), (82, 9_751_000, 384, 6 << 20), "cuda/sm_86:82sm-936gbs-6mib"),  # GeForce RTX 3090
        ((9, 0), (132, 0, None, None), "cuda/sm_90a"),  # the driver does not say
        ((3, 5), H200, None),
    ],
)
def test_products_of_an_architecture_are_told_apart_by_what_the_driver_says(
    capability: tuple[int, int], told: tuple[int | None, ...], name: str | None
) -> None:
    assert detect.product_name(capability, *told) == name


def test_a_product_has_its_own_memory_and_its_architectures_code() -> None:
    row, product = get_device("cuda/sm_90a"), get_device("cuda/sm_90a:h100")
    assert product == get_device(product.name) == get_device("cuda/sm_90a:132sm-3352gbs-50mib")
    assert product.row == row.name
    assert product.target == row.target
    assert product.cores == row.cores
    assert product.layer("dram").bandwidth == 3.352e12
    assert product.layer("l2").capacity == 50 << 20
    small = get_device("cuda/sm_90a:66sm-2039gbs-50mib")
    assert small.units == 66
    assert small.layer("l2").bandwidth == row.layer("l2").bandwidth / 2
    for wrong in ("cuda/sm_90a:h300", "cuda/sm_90a:", "cpu/amx:2sm-10gbs-1mib"):
        with pytest.raises(UnknownNameError):
            get_device(wrong)


def test_rocm_architectures_are_read_from_the_topology(tmp_path: Path) -> None:
    for node, version in enumerate((0, 90010, 90402, 110000)):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    assert rocm_architectures(tmp_path) == ["gfx90a", "gfx942", "gfx1100"]
    assert rocm_architectures(tmp_path / "absent") == []


def test_packages_import_neither_torch_nor_tvm() -> None:
    modules = "targets, schedules.policy, schedules.layouts, schedules.transforms, schedules.tuning"
    code = f"import sys, {modules}; assert not {{'torch', 'tvm'}} & set(sys.modules), 'heavy import'"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


@pytest.mark.parametrize("name", sorted(DESIGN_DEVICES))
def test_tvm_accepts_every_target(name: str) -> None:
    target = pytest.importorskip("tvm.target")
    device = get_device(name)
    assert target.Target(device.tvm_target).kind.name == device.kind


def test_amx_counts_only_if_linux_grants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "flags : avx2 fma avx512f avx512bw avx512vl avx512dq avx512cd avx512_vnni amx_tile amx_int8\n"
    monkeypatch.setattr(detect.Path, "read_text", lambda *_, **__: flags)
    monkeypatch.setattr(detect.platform, "machine", lambda: "x86_64")
    for granted in (True, False):
        monkeypatch.setattr(detect, "may_use_tiles", lambda granted=granted: granted)
        device = detect.host_cpu.__wrapped__()
        assert ("amx_tile" in device.features) == granted
        assert "avx512_vnni" in device.features


def test_chains_on_other_gpus_have_the_fitted_costs_in_the_ratio_of_their_rows() -> None:
    fitted, product = (
        machine_of(get_device(name)) for name in ("cuda/sm_90a", "cuda/sm_90a:66sm-2400gbs-30mib")
    )
    assert fitted == HOPPER
    halved = ("device", "cache", "resident", "units", "issue")
    assert all(getattr(product, name) == getattr(fitted, name) / 2 for name in halved)
    assert (product.launch, product.turn) == (fitted.launch, fitted.turn)
