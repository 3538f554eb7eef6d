"""The command line: ``ladder gemm|compile|explain|tune|superopt|inspect|convert|report|types|…``.

The top layer: may import every other package; nothing imports it. Results go to
stdout, everything else to stderr.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit with its code: 0, 1 (failed) or 2 (usage)."""
    from ladder.cli.app import run

    sys.exit(run(sys.argv[1:]))
