"""A model written whole or not at all: shards, index and companions, in a folder beside the target.

``NAME.partial`` holds the unfinished files; its ``model`` becomes NAME in one step, once everything
has been read back. A shard that has its final name there was checked, and its checksum stands in
``state.json``. The same work begun again after a kill keeps the shards that still have theirs, goes
on behind them, and ends in the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cupyattn.checkpoints.analysis import sha256_of
from cupyattn.checkpoints.companions import CONFIG, companions
from cupyattn.checkpoints.header import Header, TensorInfo, encode_header
from cupyattn.checkpoints.shards import Array, Source
from cupyattn.checkpoints.source import (
    INDEX,
    SAFETENSORS,
    SHARD_NUMBER,
    SafetensorsCheckpoint,
    open_checkpoint,
)
from cupyattn.files import naming, open_regular
from cupyattn.measure.words import format_bytes, printable

#: Largest sum of tensors in a file, where nothing is said.
MAX_SHARD_BYTES = 5 * 10**9
_LOCK, _STATE, _MODEL = "lock", "state.json", "model"
#: A lock is no link, and no pipe that waits for a reader.
_LOCK_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

LOG = logging.getLogger("cupyattn")


@dataclass(frozen=True)
class Item:
    """Tensors that are made together, from one of the source.

    Parameters
    ----------
    name : str
        The tensor of the source.
    outputs : dict of str to TensorInfo
    """

    name: str
    outputs: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Size of all outputs."""
        return sum(info.nbytes for info in self.outputs.values())


class Work(Protocol):
    """Makes tensors, and judges them once they are on the disk."""

    def make(self, item: Item) -> dict[str, Array]:
        """Return the outputs of an item."""

    def check(self, item: Item, found: Mapping[str, Array]) -> str | None:
        """Describe an error of outputs that were read back, or return None."""

    def metadata(self, items: Sequence[Item]) -> dict[str, str]:
        """Return the metadata of a file of these items."""


@dataclass(frozen=True)
class Shard:
    """One file to be written.

    Parameters
    ----------
    name : str
    items : tuple of Item
    start : bytes
        Everything before the tensors.
    header : Header
    """

    name: str
    items: tuple[Item, ...]
    start: bytes
    header: Header


@dataclass(frozen=True)
class Plan:
    """A model to be written.

    Parameters
    ----------
    shards : tuple of Shard
    texts : dict of str to str
        Small files, by name.
    copies : dict of str to Path
        Files to copy, by the names that they get; the paths have no links left in them.
    left_out : dict of str to str
        Entries of the source's folder that are not copied, and why.
    """

    shards: tuple[Shard, ...]
    texts: dict[str, str]
    copies: dict[str, Path]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, int]:
        """Names and sizes of the files of the model."""
        return {
            **{shard.name: shard.header.file_size for shard in self.shards},
            **{name: len(text.encode()) for name, text in self.texts.items()},
            **{name: path.stat().st_size for name, path in self.copies.items()},
        }

    @property
    def key(self) -> str:
        """A hash of all that is known before a tensor is made."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(shard.name.encode() + b"\0" + shard.start)
        return digest.hexdigest()


def plan(
    source: Source,
    items: Sequence[Item],
    work: Work,
    config: dict[str, Any] | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Plan:
    """Spread items over files, in their order.

    Parameters
    ----------
    source : Source
        Gives the names, and the small files that go along.
    items : sequence of Item
    work : Work
    config : dict, optional
        Contents of ``config.json``.
    max_shard_bytes : int
        A file holds more where one item alone does.

    Raises
    ------
    ValueError
        If two items have outputs of one name.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    groups: list[list[Item]] = [[]]
    size = 0
    names: dict[str, str] = {}
    for item in items:
        for name in item.outputs:
            if name in names:
                raise ValueError(
                    f"{names[name]!r} and {item.name!r} would both become {name!r}: is the model "
                    "quantised already?"
                )
            names[name] = item.name
        if groups[-1] and size + item.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    stem = _stem(source)
    shards = []
    for i, group in enumerate(groups, 1):
        number = f"-{i:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        outputs = {name: info for item in group for name, info in item.outputs.items()}
        metadata = {"format": "pt", **work.metadata(group)}
        start, placed = encode_header(outputs, metadata)
        header = Header(placed, metadata, len(start))
        shards.append(Shard(f"{stem}{number}{SAFETENSORS}", tuple(group), start, header))
    texts = {} if config is None else {CONFIG: json.dumps(config, indent=2) + "\n"}
    if len(shards) > 1:
        weight_map = {name: shard.name for shard in shards for name in shard.header.tensors}
        total = sum(item.nbytes for item in items)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        texts[f"{stem}{SAFETENSORS}{INDEX}"] = json.dumps(index, indent=2) + "\n"
    copies, left_out = companions(source)
    return Plan(tuple(shards), texts, copies, left_out)


