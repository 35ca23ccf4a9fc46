"""The shape of the kernels, held by tests: headers, steps, barriers, diffs between rungs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyattn.compiler.modules import KERNELS
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.numerics import numerics
from docs import write_tutorial

ROOT = Path(__file__).parents[2]
PRIMS = sorted((KERNELS / "prims").rglob("*.cuh"))
ATTENTION = sorted(KERNELS.rglob("attn_*.cu"))
CUDA = sorted([*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")])

#: Portable kernels that go through S0 to S6 in one loop (the unfused rung has three kernels, the
#: split form two).
FUSED = [
    str(form.source)
    for variant in VARIANTS.values()
    for form in variant.forms.values()
    if variant.family != "unfused" and variant.source is None
    and not (form.takes.few_rows or form.on_hopper)
]  # fmt: skip


def names(paths: list[Path], base: Path) -> list[str]:
    return [path.relative_to(base).as_posix() for path in paths]


def header_and_body(source: str) -> tuple[str, str]:
    """Split a kernel at the end of its leading comment."""
    lines = source.splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    return "".join(lines[:end]), "".join(lines[end:])


def code(source: str) -> str:
    """Drop comments and string literals, keeping the lines."""
    source = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source, flags=re.DOTALL)
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', "", source)


def rounding_tags(text: str) -> set[str]:
    return set(re.findall(r"\bR\d+\b", text))


#: The rung and form of each kernel.
REGISTERED = {
    KERNELS / form.source: (variant, name)
    for variant in VARIANTS.values()
    if variant.source is None
    for name, form in variant.forms.items()
}


def test_every_kernel_is_registered_and_every_variant_has_its_kernels() -> None:
    assert set(ATTENTION) == set(REGISTERED)


@pytest.mark.parametrize("path", ATTENTION, ids=names(ATTENTION, KERNELS))
def test_the_entry_point_is_the_file_name(path: Path) -> None:
    entries = re.findall(
        r'extern "C" __global__(?:\s+__launch_bounds__\([^)]*\))?\s+void\s+(\w+)\(',
        path.read_text(),
    )
    assert entries, "no kernel found"
    steps = [f"{path.stem}_{step}" for step in ("scores", "softmax", "weighted_sum")]
    assert entries == (steps if path.stem == "attn_unfused" else [path.stem])


@pytest.mark.parametrize("path", ATTENTION, ids=names(ATTENTION, KERNELS))
def test_the_header_comment_is_a_lab_notebook(path: Path) -> None:
    header, _ = header_and_body(path.read_text())
    assert header.startswith(f"// {path.stem} -- "), "a one-line summary comes first"
    titles = ["Idea ", "Differs from ", "Kept simple ", "Rounding ", "Mirror ", "Bound "]
    places = [header.find(title) for title in titles]
    assert -1 not in places, f"missing {titles[places.index(-1)]!r}"
    assert places == sorted(places), "in another order"


def test_no_header_is_longer_than_a_screen() -> None:
    lengths = {path: header_and_body(path.read_text())[0].count("\n") for path in CUDA}
    assert max(lengths.values()) > 10
    assert not {path.name: count for path, count in lengths.items() if count > 20}


@pytest.mark.parametrize("path", ATTENTION, ids=names(ATTENTION, KERNELS))
def test_rounding_tags_agree_between_header_body_and_numerics(path: Path) -> None:
    header, body = header_and_body(path.read_text())
    if path.parent.name == "split":  # two kernels, one after the other
        body += (KERNELS / "merge" / "merge_splits.cu").read_text()
    variant, form = REGISTERED[path]
    # Some Hopper forms and the split one leave softcap and bias to the portable ones.
    taken = "bias" in variant.forms[form].takes.options
    changed = {"softcap": taken, "bias": taken}
    expected = set(numerics(variant.family, form, variant.dtypes[0], **changed).tags)
    rounding = header[header.index("Rounding ") : header.index("Mirror ")]
    assert rounding_tags(rounding) == expected
    comments = " ".join(re.findall(r"//[^\n]*", body))
    # R0 and R1 prepare the operands: another kernel rounds there.
    assert rounding_tags(comments) == expected - {"R0", "R1"}


@pytest.mark.parametrize("name", FUSED)
def test_steps_come_in_order(name: str) -> None:
    steps = ["locate", "load Q", "load K, V", "scores", "softmax", "output", "store"]
    found = re.findall(r"^ *// S(\d) (.*)$", (KERNELS / name).read_text(), re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(7))
    for (_, text), step in zip(found, steps, strict=True):
        assert text.startswith(step)


def test_macros_and_assembly_stay_in_their_places() -> None:
    texts = {path: code(path.read_text()) for path in CUDA}
    assert not [p for p in CUDA if p.name != "config.cuh" and "CFG_" in texts[p]]
    assert not [p for p in CUDA if p not in PRIMS and re.search(r"\basm\b", texts[p])]
    leftover = r"\bTO" + r"DO\b|\bFIX" + r"ME\b"
    assert not [p for p in CUDA if re.search(leftover, p.read_text())]


def lines_of_cuda() -> Iterator[tuple[Path, str, str]]:
    """Yield each line of each CUDA file: its file, its place to be named in a message, itself."""
    for path in CUDA:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield path, f"{path.relative_to(KERNELS)}:{number}: {line.strip()}", line


def test_every_barrier_names_its_hazard() -> None:
    barriers = [
        (place, line) for _, place, line in lines_of_cuda()
        if "__syncthreads()" in line and "__syncthreads()" in code(line)
    ]  # fmt: skip
    assert len(barriers) > 20
    assert not [place for place, line in barriers if not re.search(r";\s+// \w+", line)]


def test_every_pointer_has_a_shape() -> None:
    """Fields of the parameter structs, and pointers that a kernel declares."""
    declared = re.compile(r"\s+(?:const )?\w+\* *\w+(?:;| = )")
    pointers = [
        (place, line) for path, place, line in lines_of_cuda()
        if (path not in PRIMS or path.name == "params.cuh") and declared.match(line)
    ]  # fmt: skip
    assert len(pointers) > 20
    assert not [place for place, line in pointers if not re.search(r"// \[[^\]]+\]", line)]


def changed(left: str, right: str) -> tuple[int, int]:
    """Lines removed and added between the bodies of two kernels, blank lines not counted."""
    bodies = [
        [
            line
            for line in header_and_body((KERNELS / name).read_text())[1].splitlines()
            if line.strip()
        ]
        for name in (left, right)
    ]
    diff = list(difflib.unified_diff(*bodies, lineterm="", n=0))[2:]
    return sum(d.startswith("-") for d in diff), sum(d.startswith("+") for d in diff)


@pytest.mark.parametrize(
    ("left", "right", "limit"),
    [
        ("attn_fa.cu", "attn_fa_warps.cu", 100),
        ("attn_fa_warps.cu", "attn_fa_tc.cu", 125),  # its header says why
        ("attn_fa_tc.cu", "attn_fa_int8.cu", 91),
        ("attn_fa_int8.cu", "forms/attn_fa_int8_pv8.cu", 195),  # its header says why
        # its header says why
        ("forms/attn_fa_int8_pv8.cu", "forms/attn_fa_int8_pv8_whole.cu", 165),
        ("attn_fa_int8.cu", "forms/attn_fa_int8_v8.cu", 55),
        ("attn_fa_int8.cu", "forms/attn_fa_int8_fused.cu", 100),
    ],
)
def test_neighbouring_rungs_read_as_a_diff(left: str, right: str, limit: int) -> None:
    """A changed line is counted once: the larger of what goes and what comes."""
    removed, added = changed(left, right)
    print(f"diff {left} {right}: -{removed} +{added} lines outside the headers")
    assert max(removed, added) <= limit
    header, _ = header_and_body((KERNELS / right).read_text())
    assert f"diff {left} {right}" in header


@pytest.mark.parametrize(
    ("left", "right", "limit"),
    [
        ("unfused", "fa", 172),  # three kernels become one
        ("fa", "fa_warps", 120),
        ("fa_warps", "fa_tc", 202),  # fragments of tensor cores in place of rows
        ("fa_tc", "fa_int8", 120),
    ],
)
def test_a_rung_changes_few_lines(left: str, right: str, limit: int) -> None:
    """Lines removed and lines added, as docs/TUTORIAL.md counts and defends them."""
    counts = write_tutorial.changed(left, right)
    assert sum(sum(lines) for lines in counts.values()) <= limit
    page = write_tutorial.PAGE.read_text(encoding="utf-8")
    gone, come = (sum(lines[i] for lines in counts.values()) for i in (0, 1))
    assert f"{gone} lines removed, {come} added" in page


def test_no_lambda_is_generic() -> None:
    """NVRTC 13.0 takes one with `auto` among its parameters for a function of the host."""
    generic = re.compile(r"\[[&=\w, ]*\]\(([^()]|\([^()]*\))*\bauto\b")
    assert not [path for path in CUDA if generic.search(path.read_text())]


def test_the_cuda_files_fit_the_screen() -> None:
    long = [
        f"{path.relative_to(KERNELS)}:{number} ({len(line)})"
        for path in CUDA
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not long, f"{len(long)} lines are longer than 100 columns: " + ", ".join(long)


def test_the_page_of_the_kernels_names_each_file_once() -> None:
    page = (KERNELS / "README.md").read_text()
    linked = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \| \S", page, re.MULTILINE)
    assert sorted(target for _, target in linked) == sorted(names(CUDA, KERNELS))
    assert all(target.endswith(text) for text, target in linked)
