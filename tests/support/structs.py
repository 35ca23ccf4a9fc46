"""Structs that kernels take, beside the records that the host packs for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.compiler import modules as kc

#: What a field of a C type is in a NumPy record.
TYPES = {"int32_t": "i4", "int64_t": "i8", "float": "f4", "Strides": "(3,)i8"}


def check_struct(
    table: np.dtype[Any], source: str, struct: str, folder: Path, **defines: int
) -> None:
    """Hold a record to a struct of kernels_cu: names, types and order, and where fields lie."""
    text = (kc.KERNELS / source).read_text()
    found = re.search(rf"struct {struct} (?:: [^{{]*)?\{{(.*?)\}};", text, re.DOTALL)
    assert found is not None, f"{source} has no struct {struct}"
    lines = [line for line in re.sub(r"//.*", "", found[1]).split(";") if line.strip()]
    own = [_field(*" ".join(line.split()).rpartition(" ")[::2]) for line in lines]
    names = table.names or ()
    assert [(name, table[name]) for name in names][-len(own) :] == own
    check_layout(table, found[0] if source.endswith(".cu") else source, struct, folder, **defines)


def _field(kind: str, name: str) -> tuple[str, np.dtype[Any]]:
    name, _, count = name.rstrip("]").partition("[")
    of_one = "u8" if kind.endswith("*") else TYPES[kind]
    return name, np.dtype(f"({count},){of_one}" if count else of_one)


def check_layout(
    table: np.dtype[Any], text: str, struct: str, folder: Path, **defines: int
) -> None:
    """Let the compiler say where the fields of a struct lie: of a header, or as it is written."""
    included = text if text.endswith(".cuh") else "prims/params.cuh"
    lines = [f'#include "{included}"', "" if text == included else text]
    lines += [f"static_assert(sizeof({struct}) == {table.itemsize});"]
    for name, (_, offset, *_) in (table.fields or {}).items():
        lines.append(f"static_assert(__INTADDR__(&(({struct}*)0)->{name}) == {offset});")
    source = folder / "layout.cu"
    source.write_text("\n".join(lines))
    kc.build(kc.ModuleSpec(source, tuple(sorted(defines.items()))), "sm_80")