def _stem(source: Source) -> str:
    """Return the names of a model's files without number and ending."""
    stems = {SHARD_NUMBER.sub("", file.stem) for file in source.files}
    if len(stems) == 1 and source.files[0].suffix == SAFETENSORS:
        return stems.pop()
    return "model"


def check_target(target: Path) -> None:
    """Raise unless a model may be written there.

    Raises
    ------
    FileExistsError
        If something is there: nothing is ever overwritten.
    FileNotFoundError
        If the folder that it would lie in does not exist.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(target.parent)!r} to write into")
    if _is_taken(target):
        partial = _partial(target)
        if partial.is_dir():  # a kill between the last steps leaves it
            with suppress(OSError), _locked(partial):
                _forget(partial)
        raise FileExistsError(f"{target} exists already: nothing is overwritten, name another")


def _is_taken(target: Path) -> bool:
    return os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir()))


def write(plan: Plan, work: Work, target: Path, advance: Callable[[str], None]) -> None:
    """Write a model, read it back, and only then give it its name.

    Parameters
    ----------
    plan : Plan
    work : Work
    target : Path
        Must not exist, or be an empty folder.
    advance : callable
        Called with the name of each item when it was made, and again when it was checked.

    Raises
    ------
    OSError
        If something cannot be written or read, or there is too little room on the disk.
    ValueError
        If the files that were read back differ from the plan.
    """
    partial = _partial(target)
    if not partial.exists():
        _check_room(plan, partial)  # before anything is left behind
    with _locked(partial):
        if _is_taken(target):
            _forget(partial)
            raise FileExistsError(
                f"another process has written {target} meanwhile: this one wrote nothing"
            )
        model = partial / _MODEL
        checksums = _go_on(partial, plan, advance)
        _check_room(plan, partial)
        for shard in plan.shards:
            if shard.name not in checksums:
                temporary = model / f"{shard.name}.tmp"
                checksums[shard.name] = _write_shard(temporary, shard, work, advance)
                _write_state(partial, plan, checksums)
                os.replace(temporary, model / shard.name)
        for name, text in plan.texts.items():
            _write_text(model / name, text)
        for name, path in plan.copies.items():
            with open_regular(path, follow_links=False) as file, open(model / name, "wb") as copy:
                shutil.copyfileobj(file, copy)
        _check_whole(model, plan)
        _sync(model)
        try:
            os.rename(model, target)
        except OSError as error:
            if not _is_taken(target):
                raise
            raise FileExistsError(
                f"{target} was made by something else meanwhile: the new model is {model}"
            ) from error
        _sync(target.parent)
        _forget(partial)


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the lock of the folder in which a model is written; a killed process releases it.

    The process that writes the model removes the folder at its end, while it still holds the lock.
    Another process may have opened the lock before; it then locks a file without a name, sees that,
    and begins again.

    Raises
    ------
    BlockingIOError
        If another process writes the same model.
    FileExistsError
        If the folder holds something that no conversion wrote.
    """
    known = {_LOCK, _STATE, f"{_STATE}.tmp", _MODEL}
    while True:
        try:
            partial.mkdir(exist_ok=True)
            there = {p.name for p in partial.iterdir()}
            strange = sorted(there - known)
            # A conversion writes its state before any file of the model.
            if not strange and _MODEL in there and _STATE not in there:
                strange = [f"{_MODEL}/{p.name}" for p in sorted((partial / _MODEL).iterdir())]
            if strange:
                raise FileExistsError(
                    f"{partial} holds {strange[0]!r}, which no conversion left there: move it "
                    "away, or name another output"
                )
            lock = os.open(partial / _LOCK, _LOCK_FLAGS, 0o666)
        except FileNotFoundError:
            if not partial.parent.is_dir():
                raise
            continue  # removed between two of these steps
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(
                    f"another process is writing {partial}: this one wrote nothing, wait for it "
                    "or name another output"
                ) from error
            if _is_named(lock, partial / _LOCK):
                yield
                return
        finally:
            os.close(lock)


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether a name belongs to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _go_on(partial: Path, plan: Plan, advance: Callable[[str], None]) -> dict[str, str]:
    """Keep the shards of an earlier attempt at the same model, and nothing else.

    Returns
    -------
    dict of str to str
        Checksums of the shards that were kept, by their names.
    """
    model, state = partial / _MODEL, partial / _STATE
    try:
        known = json.loads(state.read_bytes()) if state.exists() else None
    except ValueError:
        known = None
    if not isinstance(known, dict) or known.get("key") != plan.key or not model.is_dir():
        if known is not None:
            LOG.warning(
                "%s is of another model or configuration: starting again", printable(str(partial))
            )
        if model.exists():
            shutil.rmtree(model)
        state.unlink(missing_ok=True)
        model.mkdir()
        _write_state(partial, plan, {})
        return {}
    shards, written = {shard.name: shard for shard in plan.shards}, known.get("shards")
    kept: dict[str, str] = {}
    for file in sorted(model.iterdir()):
        shard = shards.get(file.name)
        if shard is not None:
            checksum = _checksum_of(file, shard)
            if checksum and isinstance(written, dict) and checksum == written.get(file.name):
                kept[file.name] = checksum
                for item in shard.items:
                    advance(item.name)
                    advance(item.name)
                continue
            LOG.warning("%s is damaged: it is written again", printable(str(file)))
        file.unlink()
    return kept


