"""The tables of types and devices, for people, for programs and for READMEs."""

from __future__ import annotations

from typing import Any

from ladder.cli.console import markdown_table
from ladder.lower.build import KERNELS, SKELETONS
from ladder.runtime.cache import KernelCache
from targets import TileDevice, host_cpu, list_devices, visible_gpus
from tile_types import CORES, TType, list_types, representable_cores

TYPE_COLUMNS = ("type", "bits", "block", "exact in", "what it is")
CACHE_COLUMNS = ("key", "target", "weight", "activation", "bytes")

SUPPORT_CORES = ("float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
"""Activation types of the table of weight types."""

DEVICE_COLUMNS = ("target", "modelled on", "activations", "pipelines")


def describe_type(ttype: TType) -> dict[str, Any]:
    """Return one type as a JSON-able object; bits count the metadata in."""
    exact = set(representable_cores(ttype))
    return {
        "name": ttype.name,
        "bits": ttype.elem_bits,
        "bits_per_element": ttype.bits_per_element,
        "element": ttype.element_type.name,
        "block": ttype.block_size,
        "metadata": {part.name: part.ttype for part in ttype.metadata},
        "exact_in": [core for core in CORES if core in exact],
        "doc": ttype.doc,
    }


def type_rows() -> list[tuple[str, ...]]:
    """Return the cells of `TYPE_COLUMNS` for every type of the library."""
    return [
        (row["name"], f"{row['bits_per_element']:g}", _block_text(row), " ".join(row["exact_in"]), row["doc"])
        for row in map(describe_type, list_types())
    ]


def support_rows() -> list[tuple[str, ...]]:
    """Return the table: per weight type, which activations multiply it without loss."""
    rows = []
    for row in map(describe_type, list_types()):
        marks = ("yes" if core in row["exact_in"] else "" for core in SUPPORT_CORES)
        rows.append((f"`{row['name']}`", f"{row['bits_per_element']:g}", *marks, row["doc"]))
    return rows


def support_columns() -> tuple[str, ...]:
    """Return the header of `support_rows`."""
    return ("weight type", "bits", *(f"`{core}`" for core in SUPPORT_CORES), "what it is")


def _block_text(row: dict[str, Any]) -> str:
    return str(row["block"]) if row["block"] > 1 else "-"


def describe_device(device: TileDevice) -> dict[str, Any]:
    """Return one device as a JSON-able object."""
    dram = device.layer("dram")
    return {
        "name": device.name,
        "title": device.title,
        "units": device.units,
        "bandwidth": dram.bandwidth,
        "capacity": dram.capacity,
        "activations": activations(device),
        "pipelines": pipelines(device),
        "features": sorted(device.features),
        "toolkit": device.toolkit,
        "source": device.source,
    }


def activations(device: TileDevice) -> list[str]:
    """Return the activation types that the device's cores multiply."""
    return sorted({core.a for core in device.cores if core.pipelines})


def pipelines(device: TileDevice) -> list[str]:
    """Return the pipelines that compile kernels for the device: those with an emitter."""
    return sorted({name for core in device.cores for name in core.pipelines} & {*KERNELS, *SKELETONS})


def device_rows() -> list[tuple[str, ...]]:
    """Return the cells of `DEVICE_COLUMNS` for every device of the table."""
    return [
        (device.name, device.title, " ".join(activations(device)), " ".join(pipelines(device)) or "none yet")
        for device in list_devices()
    ]


def device_markdown() -> str:
    """Return the devices as a markdown table."""
    return markdown_table(DEVICE_COLUMNS, [(f"`{name}`", *rest) for name, *rest in device_rows()])


def type_markdown() -> str:
    """Return the weight types and the activations they multiply with as a markdown table."""
    return markdown_table(support_columns(), support_rows())


def here() -> dict[str, Any]:
    """Return what this machine has: its CPU and the GPUs that the driver shows."""
    gpus = [
        {"ordinal": gpu.ordinal, "capability": list(gpu.capability), "device": gpu.device}
        for gpu in visible_gpus()
    ]
    return {"cpu": describe_device(host_cpu()), "gpus": gpus}


def cache_entries() -> list[dict[str, Any]]:
    """Return every intact kernel of the cache as a JSON-able object."""
    return [
        {
            "key": entry.key,
            "path": str(entry.folder),
            "bytes": entry.nbytes,
            "device": entry.manifest.get("device"),
            "gemm": entry.manifest.get("gemm"),
            "kernel": entry.manifest.get("entry"),
        }
        for entry in KernelCache().entries()
    ]


def cache_rows(entries: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of `CACHE_COLUMNS`."""
    return [
        (entry["key"][:12], str(entry["device"]), *_operands(entry["gemm"] or {}), str(entry["bytes"]))
        for entry in entries
    ]


def _operands(gemm: dict[str, Any]) -> tuple[str, str]:
    return str(gemm.get("weight", "-")), str(gemm.get("activation", "-"))
