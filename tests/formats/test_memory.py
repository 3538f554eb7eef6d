"""Reading of checkpoints leaves cores to kernels, and memory to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.formats.bits import by_rows, flipped, swapped_nibbles
from ladder.formats.checkpoint import Checkpoint
from ladder.formats.layer import Format, Layer
from ladder.runtime import library
from ladder.runtime.threads import kernels_alone, torch_together


@pytest.fixture
def several() -> Any:
    """Torch with three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _stop() -> None:
    with kernels_alone():
        with kernels_alone():
            assert torch.get_num_threads() == 1
            assert library.thread_count() == 3
        with torch_together():
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError


def test_torch_has_one_thread_beside_kernels(several: None) -> None:
    with pytest.raises(ZeroDivisionError):
        _stop()
    assert torch.get_num_threads() == library.thread_count() == 3


def test_layers_are_read_so(several: None) -> None:
    def read(layer: Layer) -> Any:
        return torch.get_num_threads(), by_rows(
            lambda rows: torch.full_like(rows, torch.get_num_threads()), *large
        )

    large = torch.zeros(3, dtype=torch.uint8), 1 << 22
    layer = Layer("w", {}, {})
    form = Format("told", ".w", lambda layer: True, lambda layer: (1, 1), read)
    inside, rows = Checkpoint(Path("w"), {"w": (form, layer)}, {})["w"]  # type: ignore[misc]
    assert inside == 1
    assert rows.tolist() == [3, 3, 3]  # large work of torch has all
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("shape", [(512, 1024), (513, 1000), (1000, 1001), (3, 5)])
def test_bits_of_bytes(shape: tuple[int, int]) -> None:
    octets = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(swapped_nibbles(octets), octets << 4 | octets >> 4)
    for bits, flip in ((1, 0xFF), (2, 0xAA), (4, 0x88), (8, 0x80)):
        assert torch.equal(flipped(octets, bits), octets ^ flip)
    beside = torch.cat([octets.flatten(), octets[0]])[1 : 1 + octets.numel()]  # begins at no word
    assert torch.equal(flipped(beside, 4), beside ^ 0x88)


def test_bits_of_bytes_elsewhere() -> None:
    """Engines load weights onto a GPU before they are changed: no kernel of the CPU is given them."""
    octets = torch.empty(1024, 1024, dtype=torch.uint8, device="meta")
    assert flipped(octets, 4).device == swapped_nibbles(octets).device == octets.device


HOLES = """
import torch
from pathlib import Path
from ladder.runtime.allocate import empty
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
size = 8 << 20
del_first = torch.ones(30 << 20, dtype=torch.uint8); del del_first  # the C library now keeps arrays of 30 MB
arrays = [empty(size, dtype=torch.uint8).fill_(1) for _ in range(8)]
before = resident()
del arrays[::2]
assert before - resident() > 3 * size, (before - resident()) / size
assert all(bool((each == 1).all()) for each in arrays)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_between_layers_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
