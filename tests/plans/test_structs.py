"""The tables of `cupyattn.plans.structs` against the structs of kernels_cu, field by field."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupyattn.compiler import modules as kc
from cupyattn.errors import KernelCompileError
from cupyattn.plans import structs


class Mirror(NamedTuple):
    """A struct that a table names, its file, and the macros that it is compiled with."""

    struct: str
    file: str
    defines: tuple[tuple[str, int], ...]


#: Text of the comment above a table.
COMMENT = re.compile(
    r"^#: ``struct (?P<struct>[\w<>]+)`` of kernels_cu/(?P<file>[\w/]+\.cuh?)"
    r"(?:, with (?P<macro>CFG_\w+)=(?P<value>\d+))?[.:].*\n(?:#: .*\n)*(?P<table>\w+) = ",
    re.MULTILINE,
)
MIRRORS = {
    m["table"]: Mirror(
        m["struct"], m["file"], ((m["macro"], int(m["value"])),) if m["macro"] else ()
    )
    for m in COMMENT.finditer(Path(structs.__file__).read_text())
}
TABLES = {name: x for name, x in vars(structs).items() if isinstance(x, np.dtype)}
#: Conditions on which structs derive from others: what the tables of these are called, by macro.
CONDITIONS = {"PREPARED": ("CFG_QK_NORM", "PREPARED"), "JOINT_ROWS": ("CFG_JOINT_ROWS", "JOINT")}
CUDA = sorted(path for path in kc.KERNELS.rglob("*") if path.suffix in (".cu", ".cuh"))
#: NumPy types of fields, by C++ type.
TYPES = {
    "int32_t": "i4", "int64_t": "i8", "float": "f4", "Strides": "(3,)i8", "ScoreStrides": "(4,)i8",
}  # fmt: skip


def code(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


def field_of(kind: str, name: str) -> tuple[str, np.dtype[Any]]:
    name, _, count = name.rstrip("]").partition("[")
    of_one = "u8" if kind.endswith("*") else TYPES[kind]
    return name, np.dtype(f"({count},){of_one}" if count else of_one)


def declared(mirror: Mirror) -> tuple[str, list[tuple[str, np.dtype[Any]]]]:
    """Return the text of a struct, and its fields in order, with the base's fields first."""
    conditions = "|".join(("true", *CONDITIONS))
    found = re.search(
        rf"struct {re.escape(mirror.struct)} (?:: (\w+)(?:<({conditions})>)? )?\{{(.*?)\}};",
        code(kc.KERNELS / mirror.file),
        re.DOTALL,
    )
    assert found is not None, f"{mirror.file} has no struct {mirror.struct}"
    base, condition, body = found.groups()
    fields = []
    if base and (condition not in CONDITIONS or mirror.defines):
        struct = f"{base}<true>" if condition else base
        (of_base,) = (other for other in MIRRORS.values() if other.struct == struct)
        fields += declared(of_base)[1]
    for line in body.split(";"):
        kind, _, names = " ".join(line.split()).replace(", ", ",").rpartition(" ")
        fields += [field_of(kind, name) for name in names.split(",") if name]
    return found[0], fields


def headers_of(mirror: Mirror) -> list[str]:
    """Return the headers that declare a struct, or what the text of a kernel's struct names."""
    if mirror.file.endswith(".cuh"):
        return [mirror.file]
    named = re.findall(r": (\w+)<", declared(mirror)[0])
    structs = {f"{name}<true>" for name in named}
    bases = {other.file for other in MIRRORS.values() if other.struct in structs}
    return ["prims/params.cuh", *sorted(one for one in bases if one.endswith(".cuh"))]


def in_kernel(mirror: Mirror) -> str:
    """Return the text of a struct of a kernel's file, with the structs that precede it."""
    text, own = code(kc.KERNELS / mirror.file), declared(mirror)[0]
    return text[text.index("struct ") : text.index(own) + len(own)]


def check_layout(table: np.dtype[Any], mirror: Mirror, folder: Path) -> None:
    """Let the compiler say where the fields of a struct lie, and how large they are."""
    struct = mirror.struct
    headers = headers_of(mirror)
    lines = [f'#include "{header}"' for header in headers]
    lines += [] if mirror.file in headers else [in_kernel(mirror)]
    lines += [f"static_assert(sizeof({struct}) == {table.itemsize});"]
    for name, (kind, offset, *_) in (table.fields or {}).items():
        # offsetof of the compiler's front end: NVRTC brings no <cstddef>
        lines.append(f"static_assert(__INTADDR__(&(({struct}*)0)->{name}) == {offset});")
        lines.append(f"static_assert(sizeof({struct}::{name}) == {kind.itemsize});")
    source = folder / "layout.cu"
    source.write_text("\n".join(lines))
    kc.build(kc.ModuleSpec(source, mirror.defines), "sm_80")


def test_every_table_names_its_struct() -> None:
    assert set(MIRRORS) == set(TABLES)
    for name, mirror in MIRRORS.items():
        words = re.findall(r"[A-Z][a-z]+", mirror.struct)
        of_macro = dict(CONDITIONS.values())
        assert name == "_".join([*(of_macro[n] for n, _ in mirror.defines), *words]).upper()


def test_every_struct_has_its_table() -> None:
    """One that derives from another on a condition has two: with its fields, and without."""
    expected: Counter[tuple[str, str]] = Counter()
    for path in CUDA:
        file = path.relative_to(kc.KERNELS).as_posix()
        heads = re.findall(r"struct (\w+Params(?:<\w+>)?)( : [\w<>]+)? \{(?!\})", code(path))
        for struct, base in heads:
            expected[struct, file] = 1 + any(f"<{one}>" in base for one in CONDITIONS)
    assert Counter((mirror.struct, mirror.file) for mirror in MIRRORS.values()) == expected


def test_kernels_take_structs_that_have_tables() -> None:
    taken = {name for path in CUDA for name in re.findall(r"__grid_constant__ (\w+)", code(path))}
    structs = {mirror.struct.removesuffix("<true>") for mirror in MIRRORS.values()}
    assert taken - {"TensorMap"} <= structs


@pytest.mark.parametrize("name", MIRRORS)
def test_the_table_is_the_struct_field_by_field(name: str, tmp_path: Path) -> None:
    table, mirror = TABLES[name], MIRRORS[name]
    assert [(field, table[field]) for field in table.names or ()] == declared(mirror)[1]
    check_layout(table, mirror, tmp_path)


@pytest.mark.parametrize(("struct", "fields"), [
    ("Strides", ("batch", "head", "len")),
    ("ScoreStrides", ("batch", "head", "row", "key")),
])  # fmt: skip
def test_strides_are_64_bit_numbers(struct: str, fields: tuple[str, ...], tmp_path: Path) -> None:
    mirror = Mirror(struct, "prims/params.cuh", ())
    expected = [(name, np.dtype("i8")) for name in fields]
    assert declared(mirror)[1] == expected
    check_layout(np.dtype(expected, align=True), mirror, tmp_path)


@pytest.mark.parametrize("fields", [
    [("O", "u8"), ("whole", "i4"), ("rows", "u8"), ("cut", "i4"), ("steps", "i4"), ("share", "i4")],
    [("O", "u8"), ("rows", "u8"), ("whole", "i4"), ("cut", "i4"), ("steps", "i4"), ("share", "i2")],
], ids=["elsewhere", "narrower"])  # fmt: skip
def test_the_compiler_refuses_another_layout(fields: list[Any], tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError):
        check_layout(np.dtype(fields, align=True), MIRRORS["PIECE_PARAMS"], tmp_path)
