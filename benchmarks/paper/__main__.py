"""``python -m benchmarks.paper [FIGURE ...] [--measure] [--html page.html]``: the papers' figures.

Without figures: all. Prints a table for each, what the paper reports beside what Ladder's results of record
say, and whether they agree; ``--html`` also draws them. ``--measure`` first runs the benchmarks that a figure
needs and puts their results into ``--folder``, whose files are preferred to those of record.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.figure import Figure
from benchmarks.paper.ladder_figures import FIGURES as LADDER
from benchmarks.paper.other_figures import FIGURES as OTHERS
from benchmarks.paper.page import page, text
from benchmarks.paper.records import RECORDED, Records, file_name

FIGURES = {figure.key: figure for figure in (*LADDER, *OTHERS)}
"""Every figure by name."""


def device_name() -> str:
    """Return the word by which results name this device, such as ``h200``."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    words = torch.cuda.get_device_name().lower().split()
    return next((word for word in words if any(map(str.isdigit, word))), words[-1])


def measure(figure: Figure, folder: Path) -> int:
    """Run the benchmarks of a figure, each to its file; returns how many failed."""
    failed = 0
    for name, arguments in figure.results:
        file = folder / file_name(name, device_name(), time.strftime("%Y-%m-%d"))
        words = [word.replace("{file}", str(file)) for word in shlex.split(arguments)]
        print(f"{figure.key}: python -m {shlex.join(words)}", file=sys.stderr, flush=True)
        failed += subprocess.run([sys.executable, "-m", *words], check=False).returncode != 0
    return failed


def chosen(names: Sequence[str], parser: argparse.ArgumentParser) -> list[Figure]:
    """Return the figures that are asked for; ends the program at a name that is none."""
    for name in names:
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            parser.error(f"no figure {name!r}{hint} There are: {', '.join(FIGURES)}")
    return [FIGURES[name] for name in names or FIGURES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and draw the figures; returns 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--measure", action="store_true", help="run the benchmarks first")
    parser.add_argument("--folder", type=Path, help="where new results are put and looked for first")
    parser.add_argument("--html", type=Path, help="draw the figures on this page")
    options = parser.parse_args(arguments)
    wanted = chosen(options.figures, parser)
    if options.measure and options.folder is None:
        parser.error("--measure needs a --folder for its results")
    failed = 0
    if options.measure:
        options.folder.mkdir(parents=True, exist_ok=True)
        failed = sum(measure(figure, options.folder) for figure in wanted)
    drawn = []
    for figure in wanted:
        records = Records((options.folder, RECORDED) if options.folder else (RECORDED,))
        points = figure.points(records)
        drawn.append((figure, points, tuple(records.used.values())))
        print(text(*drawn[-1]), end="\n\n", flush=True)
    if options.html is not None:
        options.html.write_text(page(drawn))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
