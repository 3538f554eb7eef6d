"""Plans of one schedule, for tests of what lies around products: a call builds one kernel and not five."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from ladder import knobs
from ladder.runtime import compile as runtime_compile
from schedules.schedule import Plan


@contextmanager
def plans_of_one_schedule(cache_dir: Path) -> Iterator[None]:
    """Let each plan be one of the policy's schedules for all M, another every day; kernels are kept apart."""
    policy, day = runtime_compile._choose, int(os.environ["LADDER_TEST_DAY"])

    def chosen(request: runtime_compile.Request) -> Plan:
        entries = policy(request).entries
        return Plan(((runtime_compile.ANY_M, entries[day % len(entries)][1]),))

    with mock.patch.object(runtime_compile, "_choose", chosen), knobs.override(cache_dir=cache_dir):
        runtime_compile.forget()
        yield
    runtime_compile.forget()
