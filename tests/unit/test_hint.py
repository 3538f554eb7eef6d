"""GetDeviceHint against the paper's example and against its definition."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from schedules.tilings import Hint, device_hint
from targets import get_device, list_devices


def test_a100_fp16_tensor_core_hint_of_the_paper() -> None:
    a100 = get_device("cuda/sm_80")
    hint = device_hint(a100, a100.core_for("float16", "mma"))
    assert hint.granularity == 16
    assert hint.shape == (4, 8)
    assert hint.nbytes == 16 * 16 * 2  # one 16 x 16 fp16 operand of mma.m16n8k16


def test_granularity_is_the_lcm_of_all_layers() -> None:
    for device in list_devices():
        for core in device.cores:
            expected = lcm(*(layer.granule for layer in device.layers), core.lane_bytes)
            assert device_hint(device, core).granularity == expected


def test_every_layer_moves_whole_hint_rows() -> None:
    for device in list_devices():
        for core in device.cores:
            hint = device_hint(device, core)
            row = hint.granularity * hint.shape[-1]
            assert all(row % (layer.granule * layer.shape[-1]) == 0 for layer in device.layers)


def test_a_wider_layer_widens_the_hint() -> None:
    a100 = get_device("sm_80")
    wide = replace(a100.layers[0], granule=64, shape=(1, 2))
    hint = device_hint(replace(a100, layers=(wide, *a100.layers[1:])), a100.core_for("float16"))
    assert hint == Hint(64, (4, 2))


def test_divides() -> None:
    hint = Hint(16, (4, 8))
    assert hint.divides(64, 128)
    assert not hint.divides(64, 100)
    assert not hint.divides(1, 128)
