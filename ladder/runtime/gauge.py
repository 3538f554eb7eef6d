"""Measurement in a separate process, so that a kernel that hangs or crashes ends only that process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from ladder.runtime.compile_pool import Campaign, Trial
from ladder.runtime.measure import (
    Begin,
    Checked,
    Dropped,
    Event,
    PointDone,
    Progress,
    Timed,
    Weights,
    measure,
)

PATIENCE_SECONDS = 4.0
"""Silence after which a trial counts as hanging."""

START_SECONDS = 60.0
"""The same before the first trial of a campaign and while weights are made."""

MOST_CULPRITS = 8
"""Trials of one campaign that may take the process down before the campaign is given up."""

DONE = "done"

Work = Callable[[Campaign, Progress], Iterator[Event]]


class Gauge:
    """A process that measures campaigns, one after the other; use it in a ``with`` block.

    work: What it does with a campaign; a function of a module.
    patience: Seconds of silence after which a trial counts as hanging.
    """

    def __init__(self, work: Work = measure, patience: float = PATIENCE_SECONDS) -> None:
        self._work, self._patience = work, patience
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> Gauge:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def measure(self, campaign: Campaign, report: Callable[[str], None]) -> Iterator[Timed]:
        """Yield the times of a campaign's trials; those that fail are reported and left out."""
        done = Progress()
        left = campaign
        for _ in range(MOST_CULPRITS):
            culprit: Trial | None = None
            for event in self._run(left, done):
                if isinstance(event, Timed):
                    yield event
                elif isinstance(event, Begin):
                    culprit = event.trial
                elif isinstance(event, PointDone):
                    done.points.add((event.gemm, event.m))
                elif isinstance(event, Checked):
                    done.checked.add(event.trial)
                elif isinstance(event, Dropped):
                    left = _without(left, event.trial)
                    report(f"{event.trial.schedule} {event.reason}")
                elif event == DONE:
                    return
            self._stop()
            if culprit is None:
                break
            report(f"{culprit.schedule} hangs or breaks the GPU's context")
            left = _without(left, culprit)
        report(f"{campaign}: given up")

    def _run(self, campaign: Campaign, done: Progress) -> Iterator[Event | str]:
        """Yield what the process says; end without `DONE` if it falls silent."""
        connection = self._connected()
        connection.send((campaign, done))
        patience = START_SECONDS
        while connection.poll(patience):
            try:
                event = connection.recv()
            except EOFError:
                return
            yield event
            if event == DONE:
                return
            patience = START_SECONDS if isinstance(event, Weights) else self._patience

    def _connected(self) -> Connection:
        if self._connection is None:
            # Spawned: a process that has initialised CUDA must not be forked.
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, self._work), daemon=True)
            self._process.start()
            theirs.close()
        return self._connection

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _without(campaign: Campaign, trial: Trial) -> Campaign:
    return replace(campaign, trials=[other for other in campaign.trials if other != trial])


def serve(connection: Connection, work: Work) -> None:
    """Measure whatever campaign arrives, until the other side hangs up."""
    while True:
        try:
            campaign, done = connection.recv()
        except EOFError:
            return
        for event in work(campaign, done):
            connection.send(event)
        connection.send(DONE)
