"""docs/tiles_RUNG.svg: current, true to the sources of the kernels, and shown by the tutorial."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.compiler.modules import KERNELS
from cupyattn.interpret import Trace, observe
from cupyattn.kernels.ladder import VARIANTS
from docs import write_tiles, write_tutorial

RUNGS = pytest.mark.parametrize("rung", VARIANTS)
SVG = "{http://www.w3.org/2000/svg}"


@RUNGS
def test_a_picture_is_current(rung: str) -> None:
    stored = write_tiles.path_of(rung).read_text("utf-8")
    assert write_tiles.picture(rung) == stored, "run python -m docs.write_tiles"


@RUNGS
def test_the_kernel_says_what_the_picture_shows(rung: str) -> None:
    lines = {
        line.strip()
        for line in (KERNELS / write_tutorial.file_of(rung)).read_text("utf-8").splitlines()
    }
    assert set(write_tiles.SAID[rung]) <= lines


def traced(rung: str, folder: Path, q: Any, k: Any, named: str = ".shared") -> list[str]:
    """Return the lines of the interpreter's trace of the drawn thread that name something."""
    warp, lane = divmod(write_tiles.THREAD, 32)
    with observe(Trace(folder / "trace.txt", warp=warp, lane=lane)):
        ca.attention(q, k, k, variant=rung, backend="interpret")
    lines = (folder / "trace.txt").read_text("utf-8").splitlines()
    return [line for line in lines if named in line]


def tile(rung: str) -> tuple[Any, Any]:
    """Return Q and K of one tile at the head size of the pictures: all numbers differ."""
    tiles = write_tiles.tiles_of(rung)
    numbers = np.arange((tiles.block_q + tiles.block_kv) * write_tiles.HEAD_DIM) / 2.0**12
    q, k = np.split(numbers.astype(np.float32), [tiles.block_q * write_tiles.HEAD_DIM])
    return tuple(x.reshape(1, 1, -1, write_tiles.HEAD_DIM) for x in (q, k))


def test_the_interpreter_sees_the_thread_of_fa_store_those_scores(tmp_path: Path) -> None:
    source = (KERNELS / "attn_fa.cu").read_text("utf-8").splitlines()
    number = next(i for i, line in enumerate(source, 1) if "smem.S[" in line and "admit" in line)
    stores = [line for line in traced("fa", tmp_path, *tile("fa")) if f"fa.cu:{number} " in line]
    found = []
    for line in stores:
        register, offset, value = re.findall(
            r"st\.shared\.f32 \[(%r\d+)(?:\+(-?\d+))?\].* \1 = (0x\w+)", line
        )[0]
        assert register
        found.append(int(value, 16) + int(offset or 0))
    rows, keys = np.nonzero(write_tiles.score_owners("fa") == write_tiles.THREAD)
    pitch = write_tiles.tiles_of("fa").block_kv + 1
    places = 4 * (rows * pitch + keys)
    assert len(found) == 8
    assert (np.sort(found) - np.min(found) == np.sort(places) - np.min(places)).all()


def test_the_interpreter_sees_the_lane_of_fa_warps_read_those_rows_and_keys(
    tmp_path: Path,
) -> None:
    q, k = tile("fa_warps")
    loads = [line for line in traced("fa_warps", tmp_path, q, k) if "ld.shared" in line]
    source = (KERNELS / "attn_fa_warps.cu").read_text("utf-8").splitlines()
    rows, keys = np.nonzero(write_tiles.score_owners("fa_warps") == write_tiles.THREAD)
    for name, array, own in (("smem.K[(", k[0, 0], keys), ("Q_warp[r", q[0, 0], rows)):
        number = next(i for i, line in enumerate(source, 1) if name in line)
        bits = [
            int(value, 16)
            for line in loads
            if f"fa_warps.cu:{number} " in line
            for value in re.findall(r"%f\d+ = (0x\w+)", line)
        ]
        read = np.isin(array.view(np.uint32), np.array(bits, np.uint32))
        assert np.flatnonzero(read.all(axis=1)).tolist() == np.unique(own).tolist(), name
        assert (read.any(axis=1) == read.all(axis=1)).all()


