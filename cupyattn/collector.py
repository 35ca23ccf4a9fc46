"""Keep Python's garbage collector from visiting objects that live long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while objects are made that live long.

    Their number triggers collections, which find no garbage. All objects count as old afterwards:
    otherwise the next collection visits these.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
