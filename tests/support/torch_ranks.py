"""Ranks of torch's process groups: threads of this process, and processes with gloo."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ranks import free_port, in_threads

ROOT = Path(__file__).parents[2]


def process_groups(size: int) -> list[Any]:
    """Return the process groups of threads that are ranks: gloo on one store in memory."""
    import torch
    from torch import distributed as dist

    store, found = dist.HashStore(), [None] * size

    def make(rank: int) -> None:
        own = dist.PrefixStore("ranks", store)
        group = dist.ProcessGroup(own, rank, size)
        gloo = dist.ProcessGroupGloo(own, rank, size, datetime.timedelta(seconds=30))
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        found[rank] = group

    in_threads(make, size)
    return found


def on_threads(
    function: Callable[[Any], Any], size: int, **options: Any
) -> tuple[list[Any], list[BaseException | None]]:
    """Return what ranks return, and what they raise, given their groups of `from_torch`."""
    from cupyattn import distributed

    groups = process_groups(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def on_rank(rank: int) -> None:
        try:
            results[rank] = function(distributed.from_torch(groups[rank], **options))
        except Exception as error:  # noqa: BLE001  the caller looks at it
            errors[rank] = error

    in_threads(on_rank, size)
    return results, errors


def torchrun(size: int, module: str, *args: str, seconds: float = 300) -> str:
    """Run a module on ranks that torchrun starts; return what they print."""
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}",
        f"--master-port={free_port()}", "-m", module, *args,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def processes(size: int, module: str, *args: str, seconds: float = 120) -> list[tuple[int, str]]:
    """Return exit codes and output of ranks that nothing watches, as torchrun would."""
    port = str(free_port())
    started = []
    for rank in range(size):
        own = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *args], cwd=ROOT, env=_environment() | own,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        )
    found = [one.communicate(timeout=seconds)[0] for one in started]
    return [(one.returncode, said) for one, said in zip(started, found, strict=True)]


def _environment() -> dict[str, str]:
    # A rank that is aborted says where its threads were.
    said = {"PYTHONFAULTHANDLER": "1"}
    return os.environ | said | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
