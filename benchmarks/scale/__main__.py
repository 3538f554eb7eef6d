"""How a model is served, by arithmetic: ``python -m benchmarks.scale --model kimi-k2 --gpus 64``."""

from __future__ import annotations

import argparse

from benchmarks.scale.machines import MACHINES
from benchmarks.scale.page import PAGE, table, with_tables
from benchmarks.scale.shapes import SHAPES
from benchmarks.scale.step import Cut, Load, best, step


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-70b")
    parser.add_argument("--machine", choices=MACHINES, default="H200")
    parser.add_argument("--gpus", type=int, default=8, help="a power of two")
    parser.add_argument(
        "--cut", type=int, nargs=3, metavar=("TENSOR", "PIPELINE", "DATA"), help="instead of --gpus"
    )
    parser.add_argument("--sequences", type=int, default=16, help="on each GPU")
    parser.add_argument("--context", type=int, default=8192, help="tokens in each sequence's cache")
    parser.add_argument("--ms", type=float, default=50, help="most milliseconds of a token")
    parser.add_argument("--page", action="store_true", help="write the tables of benchmarks/SCALE.md anew")
    return parser.parse_args()


def main() -> None:
    """Print the terms of a step, or write the page."""
    given = arguments()
    if given.page:
        PAGE.write_text(with_tables(PAGE.read_text()))
        return
    shape, machine = SHAPES[given.model], MACHINES[given.machine]
    if (
        given.gpus < 1
        or given.gpus & (given.gpus - 1)
        or min(given.sequences, given.context) < 1
        or given.ms <= 0
    ):
        raise SystemExit("--gpus is a power of two, --sequences, --context and --ms are above 0")
    try:
        if given.cut:
            cut = Cut(*given.cut)
            made = step(shape, machine, cut, Load(cut.gpus * given.sequences, given.context))
        else:
            load = Load(given.gpus * given.sequences, given.context)
            found = best(shape, machine, given.gpus, load, given.ms / 1e3)
            if found is None:
                raise SystemExit(
                    f"{shape.name} does not fit {given.gpus} x {given.machine} with these caches"
                )
            cut, made = found
    except ValueError as error:
        raise SystemExit(str(error)) from None
    rows = [(name, f"{value * 1e3:.2f}") for name, value in vars(made.terms).items()]
    print(f"{shape.name} on {cut.gpus} x {given.machine}, tensor x pipeline x data {cut}")
    print(table(("term", "ms a token"), [*rows, ("total", f"{made.terms.total * 1e3:.2f}")]))
    print(
        f"weights {made.weights / 1e9:.1f} GB, cache {made.cache / 1e9:.1f} GB a GPU, "
        f"{'fits' if made.fits else 'does not fit'}; stages idle {made.idle:.0%}; "
        f"{made.rate:.0f} tokens/s a GPU; largest term: {made.terms.limit}"
    )


if __name__ == "__main__":
    main()
