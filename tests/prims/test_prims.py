"""The primitives' kernels do not spill, and their expected results are consistent.

They run in tests/interpret/test_interpret_prims.py and tests/gpu/test_prims.py.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupyattn.compiler import modules as kc
from tests.interpret.ptx_cases import PTX
from tests.prims.prim import FOLDER, Prim
from tests.prims.prims_cases import PRIMS
from tests.prims.prims_mma_cases import CHUNKS, swizzle

ALL = [*PRIMS, *PTX]


def test_every_header_has_its_kernel() -> None:
    headers = {path.stem: path for path in (kc.KERNELS / "prims").rglob("*.cuh")}
    assert set(headers) == {prim.header for prim in PRIMS}
    for header, path in headers.items():
        include = f'#include "{path.relative_to(kc.KERNELS).as_posix()}"'
        assert include in (FOLDER / f"prims_{header}.cu").read_text()
    assert len({prim.name for prim in ALL}) == len(ALL)


def test_every_kernel_of_the_sources_is_run() -> None:
    entry_point = re.compile(
        # by name, or by a macro that declares one, at the start of a line
        r'^extern "C" __global__ (?:CLUSTER_OF_SPLITS |__launch_bounds__\([^)]*\) )?void (\w+)\('
        r"|^(?:MMA|APPROXIMATION)\((\w+),",
        re.MULTILINE,
    )
    declared = {
        (path.stem.removeprefix("prims_"), "".join(found))
        for path in [*FOLDER.glob("prims_*.cu"), *FOLDER.glob("ptx_*.cu")]
        for found in entry_point.findall(path.read_text())
    }
    assert declared == {(prim.header, prim.entry) for prim in ALL}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prim", "arch"),
    [
        (prim, arch)
        for prim in ALL
        for number, arch in enumerate(prim.architectures)
        if number == 0 or prim.differs_on_sm_90
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_primitives_spill_nothing(prim: Prim, arch: str) -> None:
    """That they compile to PTX, with the parameters that are given, the quick tests show.

    On sm_90 those whose PTX is another one there: whole kernels are looked through for spills on
    it by tests/kernels/test_kernels_compile.py.
    """
    binary = kc.build(prim.spec, arch)
    taken = binary.kernels[prim.entry]
    assert (taken.spill_stores, taken.spill_loads) == (0, 0)
    declared = re.search(rf"\.entry {prim.entry}\((.*?)\)", binary.ptx, re.DOTALL)
    assert declared is not None
    assert len(prim.parameters(prim.arguments())) == declared[1].count(".param")


@pytest.mark.parametrize("header", sorted({prim.header for prim in ALL}))
def test_expectations_fit_their_arguments(header: str) -> None:
    for prim in ALL:
        if prim.header == header:
            check_that_expectations_fit(prim)


def check_that_expectations_fit(prim: Prim) -> None:
    arguments = prim.arguments()
    expected = prim.expected(**arguments)
    assert expected and set(expected) <= set(arguments), prim.name
    for name, value in expected.items():
        assert value.size == arguments[name].size, prim.name
    # What was there before is not what must be written: a kernel that does nothing fails.
    with pytest.raises(AssertionError, match=re.escape(prim.name)):
        prim.check(arguments)
    prim.check({**arguments, **expected})


@pytest.mark.parametrize("chunks", CHUNKS)
def test_swizzled_rows_are_permuted_and_free_of_bank_conflicts(chunks: int) -> None:
    for row in range(16):
        indices = sorted(swizzle(chunks, row, chunk) for chunk in range(chunks))
        assert indices == list(range(row * chunks, (row + 1) * chunks))
    for chunk in range(chunks):
        for first in (0, 8):
            groups = {swizzle(chunks, row, chunk) % 8 for row in range(first, first + 8)}
            assert len(groups) == 8, f"ldmatrix on chunk {chunk} touches {np.unique(groups)}"
