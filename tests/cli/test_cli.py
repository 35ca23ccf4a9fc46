"""The command line: the output, files and exit status of each command, and its error messages."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn import cli
from cupyattn.cli import cache, inputs, plot, profile, verify
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.measure import device
from cupyattn.measure import rungs as measure
from cupyattn.measure.rungs import Judgement
from cupyattn.problem.attention import KernelCall
from cupyattn.problem.block_mask import BlockMask
from cupyattn.reference import attention as reference_mirror
from cupyattn.reference import exact
from cupyattn.testing.verdict import Report

SMALL = ["--heads", "2", "--len", "40", "--head-dim", "24"]
no_device = pytest.mark.skipif(not device.device_missing(), reason="there is a device")
# NOTE: pytest-timeout guards the run; nothing here asserts a time.


def status(*arguments: str) -> int:
    return cli.main(list(arguments))


# ---- ladder --------------------------------------------------------------------------------------


@pytest.fixture
def mirror_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what a ladder says whether its kernels are interpreted, too, or not."""
    monkeypatch.setattr(device, "compiler_missing", lambda: "NVRTC was not found: install it")


@no_device
def test_ladder_says_that_no_device_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("ladder", *SMALL) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("No device was found: ")
    assert "mirror" in printed and "Nothing is timed." in printed
    for name in VARIANTS:
        assert f"\n{name} " in printed
    assert "TFLOP/s" not in printed


@no_device
@pytest.mark.usefixtures("mirror_alone")
def test_ladder_takes_the_real_input_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def ladder(q: Any, k: Any, v: Any, **options: Any) -> measure.Ladder:
        seen.append(q.shape)
        return ORIGINAL(q[:, :1, :64], k[:, :1, :64], v[:, :1, :64], **options)

    ORIGINAL = measure.ladder
    monkeypatch.setattr(measure, "ladder", ladder)
    assert status("ladder") == 0
    assert seen == [(1, 12, 512, 32)]


@no_device
@pytest.mark.usefixtures("mirror_alone")
def test_ladder_writes_json_that_says_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ladder.json"
    arguments = ["--distribution", "outlier", "--dtype", "float32", "--causal", "--seed", "3"]
    assert status("ladder", *SMALL, *arguments, "--json", str(file)) == 0
    record = json.loads(file.read_text())
    (table,) = record["ladders"]
    assert table["input"] == "outlier, seed 3" and table["call"]["causal"]
    assert record["environment"]["device"] is None
    rungs = {rung["variant"]: rung for rung in table["rungs"]}
    assert list(rungs) == list(VARIANTS)
    assert rungs["fa_tc"]["judgement"] is None  # does not take float32, and says so
    assert "takes float16, bfloat16" in capsys.readouterr().out
    for name in ("fa", "fa_int8"):
        assert 0 < rungs[name]["judgement"]["j2"] <= 1
        assert rungs[name]["seconds"] is None
    assert rungs["fa"]["judgement"]["j3"] is None
    assert 0 < rungs["fa_int8"]["judgement"]["j3"] <= 1
    assert not list(tmp_path.glob(".ladder*")), "the temporary file was left"


@no_device
@pytest.mark.usefixtures("mirror_alone")
def test_ladder_fails_where_a_rung_misses_its_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = reference_mirror.run_kernel

    def broken(received: KernelCall, **options: Any) -> Any:
        o, lse, steps = mirror(received, **options)
        if received.kernel.variant.name == "fa_warps":
            o = o.copy()
            o[0, 1, 7, 3] += 0.01
        return o, lse, steps

    monkeypatch.setattr(reference_mirror, "run_kernel", broken)
    assert status("ladder", *SMALL) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    failing = [line for line in printed.splitlines() if "> 1 " in line]
    assert len(failing) == 1 and failing[0].startswith("fa_warps ")


