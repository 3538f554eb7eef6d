"""Knobs: environment, override blocks, bad values."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ladder import knobs
from tile_types.errors import LadderError, UnknownNameError, ValueRangeError


def test_default_environment_and_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LADDER_NUM_THREADS", raising=False)
    assert knobs.settings.num_threads == 0
    monkeypatch.setenv("LADDER_NUM_THREADS", "3")
    assert knobs.settings.num_threads == 3
    with knobs.override(num_threads=1) as settings:
        assert settings.num_threads == 1
        with knobs.override(num_threads="2", trace=True):
            assert (settings.num_threads, settings.trace) == (2, True)
        assert (settings.num_threads, settings.trace) == (1, False)
    assert knobs.settings.num_threads == 3


def test_a_dump_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    knobs.write_dump(tmp_path / "new" / "stage.txt", "text")
    assert (tmp_path / "new" / "stage.txt").read_text() == "text"
    with pytest.raises(LadderError, match="LADDER_DUMP must be a folder"):
        knobs.write_dump(tmp_path / "new" / "stage.txt" / "inner.txt", "text")


def test_paths_expand_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_CACHE_DIR", "~/somewhere")
    assert knobs.settings.cache_dir == Path.home() / "somewhere"
    with knobs.override(cache_dir=None):
        assert knobs.settings.cache_dir is None


@pytest.mark.parametrize("text", ["maybe", "2", "-"])
def test_bad_environment_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LADDER_TRACE", text)
    with pytest.raises(ValueRangeError, match="LADDER_TRACE"):
        _ = knobs.settings.trace


@pytest.mark.parametrize("text", ["~nosuchuser/cache", "/tmp/" + "a" * 256])
def test_paths_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """They ended programs with errors of the system, far from their cause."""
    monkeypatch.setenv("LADDER_CACHE_DIR", text)
    with pytest.raises(ValueRangeError, match=r"LADDER_CACHE_DIR=.* is not valid"):
        _ = knobs.settings.cache_dir


@pytest.mark.parametrize(("count", "expected"), [(-1, "not negative"), (1025, "at most 1024")])
def test_thread_counts_that_no_machine_has_are_refused(count: int, expected: str) -> None:
    said = rf"LADDER_NUM_THREADS='{count}' is not valid: .*{expected}"
    with pytest.raises(ValueRangeError, match=said), knobs.override(num_threads=count):
        pass


def test_unknown_knob_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="num_threads"), knobs.override(num_thread=1):
        pass


def test_override_stays_in_its_thread() -> None:
    seen: list[bool] = []
    with knobs.override(trace=True):
        thread = threading.Thread(target=lambda: seen.append(knobs.settings.trace))
        thread.start()
        thread.join()
    assert seen == [False]


def test_listeners_hear_both_ends_even_on_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(knobs, "_listeners", [])
    knobs.on_override(lambda: heard.append(knobs.settings.num_threads))
    with pytest.raises(ZeroDivisionError), knobs.override(num_threads=7):
        raise ZeroDivisionError
    assert heard == [7, 0]
