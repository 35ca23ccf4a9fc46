"""The text of a comparison from its record; pictures as arrays and as PNG."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.measure import trial
from cupyattn.measure.pictures import data_uri, psnr, ssim
from cupyattn.measure.trial import Comparison

WHAT = {"model": "FluxPipeline"}


def record() -> dict[str, Any]:
    """Layers are twice as fast, attention is undecided, both are slower than layers alone."""
    native = [[0.9 + 0.01 * i, 1.0 + 0.01 * i, 1.1 + 0.01 * i] for i in range(6)]

    def way(said: str, factors: list[float]) -> dict[str, Any]:
        rounds = [[x * f for x in steps] for steps, f in zip(native, factors, strict=True)]
        return {"said": said, "rounds": rounds, "first": 3.0, "weights": 2**30, "peak": 2**31}

    ways = {
        "native": way("native", [1.0] * 6),
        "linear layers": {**way("INT8 linear layers", [0.5] * 6), "latents": [1e-3, 2e-3],
                          "psnr": 41.25, "ssim": 0.98765},
        "attention": way("attention in balanced INT8", [1.1, 0.9, 1.05, 0.95, 1.1, 0.9]),
        "accelerated": way("both", [1.25] * 6),
    }  # fmt: skip
    picture = data_uri(np.zeros((2, 2, 3), np.uint8))
    return {"experiment": "trial", "what": WHAT, "ways": ways,
            "pictures": {"native": [picture], "accelerated": [picture]}}  # fmt: skip


def test_each_part_has_a_verdict() -> None:
    found = Comparison(record())
    assert found.speed("linear layers").median == pytest.approx(2.0)
    assert found.verdicts() == {
        "linear layers": "INT8 linear layers: 2.00 [2.00, 2.00] times as fast",
        "attention": "attention in balanced INT8: 1.00 [0.91, 1.11] times as fast, undecided: "
        r"leave it native, exclude=r'(attn|attention)\d?$'",
        "accelerated": "both: 0.80 [0.80, 0.80] times as fast: leave it native, restore()",
    }


def test_the_text_has_times_memory_and_quality() -> None:
    text = str(Comparison(record()))
    assert repr(Comparison(record())) == text  # as a notebook shows it
    layers = next(line for line in text.splitlines() if line.startswith("linear layers  "))
    assert layers.split() == [
        "linear", "layers", "512", "ms", "2.00", "[2.00,", "2.00]", "3", "s", "1.0", "GiB", "2.0",
        "GiB", "2.0e-03", "41.2", "dB", "0.9877",
    ]  # fmt: skip
    assert "linear layers, latents to native by step: 1: 1.0e-03, 2: 2.0e-03" in text


def test_runs_that_only_some_ways_have_do_not_count() -> None:
    made = record()
    del made["ways"]["native"]["rounds"][4:]
    assert Comparison(made).rounds == 4 and Comparison(made).speed("linear layers").low == 2.0
    assert Comparison(made).verdicts()["linear layers"] == (
        "INT8 linear layers: 2.00 times as fast, undecided: an interval needs 6 rounds, got 4"
    )
    assert Comparison(made).table()[1][1][2] == "2.00"
    assert Comparison(made).table()[0][2] == "times as fast"  # as the verdicts say
    made["ways"]["native"]["rounds"].clear()
    assert Comparison(made).verdicts() == {} and "-" in str(Comparison(made))


def test_the_page_shows_pictures_side_by_side_and_loads_nothing() -> None:
    made = record()
    made["what"] = {"model": "<b>", "device": "an <H200>"}
    page = Comparison(made).page()
    assert page.count('<img alt="" src="data:image/png;base64,') == 2
    assert "<th>native</th><th>accelerated</th>" in page and "&lt;b&gt;" in page
    assert "6 runs of each way in turns" in page and "Measured on an &lt;H200&gt;." in page
    assert "http" not in page and "<script" not in page and "leave it native" in page
    made["pictures"] = {}
    assert "has no pictures" in Comparison(made).page()


def test_a_record_is_gone_on_with_and_no_other_is(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    assert trial.read(path, WHAT) == trial.new(WHAT)
    path.write_text(trial.text(record()))
    assert trial.read(path, WHAT) == record()
    for what, name in (({"model": "WanPipeline"}, "model"), ({}, "entries")):
        with pytest.raises(ValueError, match=f"record of another comparison, by its {name}: give"):
            trial.read(path, what)
    native = record()["ways"]["native"]
    damaged: list[dict[str, Any]] = [
        {"experiment": "ladder"}, {"ways": []}, {"pictures": None}, {"ways": {"native": {}}},
        *({"ways": {"native": {**native, "rounds": x}}} for x in ("x", 3, [[]], [["x"]], [[0.0]])),
    ]  # fmt: skip
    for one in damaged:
        path.write_text(json.dumps({**record(), **one}))
        with pytest.raises(ValueError, match="is no record of a comparison, or is damaged"):
            trial.read(path, WHAT)


def test_a_step_cache_has_its_gain_and_that_of_both() -> None:
    made = record()
    native = made["ways"]["native"]["rounds"]
    slow = [[4 * x for x in steps] for steps in native]
    made["ways"]["native, no step cache"] = {**made["ways"]["native"], "rounds": slow}
    for steps in native:
        steps[0] = 0.0001  # a step that was left out
    found = Comparison(made)
    assert found.seconds("native") == [pytest.approx(sum(steps) / 3) for steps in native]
    assert "native, no step cache" in str(found)
    assert found.verdicts()["native, no step cache"].startswith("step cache alone: 5.72 ")
    assert found.verdicts()["native, no step cache"].endswith(
        " times as fast as native without it, and 3.20 [3.20, 3.20] with both"
    )


def test_a_record_holds_no_infinity() -> None:
    made = record()
    made["ways"]["linear layers"] |= {"psnr": None, "latents": [None, 1e-3]}
    assert json.loads(trial.text(made)) == made
    text = str(Comparison(made))
    layers = next(line for line in text.splitlines() if line.startswith("linear layers  "))
    assert layers.split()[-2] == "equal" and "by step: 1: not finite, 2: 1.0e-03" in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        trial.text({"psnr": math.inf})


def test_a_part_that_changed_no_bit_is_named() -> None:
    made = record()
    made["ways"]["linear layers"]["latents"] = [0.0, 0.0]
    verdicts = Comparison(made).verdicts()
    assert verdicts["linear layers"].endswith("; its result has native's bits: report() says which "
                                              "calls ran")  # fmt: skip
    assert not any("bits" in line for name, line in verdicts.items() if name != "linear layers")


def test_time_left_is_by_the_runs_that_were() -> None:
    assert trial.time_left([10.0, 12.0, 11.0], 3) == "33 s left"


# ---- pictures ------------------------------------------------------------------------------------


def picture(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (24, 32, 3)).astype(np.uint8)


def test_quality_of_pictures() -> None:
    x = picture(0)
    assert psnr(x, x) == math.inf and ssim(x, x) == pytest.approx(1)
    off = np.clip(x.astype(int) + 8, 0, 255).astype(np.uint8)
    error = np.mean((off.astype(float) - x) ** 2)
    assert psnr(x, off) == pytest.approx(10 * np.log10(255**2 / error))
    assert ssim(x, picture(1)) < 0.2 < 0.9 < ssim(x, off) < 1
    with pytest.raises(ValueError, match="must have one shape"):
        psnr(x, x[:1])


def test_a_picture_within_an_address_is_the_picture() -> None:
    image = pytest.importorskip("PIL.Image")
    x = picture(2)
    data = base64.b64decode(data_uri(x).removeprefix("data:image/png;base64,"))
    assert np.array_equal(np.asarray(image.open(io.BytesIO(data))), x)
