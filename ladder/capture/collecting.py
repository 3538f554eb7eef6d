"""When the pass of the garbage collector over all objects runs that recording makes due.

Records and what compiled them stay. The interpreter looks through all objects once those that came to stay
since its last such pass are a quarter of the others; after a recording that is soon, in a call that should be
quick.
"""

from __future__ import annotations

import gc

GROWTH = 1.125
"""How many times the objects after the last pass there are when a recording ends with the next."""

OLDEST = 2
"""The generation of objects that stay."""

_after_last = 0


def collect_if_due() -> None:
    """Collect all garbage if many objects came to stay since that was last done here."""
    global _after_last
    if not gc.isenabled():
        return
    gc.collect(OLDEST - 1)
    if len(gc.get_objects(OLDEST)) > GROWTH * _after_last:
        gc.collect()
        _after_last = len(gc.get_objects(OLDEST))