def test_the_interpreter_sees_the_lane_of_fa_tc_compute_those_scores(tmp_path: Path) -> None:
    """Scores of row r and key j are r + 128 j, so that a register tells which one it holds."""
    tiles = write_tiles.tiles_of("fa_tc")
    q, k = (
        np.zeros((1, 1, length, write_tiles.HEAD_DIM), np.float16)
        for length in (tiles.block_q, tiles.block_kv)
    )
    q[..., 0], q[..., 1] = np.arange(tiles.block_q), 1
    k[..., 0], k[..., 1] = 1, 128 * np.arange(tiles.block_kv)
    source = (KERNELS / "attn_fa_tc.cu").read_text("utf-8").splitlines()
    numbers = {i for i, line in enumerate(source, 1) if "mma_m16n8k16<elem_t>(S_acc" in line}
    found = set()
    for line in traced("fa_tc", tmp_path, q, k, "mma.sync"):
        if {int(number) for number in re.findall(r"fa_tc\.cu:(\d+)", line)} & numbers:
            scores = [int(x) for x in re.findall(r"%f\d+ = 0x\w+ \((\d+)\)", line)]
            assert len(scores) == 4
            found |= {(score % 128, score // 128) for score in scores}
    own = np.argwhere(write_tiles.score_owners("fa_tc") == write_tiles.THREAD)
    assert found == {(int(row), int(key)) for row, key in own} and len(found) == 32


@RUNGS
def test_threads_share_a_tile_evenly(rung: str) -> None:
    tiles, owners = write_tiles.tiles_of(rung), write_tiles.score_owners(rung)
    assert owners.shape == (tiles.block_q, tiles.block_kv)
    counts = np.bincount(owners.ravel(), minlength=tiles.num_threads)
    assert len(counts) == tiles.num_threads and len(set(counts.tolist())) == 1


@pytest.mark.parametrize("rung", [rung for rung in VARIANTS if rung not in ("unfused", "fa")])
def test_from_fa_warps_on_a_row_stays_in_a_warp(rung: str) -> None:
    owners, reducers = write_tiles.score_owners(rung), write_tiles.row_owners(rung)
    for row, lanes in zip(owners, reducers, strict=True):
        assert set(row.tolist()) == set(lanes.tolist()) and len({t // 32 for t in lanes}) == 1


@RUNGS
def test_the_drawing_covers_each_score_once(rung: str) -> None:
    tiles = write_tiles.tiles_of(rung)
    seen = np.zeros((tiles.block_q, tiles.block_kv), int)
    owners = write_tiles.score_owners(rung) // 32
    for warp, row, key, rows, keys in write_tiles.rectangles(owners):
        assert (owners[row : row + rows, key : key + keys] == warp).all()
        seen[row : row + rows, key : key + keys] += 1
    assert (seen == 1).all()


@RUNGS
def test_nothing_is_drawn_outside(rung: str) -> None:
    root = ET.fromstring(write_tiles.picture(rung))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
    for text in root.iter(f"{SVG}text"):
        left = 0 if text.get("class") else float(text.attrib["x"])
        assert text.text and left + 6.2 * len(text.text) < width, "of 12 pixels at most"


def test_each_chapter_shows_its_rung() -> None:
    for left, right in pairwise(VARIANTS):
        part = write_tutorial.PAGE.read_text("utf-8").split(f"`{left}` → `{right}`:")[1]
        assert f"](tiles_{right}.svg)" in part.split("\n## ")[0]
    shown = re.findall(r"\]\(tiles_(\w+)\.svg\)", write_tutorial.PAGE.read_text("utf-8"))
    assert shown == list(VARIANTS)
