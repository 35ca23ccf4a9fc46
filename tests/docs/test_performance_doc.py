"""docs/PERFORMANCE.md agrees with its records, and every part is written from stored records."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs import performance_parts, performance_plots, write_performance
from docs.performance_claims import CLAIMS, HOLDS, IN_PART, REFUTED
from docs.performance_int8 import in_8_bits, linear_layers
from docs.performance_parts import PARTS
from docs.performance_tables import rows_of
from experiments._harness.others import FLASH_2
from experiments._harness.others8 import GIVEN, SAGE_2
from experiments._harness.others_linear import COMFY
from experiments.dit import linear
from experiments.tuning import breakdown, counters

ENVIRONMENT = {"device": {"name": "Made up", "driver": "1.2"}, "revision": "0123456789abcdef"}
PROBLEM = {
    "batch": 1, "heads": 16, "length": 4096, "head_dim": 128, "causal": False, "name": "made up",
    "distribution": "normal",
}  # fmt: skip
JUDGED = {"j2": 0.25, "j3": None, "relative_error": 3e-4}


def row(variant: str, **more: Any) -> dict[str, Any]:
    return {
        "variant": variant, "judgement": JUDGED, "seconds": 1e-3, "tflops": 500.0, "peer": False,
        "operations": 10**12, **more,
    }  # fmt: skip


def of_device(name: str) -> dict[str, Any]:
    """Return a record as the experiment keeps it after a run on a device."""
    record: dict[str, Any] = {
        "command": f"python -m experiments.{name}",
        "environment": ENVIRONMENT,
    }
    if name == "breakdown":
        rows = [
            {"left_out": list(parts), "seconds": 1e-3 * (4 - len(parts))}
            for parts in breakdown.LEFT_OUT
        ]
        found = {"problem": PROBLEM, "form": "sm90", "rows": rows}
        return record | {"problems": [found | {"parts": breakdown.parts_of(rows)}]}
    if name == "counters":
        kernel = dict.fromkeys(counters.METRICS, 8.0) | {"kernel": "attn_fa_tc"}
        counted = {"attn_fa_tc": {"passes": 100, "conflicts": 25}}
        rows = [row(counters.called(*way), interpreter=counted, device=[kernel])
                for way in counters.WAYS]  # fmt: skip
        return record | {"problems": [{"problem": PROBLEM, "rows": rows, "least_bytes": 2**26}]}
    if name == "energy":
        used = {
            "watts": 600.0, "joules_per_call": 0.5, "joules_above_idle": 0.4,
            "gflops_per_watt": 900.0, "clocks": {},
        }  # fmt: skip
        rows = [row("fa_tc", **used), row("fa_int8", **used)]
        problems = [{"problem": PROBLEM, "rows": rows}]
        return record | {"idle": {"watts": 120.0}, "window_seconds": 2.0, "problems": problems}
    if name == "long_sequences":
        bytes_of = {"pool_bytes": 2**25, "workspace_bytes": 2**24, "output_bytes": 2**24}
        rows = [row("fa_tc", **bytes_of), row("fa_int8", **bytes_of)]
        return record | {"problems": [{"problem": PROBLEM, "rows": rows}]}
    if name == "large_batches":
        names = ("fa_tc", *(f"fa_int8 {mode}" for mode in ("balanced", "aggressive")))
        rows = [row(n + more, operand_bytes=2**30) for n in names for more in ("", GIVEN)]
        return record | {"problems": [{"problem": PROBLEM, "rows": rows}]}
    if name == "dit_linear":
        one = {"frechet": [15.0, 10.0, 20.0], "frechet over 16-bit": [0.01, -0.01, 0.02]}
        return record | {"rows": [one | {"mode": m} for m in ("16-bit", *linear.MODES)]}
    if name == "scaling":
        one = {
            "axis": "", "problem": "made up", "name": "ring", "ranks": 2, "samples": [1e-3] * 3,
            "share": 0.9, "predicted_share": 0.95, "bytes_sent": 2**20,
        }  # fmt: skip
        return record | {"rows": [one, one | {"axis": "batch"}]}
    assert name == "precision_ablation"
    return record | {"problems": [{"problem": PROBLEM, "rows": [row("default")]}]}


def test_the_page_is_current() -> None:
    page = write_performance.page()
    assert page == write_performance.PAGE.read_text(encoding="utf-8"), (
        "run python -m docs.write_performance"
    )
    assert "TODO" not in page and not re.search(r"\bnan\b|\binf\b", page)
    titles = {write_performance.anchor(t) for t in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    assert titles == set(re.findall(r"\]\(#(\S+)\)$", page, re.MULTILINE))
    for name in re.findall(r"\((book_\w+)\.svg\)", page):
        for ending in performance_plots.FORMATS:
            assert (write_performance.PAGE.parent / f"{name}{ending}").is_file()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.title)
def test_a_part_is_written_from_what_its_script_keeps(part: performance_parts.Part) -> None:
    records = [write_performance.stored(name) or of_device(name) for name in part.needs]
    lines = part.write(*records)
    assert any(line.strip() for line in lines)
    widths: list[int] = []
    for line in lines:
        if line.startswith("|"):
            widths.append(line.count(" | "))
            assert len(set(widths)) == 1, line
        else:
            widths = []


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says)
def test_a_claim_is_answered(claim: Any) -> None:
    records = [write_performance.stored(name) or of_device(name) for name in claim.needs]
    said = claim.measured(*records)
    read = claim.needs or claim.source
    assert re.search(r"\d", said) if read else said.startswith("not measured: ")
    assert claim.verdict == "not measured" or read
    assert "|" not in said and not said.endswith((", ", ": "))


def test_what_is_not_measured_is_not_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_performance, "stored", lambda name: None)
    page = write_performance.page()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == [
        write_performance.CLAIMS_TITLE, "Ablation: what was tried and lost",
    ]  # fmt: skip
    assert "![" not in page


def test_the_parts_alone_follow_from_what_is_left() -> None:
    """Whole 10, copies 2; each part has its time alone, and the time that its removal saves."""
    times = {(): 10.0, breakdown.PARTS: 2.0}
    times |= {breakdown.PARTS[1:]: 6.0, breakdown.PARTS[::2]: 5.0, breakdown.PARTS[:2]: 7.0}
    times |= {(part,): 8.0 for part in breakdown.PARTS}
    found = breakdown.parts_of([{"left_out": list(p), "seconds": s} for p, s in times.items()])
    assert found["alone"] == {"scores": 0.4, "softmax": 0.3, "output": 0.5}
    assert found["copies"] == 0.2 and found["overlap"] == 1.5
    assert set(found["saved"].values()) == {0.2}


@pytest.mark.parametrize(
    "name", ["book_ladder", pytest.param("book_roofline", marks=pytest.mark.slow)]
)
def test_the_drawings_are_the_same_each_time(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    needs, _ = performance_plots.FIGURES[name]
    records = write_performance.records(needs)
    assert records is not None
    first = [file.read_bytes() for file in performance_plots.draw(name, records, tmp_path)]
    again = [file.read_bytes() for file in performance_plots.draw(name, records, tmp_path)]
    assert first == again and all(len(content) > 10_000 for content in first)


def test_the_page_says_whether_sage_attention_2_took_part() -> None:
    """It is on PyPI in version 1 alone, so that most records are without it."""
    without = {"problem": PROBLEM | {"length_kv": None}, "rows": [row("fa_tc")]}
    with_it = {**without, "rows": [row("fa_tc"), row(f"{SAGE_2}{GIVEN}")]}
    said = ["\n".join(in_8_bits({"problems": [without, one]})) for one in (without, with_it)]
    absent, compiled = f"{SAGE_2} is not among them", f"{SAGE_2} is compiled from its sources"
    assert absent in said[0] and compiled not in said[0]
    assert compiled in said[1] and absent not in said[1]


def test_layers_of_comfy_kitchen_have_columns_where_they_took_part() -> None:
    record = write_performance.stored("int8_layers")
    assert record is not None
    rows = [
        row | {"ratios": {n: x for n, x in row["ratios"].items() if not n.endswith(COMFY)}}
        for row in record["rows"]
    ]
    first, *others = rows
    first = first | {"ratios": first["ratios"] | {f"channel over {COMFY}": [1.5, 1.4, 1.6]}}
    others = [row | {"refused": {COMFY: "made up, twice"}} for row in others]
    mean = {f"channel over {COMFY}": {"geometric mean": 1.5, "least": 1.5}}
    record = {**record, "host": {"seconds": {"channel": [1.25e-5, 1e-5, 2e-5]}}}
    absent, present = (
        linear_layers({**record, "rows": some, "summary": {**record["summary"], **more}})
        for some, more in ((rows[:1], {}), ([first, *others], mean))
    )
    assert "The host's time for a call, 16 rows: channel 12.5 us." in present
    header, _, line, refused, *_ = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in present if line.startswith("|")
    )
    column = header.index(f"channel, x {COMFY}")
    assert (line[column], refused[column]) == ("1.50 [1.40, 1.60]", "-")
    assert "Missing: made up, twice." in present
    assert any(f"Over {COMFY}: channel 1.50 (1.50)" in line for line in present)
    assert f"{COMFY} took no part in this record." in absent
    assert not any(f"x {COMFY}" in line for line in absent)


def of_rows(record: dict[str, Any], key: str, **wanted: Any) -> list[float]:
    """Return the first of each value of some rows: a ratio before its interval."""
    rows = [row for row in record["rows"] if wanted.items() <= row.items()]
    return [row[key][0] if isinstance(row[key], list) else row[key] for row in rows]


def over_flash_2(record: dict[str, Any], **wanted: Any) -> list[float]:
    """Return the speed of fa_int8 over FlashAttention-2 in some problems of the ladder."""
    found = [rows_of(p) for p in record["problems"] if wanted.items() <= p["problem"].items()]
    return [rows[FLASH_2]["seconds"] / rows["fa_int8"]["seconds"] for rows in found]


def energy_gains(record: dict[str, Any]) -> list[float]:
    found = [rows_of(problem) for problem in record["problems"]]
    return [rows["fa_int8"]["gflops_per_watt"] / rows[FLASH_2]["gflops_per_watt"]
            for rows in found]  # fmt: skip


def less(record: dict[str, Any], name: str, over: str) -> float:
    return float(1 - record["peak_bytes"][name] / record["peak_bytes"][over])


def at_full(record: dict[str, Any]) -> float:
    return next(float(row["frechet"][0]) for row in record["rows"] if row["mode"] == "16-bit")


def speed_of_images(record: dict[str, Any]) -> float:
    rows = {row["mode"]: row["seconds of an image"][0] for row in record["rows"]}
    return float(rows["16-bit"] / rows["INT8, static by timestep"])


#: Of claims that are a number, the least that they promise, and the figures of the records; of
#: losses the worse end of an interval.
PROMISED: dict[str, tuple[float, Callable[..., list[float]]]] = {
    "1.7 to 2.2 times FP16 FlashAttention": (1.7, lambda ladder, _: over_flash_2(ladder)),
    "INT8 beats FlashAttention-2 by 68 %":
        (1.68, lambda r: over_flash_2(r, length=4096, head_dim=128, causal=False)),
    "32 to 40 % less memory": (0.32, lambda r: [less(r, "INT8, dynamic", "16-bit")]),
    "INT8 1.82 times as efficient as FP16 FlashAttention": (1.82, energy_gains),
    "weak scaling 99 %": (0.99, lambda r: of_rows(r, "share", axis="batch", ranks=2)),
    "both branches of guidance in one launch: 1.8 times":
        (1.8, lambda r: of_rows(r, "speed_ratio", way="guidance in one launch")),
    "a fifth of the keys pruned saves 20 to 40 %":
        (0.2, lambda r: [1 - 1 / x for x in of_rows(r, "speed_ratio", way="20% of keys pruned")]),
    "fine-tuning loses at most 0.5 %": (-0.005, lambda r: [-r["held-out loss over 16-bit"][2]]),
    "INT8 products 1.5 to 2 times":
        (1.5, lambda r: [row["ratios"]["channel over torch BF16"][0] for row in r["rows"]
                         if "ratios" in row]),
    "less than 0.5 % more FID":
        (-0.005, lambda r: [-row["frechet over 16-bit"][2] / at_full(r)
                            for row in r["rows"] if row["mode"] in linear.MODES]),
    "7 to 9 ms a step in FP16, 4 to 6 as INT8": (7 / 6, lambda r: [speed_of_images(r)]),
    "models 1.7 to 1.9 times as fast, 45 to 50 % smaller":
        (1.7, lambda r: [way["ratio"][0] for row in r["rows"]
                         for name, way in row["ways"].items() if "INT8" in name]),
    "40 to 60 % less memory, 75 at most":
        (0.4, lambda r: [row["totals"]["savings"] for row in r["rows"]
                         if row["step"] == "analyze"]),
}  # fmt: skip


@pytest.mark.parametrize("says", PROMISED)
def test_a_verdict_follows_from_the_record(says: str) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.says == says)
    least, measured = PROMISED[says]
    values = measured(*map(write_performance.stored, claim.needs))
    kept = [value >= least for value in values]
    assert values
    assert claim.verdict == (HOLDS if all(kept) else IN_PART if any(kept) else REFUTED), values