@pytest.mark.parametrize("ending", [".png", pytest.param(".svg", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("mirror_alone")
def test_ladder_plots(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"ladder{ending}"
    assert status("ladder", *SMALL, "--plot", str(file), "--rounds", "1") == 0
    assert file.stat().st_size > 2000


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert status("ladder", *SMALL, "--plot", "x.png") == 2
    captured = capsys.readouterr()
    assert "pip install matplotlib (the extra cli has it)" in captured.err and captured.out == ""


def test_a_plot_shows_rungs_without_a_judgement_and_peers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    judged = {"j2": 0.5, "j3": None, "relative_error": 1e-3}
    rows = [
        {"variant": "fa", "judgement": judged, "tflops": 8.0, "share": 0.1},
        {"variant": "fa_tc", "judgement": None, "note": "takes float16"},
        {"variant": "another library", "judgement": judged, "tflops": 300.0, "peer": True},
    ]
    plot.draw_ladder([("title", rows)], str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").stat().st_size > 2000


# ---- inputs --------------------------------------------------------------------------------------


def save_safetensors(path: Path, arrays: dict[str, Any]) -> None:
    names = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "int8": "I8"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        kind = names[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def three(dtype: Any = np.float16, shape: tuple[int, ...] = (1, 2, 5, 8)) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name in "qkv"}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_safetensors_are_read_to_the_bit(tmp_path: Path, dtype: Any) -> None:
    arrays = three(dtype)
    save_safetensors(tmp_path / "x.safetensors", {**arrays, "codes": np.ones((4,), np.int8)})
    found = inputs.read_arrays(tmp_path / "x.safetensors")
    assert sorted(found) == ["k", "q", "v"]
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()


def test_ladder_runs_on_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = three(shape=(2, 5, 32))  # without batch
    np.savez(tmp_path / "x.npz", **{f"block3.{name}": array for name, array in arrays.items()})
    save_safetensors(tmp_path / "y.safetensors", three())
    assert status("ladder", "--qkv", str(tmp_path / "x.npz"), "--rounds", "1") == 0
    assert "x.npz, block3: batch 1, heads 2, length 5" in capsys.readouterr().out
    file = str(tmp_path / "y.safetensors")
    arguments = ["--qkv", file, "--dtype", "bfloat16", "--variants", "fa_tc", "--rounds", "1"]
    assert status("ladder", *arguments) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_the_layers_of_the_sample_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = cli.parser().parse_args(["ladder", "--layer", "layer0"])
    stored = np.load(inputs.sample_path())
    assert inputs.choose(parsed, large=False).q.tobytes() == stored["layer0_q"].tobytes()
    assert status("ladder", "--layer", "layer7") == 2
    assert "one of layer0, layer2, layer5" in capsys.readouterr().err


def test_profile_takes_a_file_or_data_of_a_shape() -> None:
    def chosen(*options: str) -> inputs.Input:
        return profile.chosen(cli.parser().parse_args(["profile", "fa", *options]))

    assert chosen(*SMALL).name.startswith("constant")
    assert chosen(*SMALL, "--random").name.startswith("normal")
    assert chosen("--layer", "layer0").name == "text encoder, layer0"
    for options in (["--layer", "layer0", "--random"], ["--random", "--distribution", "sink"]):
        with pytest.raises(ValueError, match="--random"):
            chosen(*options)


def damaged(tmp_path: Path) -> dict[str, Path]:
    whole = tmp_path / "whole.safetensors"
    save_safetensors(whole, three())
    content = whole.read_bytes()
    files = {
        "cut_data.safetensors": content[:-3],
        "cut_header.safetensors": content[:40],
        "no_header.safetensors": (5).to_bytes(8, "little") + b"hello",
        "tiny.safetensors": b"\0",
        "not.npz": b"hello",
        "other.txt": b"hello",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    save_safetensors(
        tmp_path / "int8.safetensors", {n: np.ones((1, 1, 2, 4), np.int8) for n in "qkv"}
    )
    np.savez(tmp_path / "no_v.npz", q=np.ones(3), k=np.ones(3))
    np.savez(tmp_path / "flat.npz", **{name: np.ones(3, np.float16) for name in "qkv"})
    several = {f"{p}_{n}": a for p in ("a", "b") for n, a in three().items()}
    np.savez(tmp_path / "several.npz", **several)
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut_data.safetensors", "cut short or damaged: 'v'"),
        ("cut_header.safetensors", "cut short"),
        ("no_header.safetensors", "no safetensors header"),
        ("tiny.safetensors", "cut short"),
        ("int8.safetensors", "type I8"),
        ("not.npz", "no usable .npz"),
        ("other.txt", "takes a .npz or a .safetensors"),
        ("no_v.npz", "holds no arrays q, k and v"),
        ("flat.npz", "must be (batch, heads, len, head_dim)"),
        ("several.npz", "choose --layer among a, b"),
        ("missing.npz", "No such file"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    damaged(tmp_path)
    assert status("ladder", "--qkv", str(tmp_path / name)) == 2
    captured = capsys.readouterr().err
    assert message in captured and name in captured
    assert captured.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["ladder", "--variants", "fb"],
        ["ladder", "--qkv", "x.npz", "--heads", "2"],
        ["ladder", "--heads", "4", "--heads-kv", "3", "--len", "8"],
        ["ladder", "--len", "-1"],
        ["ladder", "--head-dim", "300", "--len", "8"],
        ["ladder", *SMALL, "--scale", "-1"],
        ["ladder", *SMALL, "--rounds", "-1"],
        ["ladder", *SMALL, "--plot", "x.gif"],
        ["ladder", *SMALL, "--rounds", "1", "--json", "/nowhere/x.json"],
        ["verify", "fb"],
        ["verify", "fa_tc", "--dtype", "float32"],
        ["cache", "--warm", "fa_tc"],
        ["cache", "--warm", "fb:hd64:fp16"],
        ["cache", "--warm", "fa_tc:hd64:fp32"],
        ["cache", "--warm", "fa_tc:hd64:fp16", "--arch", "sm_7"],
        ["cache", "--threads", "0"],
        ["profile", "fb"],
        ["profile", "fa", "--runs", "0"],
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*arguments) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("cupyattn: ") and captured.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYATTN_DEBUG", "1")
    with pytest.raises(ValueError, match="variant must be one of"):
        status("verify", "fb")


# ---- verify --------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_verify_holds_a_rung_to_its_bounds(
    own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verify.json"
    assert status("verify", "fa_int8", "--distribution", "sink", "--json", str(file)) == 0
    cells = json.loads(file.read_text())["cells"]
    assert len(cells) == 3 * len(verify.SHAPES)
    assert all(cell["ok"] and 0 < cell["judgement"]["j3"] <= 1 for cell in cells)
    assert "Every cell holds its bounds." in capsys.readouterr().out


def test_verify_computes_a_reference_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["verify", "fa", "--distribution", "normal", "--dtype", "float16"]
    assert status(*arguments) == 0
    assert verify.reference_info()[0] == len(verify.SHAPES)
    monkeypatch.setattr(exact, "attention_exact", None)  # would raise if it were called
    assert status(*arguments) == 0


def test_a_damaged_reference_is_computed_again(own_cache: Path) -> None:
    x = np.ones((1, 1, 8, 16), np.float16)
    o, lse = verify.cached_exact(x, x, x, causal=True)
    (path,) = (own_cache / "reference").glob("*.npz")
    path.write_bytes(path.read_bytes()[:100])
    again = verify.cached_exact(x, x, x, causal=True)
    np.testing.assert_array_equal(again[0], o)
    np.testing.assert_array_equal(again[1], lse)
    assert path.stat().st_size > 100


def test_references_differ_by_values_options_and_rows(own_cache: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, 8, 16)).astype(np.float16)
    y = x.copy()
    y[0, 0, 0, 0] = np.nextafter(y[0, 0, 0, 0], np.float16(9))
    first, second = np.zeros((2, 2, 1100, 8), np.float32)  # so long that their text is cut short
    first[:, 2:], second[:, 3:] = 1, 1
    blocks = np.array([[[[True]]], [[[False]]]])
    options_of = (
        {}, {"causal": True}, {"scale": 0.5}, {"rows": np.array([3])}, {"rope": tuple(first)},
        {"rope": tuple(second)}, {"rope": tuple(second), "rope_offset_q": 1},
        *({"block_mask": BlockMask(one[None], 64, 64)} for one in blocks),
        {"block_mask": BlockMask(blocks[:1], 64, 128)},
    )  # fmt: skip
    for q, options in ((y, {}), *((x, one) for one in options_of)):
        o, lse = verify.cached_exact(q, x, x, **options)
        want_o, want_lse = exact.attention_exact(q, x, x, return_lse=True, **options)
        np.testing.assert_array_equal(o, want_o)
        np.testing.assert_array_equal(lse, want_lse)
    assert verify.reference_info()[0] == 1 + len(options_of)


def test_verify_fails_where_a_cell_fails(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "judge", lambda *a, **k: Judgement(1.25, None, 0.1))
    assert status("verify", "fa", "--distribution", "normal", "--dtype", "float16") == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED: fa, normal, float16") == len(verify.SHAPES)
    assert "1.25 > 1" in printed and "cupyattn docs testing explains J1" in printed


# ---- profile, info, cache ------------------------------------------------------------------------


@no_device
def test_profile_needs_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("profile", "fa_tc", "--warmup=2", "--runs=3", "--random", "--energy") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("cupyattn: profile needs a CUDA device: ")
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_the_ncu_command_keeps_to_the_range_and_takes_the_sources() -> None:
    command = profile.ncu_command(["fa_tc", "--runs=1"], "fa_tc")
    assert command[0] == "ncu" and command[-4:] == ["profile", "fa_tc", "--runs=1", "--nvtx"]
    options = dict(zip(command, command[1:], strict=False))
    assert options["--nvtx-include"] == f"{profile.NVTX_RANGE}/"
    assert options["--import-source"] == "yes"
    assert Path(options["--source-folders"]) == kc.KERNELS


@pytest.mark.parametrize(("flag", "tool"), [("ncu", "ncu"), ("sanitizer", "compute-sanitizer"),
                                           ("gdb", "cuda-gdb")])  # fmt: skip
def test_a_dry_run_prints_the_command_of_a_tool(
    flag: str, tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("profile", "fa_tc", "--runs=1", f"--{flag}", "--dry-run") == 0
    first, *others = capsys.readouterr().out.splitlines()
    words = shlex.split(first)
    assert words[0] == tool
    again = words[words.index("profile") :]
    assert again[:3] == ["profile", "fa_tc", "--runs=1"] and "--dry-run" not in again
    assert cli.parser(again).parse_args(again).variant == "fa_tc"
    exported = dict(zip(words, words[1:], strict=False)).get("--export")
    assert bool(others) == (flag == "ncu")
    assert not others or (f"--import {exported}.ncu-rep > " in others[0] and "--csv >" in others[0])


def test_a_dry_run_without_a_tool_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("profile", "fa", "--dry-run") == 2
    assert capsys.readouterr().err == (
        "cupyattn: --dry-run is for the command of a tool: give one of --ncu, --sanitizer, --gdb "
        "too\n"
    )


def test_info_names_versions_folders_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPYATTN_GROUP_SECRET", "not for a bug report")
    file = tmp_path / "info.json"
    assert status("info", "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert "CUPYATTN_GROUP_SECRET" in printed and "(set, not shown)" in printed
    assert "not for a bug report" not in printed + file.read_text()
    for word in ("cupyattn", "numpy", "nvrtc", "architectures", "device", str(kc.KERNELS)):
        assert word in printed
    assert ["CUPYATTN_CACHE_DIR", str(tmp_path)] in [line.split() for line in printed.splitlines()]
    assert json.loads(file.read_text())["numpy"] == np.__version__


def test_the_cache_is_shown_without_a_compiler(
    own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UnsupportedError("NVRTC was not found")

    monkeypatch.setattr("cupyattn.compiler.target.supported_architectures", missing)
    assert status("cache", "--clear") == 0
    assert str(own_cache) in capsys.readouterr().out


def test_cache_warms_and_clears(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kc.cache_clear(disk=False)
    warm = ["cache", "--warm", "unfused:hd8:fp16:causal:lse", "--arch", "sm_80", "--arch", "sm_90"]
    assert status(*warm) == 0
    assert "2 kernels for sm_80, sm_90: 2 compiled, 0 were there" in capsys.readouterr().out
    assert status(*warm) == 0
    assert "0 compiled, 2 were there" in capsys.readouterr().out
    verify.cached_exact(*(np.ones((1, 1, 2, 4), np.float16),) * 3)
    said = own_cache / "said.json"
    assert status("cache", "--json", str(said)) == 0
    found = json.loads(said.read_text())
    assert (found["kernels"], found["references"]) == (2, 1) and found["kernel_bytes"] > 1000
    assert status("cache", "--clear") == 0
    printed = capsys.readouterr().out
    assert "forgot 2 kernels and 1 reference\n" in printed and "\n0 kernels" in printed


def test_a_spec_names_what_the_call_compiles() -> None:
    (spec,) = cache.parse_spec("fa_tc:hd72:bf16:causal")
    defines = dict(spec.defines)
    assert (defines["CFG_HEAD_DIM"], defines["CFG_CAUSAL"], defines["CFG_LSE"]) == (72, 1, 0)
    assert defines["CFG_DTYPE"] == 1 and defines["CFG_VEC"] == 8
    sources = [str(spec.source) for spec in cache.parse_spec("fa_int8:hd64:fp16")]
    assert sources == ["prepare/quantize.cu", "attn_fa_int8.cu"]


# ---- the process ---------------------------------------------------------------------------------


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupyattn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_the_module_is_the_command_and_its_output_is_plain_when_piped() -> None:
    done = run("verify", "fa", "--distribution", "constant", "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr and done.stderr == ""


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyattn.cli import output

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert output._rich(Terminal()) is None


def test_a_reader_who_leaves_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m cupyattn info | head -n 1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
        env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_help_lists_what_is_there() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in cli.COMMANDS:
        assert re.search(rf"^    {name}\s", done.stdout, re.MULTILINE)


def test_a_command_has_its_options_and_imports_no_other() -> None:
    (commands,) = (a.choices for a in cli.parser(["info"])._actions if isinstance(a.choices, dict))
    with_options = {name for name, one in commands.items() if len(one._actions) > 1}
    assert set(commands) == set(cli.COMMANDS) and with_options <= {"info"}
    assert commands["info"].description


def test_version() -> None:
    import configparser

    configuration = configparser.ConfigParser()
    configuration.read(Path(__file__).parents[2] / "setup.cfg")
    assert run("--version").stdout == f"cupyattn {configuration['metadata']['version']}\n"


def test_reports_become_judgements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log-sum-exp that misses its bound is a miss of J2."""
    x = np.ones((1, 1, 4, 8), np.float16)
    o, lse = reference_mirror.attention_mirror(x, x, x, variant="fa", return_lse=True)
    assert measure.judge(o, x, x, x, variant="fa", lse=lse).ok
    judged = measure.judge(o, x, x, x, variant="fa", lse=lse + np.float32(0.01))
    assert judged.j2 > 1 and not judged.ok
    assert Report.__dataclass_fields__.keys() >= {"ratio", "lse_ratio", "quantisation"}