def _write_state(partial: Path, plan: Plan, checksums: dict[str, str]) -> None:
    _write_text(partial / _STATE, json.dumps({"key": plan.key, "shards": checksums}))


def _checksum_of(file: Path, shard: Shard) -> str | None:
    """Return the checksum of a file that should be a shard, None where its header is another's."""
    try:
        found = SafetensorsCheckpoint(file, [file])
        if found.headers[file] != shard.header:
            return None
        return _checksum({name: sha256_of(found.read(name)) for name in found.tensors})
    except (OSError, ValueError):
        return None


def _checksum(tensors: Mapping[str, str]) -> str:
    """Return the checksum of a shard, from the checksums of its tensors."""
    return hashlib.sha256(json.dumps(sorted(tensors.items())).encode()).hexdigest()


def _check_room(plan: Plan, partial: Path) -> None:
    model = partial / _MODEL
    there = {path.name for path in model.iterdir()} if model.is_dir() else set()
    needed = sum(size for name, size in plan.files.items() if name not in there)
    free = shutil.disk_usage(partial.parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{format_bytes(needed)} are needed and {format_bytes(free)} are free",
            str(partial),
        )


def _write_shard(path: Path, shard: Shard, work: Work, advance: Callable[[str], None]) -> str:
    """Write a shard, read it back and check it; return its checksum."""
    checksums: dict[str, str] = {}
    with open(path, "wb") as file:
        for item in shard.items:
            checksums |= _write_item(file, path, shard.header, work.make(item))
            advance(item.name)
        with naming(path):
            file.seek(0)
            file.write(shard.start)
            file.flush()
            os.fsync(file.fileno())
    written = SafetensorsCheckpoint(path, [path])
    if written.headers[path] != shard.header:
        raise ValueError(f"{path}: the header that was read back differs")
    for item in shard.items:
        fault = _fault(item, work, {name: written.read(name) for name in item.outputs}, checksums)
        if fault:
            raise ValueError(f"{path}: {item.name!r} was read back, and {fault}")
        advance(item.name)
    return _checksum(checksums)


def _write_item(
    file: BinaryIO, path: Path, header: Header, outputs: Mapping[str, Array]
) -> dict[str, str]:
    """Write tensors to their places; return their checksums."""
    with naming(path):
        for name, array in outputs.items():
            file.seek(header.data_start + header.tensors[name].begin)
            file.write(array.reshape(-1).view("u1").data)
    return {name: sha256_of(array) for name, array in outputs.items()}


def _fault(
    item: Item, work: Work, found: Mapping[str, Array], checksums: Mapping[str, str]
) -> str | None:
    """Describe an error of tensors that were read back, or return None."""
    fault = work.check(item, found)
    if fault is None and any(sha256_of(x) != checksums[name] for name, x in found.items()):
        fault = "its bytes differ from the written bytes"
    return fault


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _check_whole(model: Path, plan: Plan) -> None:
    """Open the model as any reader would, and hold its files to the plan."""
    found = {path.name: path.stat().st_size for path in model.iterdir()}
    if found != plan.files:
        other = sorted(set(found.items()) ^ set(plan.files.items()))
        raise ValueError(f"{model} differs from the plan in {other[0][0]}")
    planned = {n: info for shard in plan.shards for n, info in shard.header.tensors.items()}
    if open_checkpoint(model).tensors != planned:
        raise ValueError(f"{model} has other tensors than planned")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _forget(partial: Path) -> None:
    """Remove temporary files after the model has its name; the caller holds the lock.

    The lock goes last: from then on another process may begin, and keeps the folder.
    """
    if (partial / _MODEL).exists():  # of another attempt, which may go on
        return
    for name in (f"{_STATE}.tmp", _STATE, _LOCK):
        (partial / name).unlink(missing_ok=True)
    try:
        partial.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
