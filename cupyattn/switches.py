"""Read the environment: switches, and the destination of log messages."""

from __future__ import annotations

import logging
import os

#: Names of levels that ``CUPYATTN_LOG`` takes.
LEVELS = ("debug", "info", "warning", "error")


def is_on(name: str) -> bool:
    """Return whether a variable of the environment is set, to other than 0 or nothing."""
    return os.environ.get(name, "0") not in ("", "0")


def start_log() -> None:
    """Write the logger's messages to standard error where ``CUPYATTN_LOG`` names their least level.

    Raises
    ------
    ValueError
        If it names no level.
    """
    level = os.environ.get("CUPYATTN_LOG", "").lower()
    if not level:
        return
    if level not in LEVELS:
        raise ValueError(f"CUPYATTN_LOG must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logger = logging.getLogger("cupyattn")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
