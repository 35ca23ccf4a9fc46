"""Recent calls of every operation, found by the facts on which they depend.

Checks, plans and the layout of parameters depend only on settings and on the forms of arrays, so a
known call does not repeat them.
"""

from __future__ import annotations

import threading
from typing import Any

from cupyattn.compiler.modules import generation
from cupyattn.problem.settings import MOST_REMEMBERED, accept


class Recent:
    """Results of resolving calls, for later calls of the same settings and forms.

    Parameters
    ----------
    most : int
        Calls that are kept; the oldest make room.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[Any, Any] = {}
        self._changing = threading.RLock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, facts: tuple[Any, ...], forms: Any) -> tuple[Any, Any]:
        """Return the key of a call, and the value remembered under it.

        Parameters
        ----------
        facts : tuple
            Name and settings of the call, and everything else on which it depends.
        forms : tuple or None
            Of its arrays (`cupyattn.arrays.form.forms_of`), or of its tensors; None where these
            have no form.

        Returns
        -------
        key : object
            None where nothing tells the call from others.
        found : object
            None where nothing was remembered.
        """
        if forms is None:
            return None, None
        key = generation(), facts, forms
        try:
            return key, self._kept.get(key)
        except TypeError:  # an array among the settings, a list for a window
            return None, None

    def remember(self, key: Any, made: Any) -> None:
        """Keep the result of a call, for `find`, and its settings: it has passed all checks."""
        accept(key)
        with self._changing:  # the oldest is found by walking, which another thread would disturb
            while len(self._kept) >= self.most:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = made

    def clear(self) -> None:
        """Forget all."""
        with self._changing:
            self._kept.clear()


#: The calls of every operation, as `cupyattn.runtime.ready.Ready` objects. True stands for a call
#: that was checked by shapes and types alone.
CALLS = Recent(MOST_REMEMBERED)
