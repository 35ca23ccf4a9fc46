"""docs/tiles_RUNG.svg: current, true to the sources of the kernels, and shown by the tutorial."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

from cupyattn.compiler.modules import KERNELS
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
