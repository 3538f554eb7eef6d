"""Stream-K by tails: every turn is done once, every sum is handed over and taken in once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ladder.ir.gemm import Gemm
from schedules.cost import minimum_bytes
from schedules.legal import is_legal
from schedules.policy import rank
from schedules.schedule import GpuSchedule
from schedules.shares import full_rounds, most_parts, owned_turns, share_begin, share_with
from targets import get_device


@dataclass(frozen=True)
class Cut:
    """The tiles that are cut: as the kernel computes it."""

    tiles: int
    turns: int
    blocks: int

    @property
    def whole(self) -> int:
        return full_rounds(self.tiles, self.blocks)

    @property
    def left(self) -> int:
        return self.tiles - self.whole

    @property
    def helpers(self) -> int:
        return self.blocks - self.left

    @property
    def owned(self) -> int:
        return owned_turns(self.left, self.turns, self.blocks)

    @property
    def tail(self) -> int:
        return max(self.turns - self.owned, 1)

    @property
    def units(self) -> int:
        return self.left * (self.turns - self.owned)

    def pieces(self, block: int) -> list[tuple[int, int, int]]:
        """Return (tile, first turn, turns) of what a block works on, as the kernel walks."""
        found = [(tile, 0, self.turns) for tile in range(block, self.whole, self.blocks)]
        if block >= self.helpers:
            return [*found, (self.whole + block - self.helpers, 0, self.owned)]
        unit, end = (share_begin(block + step, self.units, self.helpers) for step in (0, 1))
        while unit < end:
            number, inside = divmod(unit, self.tail)
            count = min(self.tail - inside, end - unit)
            found.append((self.whole + number, self.owned + inside, count))
            unit += count
        return found

    def taken(self, tile: int) -> list[int]:
        """Return the slots from which the block of a tile that is cut takes sums, in order."""
        number, found = tile - self.whole, []
        begin, last = number * self.tail, (number + 1) * self.tail
        share = share_with(begin, self.units, self.helpers)
        while begin < last:
            end = share_begin(share + 1, self.units, self.helpers)
            found += [share + number] * (begin < end)
            share, begin = share + 1, end
        return found


@pytest.mark.parametrize("blocks", [1, 7, 132])
@pytest.mark.parametrize("tiles", [1, 2, 5, 7, 14, 15, 131, 132, 133, 240, 300, 528])
@pytest.mark.parametrize("turns", [1, 2, 9, 64])
def test_every_turn_is_summed_once(blocks: int, tiles: int, turns: int) -> None:
    cut = Cut(tiles, turns, blocks)
    done = {(tile, turn): 0 for tile in range(tiles) for turn in range(turns)}
    given: dict[int, int] = {}
    waits: dict[int, int] = {}
    for block in range(blocks):
        for tile, skipped, count in cut.pieces(block):
            for turn in range(skipped, skipped + count):
                done[tile, turn] += 1
            if skipped:
                slot = block + tile - cut.whole
                assert slot not in given  # part of a share and a tile has a slot of its own
                assert slot < blocks
                given[slot] = tile
            elif count < turns:
                waits[tile] = block
    assert set(done.values()) == {1}
    received: list[int] = []
    for tile, block in waits.items():
        slots = cut.taken(tile)
        assert all(given[slot] == tile and slot - (tile - cut.whole) < block for slot in slots)
        assert len(slots) <= most_parts(tiles, blocks, tails=True)
        received += slots
    assert sorted(received) == sorted(given)


def test_blocks_do_as_much_as_each_other() -> None:
    for tiles in (28, 80, 112, 224, 240):
        cut = Cut(tiles, 64, 132)
        work = [sum(count for _, _, count in cut.pieces(block)) for block in range(132)]
        spared = 2 * cut.left / cut.helpers  # of helpers: they hand sums over
        assert max(work) - min(work) <= 3 + spared, tiles


SHARES = GpuSchedule("wgmma", 256, 128, 64, stages=4, warps=8, persistent=True, stream_k=True)


def test_tails_are_cut_by_stream_k() -> None:
    gemm, device = Gemm(5120, 25600, "int4", group_size=128), get_device("cuda/sm_90a:h100")
    assert is_legal(gemm, device, replace(SHARES, tails=True))
    assert not is_legal(gemm, device, replace(SHARES, tails=True, stream_k=False))


@pytest.mark.parametrize(("n", "k", "m"), [(5120, 25600, 1500), (5120, 25600, 400), (2048, 2048, 1500)])
def test_tails_compete_where_many_tiles_are_left_that_l2_does_not_hold(n: int, k: int, m: int) -> None:
    gemm, device = Gemm(n, k, "fp8_e4m3", activation="fp8_e4m3"), get_device("cuda/sm_90a:h100")
    tried = [each.schedule for each in rank(gemm, device, m)]
    missed = minimum_bytes(gemm, m) > device.layer("l2").capacity
    for shares in (s for s in tried if isinstance(s, GpuSchedule) and s.stream_k and not s.tails):
        left = -(-m // shares.tile_m) * -(-n // shares.tile_n) % device.units
        assert (replace(shares, tails=True) in tried) == (missed and 2 * left >= device.units)
