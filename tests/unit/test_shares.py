"""Stream-K's division of work: every unit is done once, every sum is handed over and taken in once."""

from __future__ import annotations

import pytest

from schedules.shares import WORKSPACE, share_begin, whole_tiles


def pieces(share: int, tiles: int, turns: int, blocks: int) -> list[tuple[int, int, int]]:
    """Return (tile, first turn, turns) of what the block of a share works on, as the kernel walks."""
    whole = whole_tiles(tiles, blocks)
    units = (tiles - whole) * turns
    runs = [(tile * turns, (tile + 1) * turns) for tile in range(blocks - 1 - share, whole, blocks)]
    runs += [tuple(whole * turns + share_begin(share + i, units, blocks) for i in (0, 1))]
    found = []
    for unit, end in runs:
        while unit < end:
            tile, skipped = divmod(unit, turns)
            count = min(turns - skipped, end - unit)
            found.append((tile, skipped, count))
            unit += count
    return found


def taken(share: int, tile: int, tiles: int, turns: int, blocks: int) -> list[int]:
    """Return the shares whose sums the block that began a shared tile takes in, in order."""
    whole = whole_tiles(tiles, blocks)
    units, found = (tiles - whole) * turns, []
    other = share + 1
    while (begin := share_begin(other, units, blocks)) < (tile + 1 - whole) * turns:
        if begin < share_begin(other + 1, units, blocks):
            found.append(other)
        other += 1
    return found


@pytest.mark.parametrize("blocks", [1, 7, 132])
@pytest.mark.parametrize("tiles", [1, 2, 5, 7, 14, 15, 131, 132, 133, 300, 528])
@pytest.mark.parametrize("turns", [1, 2, 9, 64])
def test_every_unit_is_summed_once(blocks: int, tiles: int, turns: int) -> None:
    done = {(tile, turn): 0 for tile in range(tiles) for turn in range(turns)}
    given: dict[int, int] = {}
    starts: dict[int, tuple[int, int]] = {}
    for share in range(blocks):
        walked = pieces(share, tiles, turns, blocks)
        for tile, skipped, count in walked:
            for turn in range(skipped, skipped + count):
                done[tile, turn] += 1
            if skipped:
                assert share not in given  # a share has one slot of the workspace
                given[share] = tile
            else:
                starts[tile] = share, count
    assert set(done.values()) == {1}
    assert sorted(starts) == list(range(tiles))
    received: list[int] = []
    for tile, (share, count) in starts.items():
        others = taken(share, tile, tiles, turns, blocks) if count < turns else []
        assert all(given[other] == tile and other > share for other in others)
        received += others
    assert sorted(received) == sorted(given)


def test_shares_differ_by_one_unit_at_most() -> None:
    for tiles in (28, 112, 224):
        units = (tiles - whole_tiles(tiles, 132)) * 64
        sizes = {share_begin(s + 1, units, 132) - share_begin(s, units, 132) for s in range(132)}
        assert max(sizes) - min(sizes) <= 1


def test_kernels_find_what_gives_them_a_workspace() -> None:
    import tvm_ffi

    from ladder.runtime import workspace

    workspace.register()
    assert tvm_ffi.get_global_func(WORKSPACE) is not None
