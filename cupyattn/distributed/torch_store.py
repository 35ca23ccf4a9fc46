"""The store of torch's process group, in which its ranks leave short messages.

Nothing blocks in it: a rank that waits for a word looks for ranks that have failed, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cupyattn.distributed.store import Store, absent
from cupyattn.errors import RankError

Result = TypeVar("Result")
#: Seconds between two looks for words of other ranks: at first, and at most.
SOONEST, LATEST = 50e-6, 2e-3


class TorchStore(Store):
    """The store of torch's process group, with the interface of `Store`.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup
    rank, size : int
        Number of this rank, and number of ranks.
    """

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self.size = size
        self._store = process_group.get_group_store()
        #: Each rank counts its groups on this process group, all in the same order.
        self.number: int = self._tried(lambda: self._store.add(f"cupyattn/of rank {rank}", 1))
        self._prefix = f"cupyattn/{self.number}"
        self._failed = self._key("failed")
        self._own: str | None = None
        #: Whether this rank knows that a rank has failed.
        self.has_failed = False

    def gather(self, key: str, rank: int, value: bytes, timeout: float, about: str) -> list[bytes]:
        self.check()
        keys = [self._key(key, str(other)) for other in range(self.size)]
        self._tried(lambda: self._store.set(keys[rank], value))
        end, pause = time.monotonic() + timeout, SOONEST
        while not self._there(keys):
            self.check()
            if time.monotonic() > end:
                missing = [n for n, key in enumerate(keys) if not self._there([key])]
                if missing:
                    self.fail(*absent(missing, about, timeout))
                    self.check()
            time.sleep(pause)
            pause = min(2 * pause, LATEST)
        found: list[bytes] = self._tried(lambda: self._store.multi_get(keys))
        # All ranks have come here, so all have read what was left before.
        before, self._own = self._own, keys[rank]
        if before is not None:
            self._tried(lambda: self._store.delete_key(before))
        return found

    def fail(self, rank: int, cause: str) -> None:
        said = json.dumps([rank, cause])
        self._tried(lambda: self._store.compare_set(self._failed, "", said))

    def check(self) -> None:
        if self._there([self._failed]):
            rank, cause = json.loads(self._tried(lambda: self._store.get(self._failed)))
            self.has_failed = True
            raise RankError(rank, cause)

    def _key(self, *names: str) -> str:
        return "/".join((self._prefix, *names))

    def _there(self, keys: list[str]) -> bool:
        there: bool = self._tried(lambda: self._store.check(keys))
        return there

    def _tried(self, call: Callable[[], Result]) -> Result:
        """Call the store. If it does not answer, the process that holds it has ended."""
        try:
            return call()
        except RuntimeError as error:  # torch.distributed.DistError is one
            self.has_failed = True
            cause = f"ended: the store of torch's process group does not answer ({error})"
            raise RankError(0, cause.splitlines()[0]) from error
