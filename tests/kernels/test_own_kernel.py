"""A kernel in a user's own file: `ladder` and ``cupyattn verify`` run it without a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyattn import Tiles, Variant, cli, ladder, register
from cupyattn.cli import own_kernel, verify
from cupyattn.errors import KernelCompileError
from cupyattn.kernels import ladder as kernels
from cupyattn.measure import device
from cupyattn.measure.rungs import NOT_RUN
from tests.faults.fault_patches import FAULTS, Fault
from tests.support.marks import slow_unless
from tests.support.own_kernels import renamed

pytestmark = pytest.mark.skipif(not device.device_missing(), reason="there is a device")

NORMAL = ("--distribution", "normal", "--dtype", "float16", "--dtypes", "float16")
PLANTED = [f for f in FAULTS if "fa" in f.variants and not (f.shown_by or f.of_packed)]


def of_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "VARIANTS", dict(kernels.VARIANTS))
    tiles = {256: Tiles(16, 16, 4)}
    register(Variant("mine", "an idea", "float32", tiles, dtypes=("float16",)), source=path)


def inputs() -> tuple[np.ndarray, ...]:
    return tuple(np.random.default_rng(0).standard_normal((3, 1, 2, 40, 24)).astype(np.float16))


def test_a_copy_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(renamed(tmp_path)), *NORMAL]) == 0
    printed = capsys.readouterr().out
    assert "Assumed: entry point attn_mine; family float32" in printed
    assert "compiles for sm_80" in printed and "in the interpreter" in printed
    assert "holds" in printed and "mine" not in kernels.VARIANTS


def test_there_are_faults_to_plant() -> None:
    assert len(PLANTED) >= 3


@pytest.mark.parametrize(
    "fault", slow_unless(lambda number, _: not number, PLANTED), ids=lambda fault: fault.name
)
def test_a_broken_copy_fails(
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`test_a_copy_passes` checks that a file is compiled for every architecture first."""
    monkeypatch.setattr(own_kernel, "compile_everywhere", lambda variant: ["sm_80"])
    copy = fault.plant(tmp_path)
    assert cli.main(["verify", str(renamed(copy, kernels=copy)), *NORMAL]) == 1
    assert "FAILED: mine, normal, float16" in capsys.readouterr().out


def test_what_is_not_a_kernel_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.cu"
    for text, option, message in (
        ("int x;", (), "has none: give --name NAME"),
        ('// extern "C" __global__ void attn_a(int)', (), "has none: give --name NAME"),
        ("this is not C++", ("--name", "mine"), "error: "),
        (renamed(tmp_path).read_text().replace("attn_mine(", "attn_fa("), (), "another name"),
    ):
        path.write_text(text)
        assert cli.main(["verify", str(path), *option]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
    assert cli.main(["verify", str(tmp_path / "none.cu")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_options_of_a_file_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "fa", "--name", "mine"]) == 2
    assert "--name describes a kernel in a .cu file" in capsys.readouterr().err


def test_without_nvrtc_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "compiler_missing", lambda: "there is no NVRTC")
    path = renamed(tmp_path)
    assert cli.main(["verify", str(path)]) == 2
    assert "was not compiled or run: there is no NVRTC" in capsys.readouterr().err
    of_file(path, monkeypatch)
    table = ladder(*inputs(), variants=["fa", "mine"])
    fa, mine = table.rungs
    assert fa.ran == "mirror" and fa.judgement is not None
    assert mine.judgement is None and mine.note == f"{NOT_RUN}there is no NVRTC"
    assert not table.ok and "-" in table.cells[1]


def test_the_ladder_runs_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = renamed(tmp_path)
    stored = "* smem.alpha[row]);  // R7"
    path.write_text(path.read_text().replace(stored, f"* 2 {stored}"))
    of_file(path, monkeypatch)
    table = ladder(*inputs(), variants=["fa", "mine"])
    assert [rung.ran for rung in table.rungs] == ["mirror", "interpreter"]
    assert table.rungs[0].judgement.j2 <= 1 < table.rungs[1].judgement.j2 and not table.ok
    assert len(table.header) == len(table.cells[0]) == len(table.cells[1])


def test_the_ladder_refuses_a_source_that_is_no_longer_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = renamed(tmp_path)
    of_file(path, monkeypatch)
    path.write_text("this is not C++")
    with pytest.raises(KernelCompileError, match=r"attn_mine\.cu\(1\): error: "):
        ladder(*inputs(), variants=["fa", "mine"])


def test_a_registered_rung_among_others_is_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror reads no source, so that it would hold nothing of such a kernel to anything."""
    of_file(renamed(tmp_path), monkeypatch)
    where = {name: verify._backend(rung, "no driver") for name, rung in kernels.VARIANTS.items()}
    assert where.pop("mine") == "interpret" and set(where.values()) == {"mirror"}
    assert verify._shapes(kernels.VARIANTS["mine"], "interpret") == verify.SMALL_SHAPES
