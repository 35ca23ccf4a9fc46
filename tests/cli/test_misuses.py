"""Misuses of the command, its flags and its files: each is answered by one line and status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import cli
from cupyattn.measure.device import device_missing
from tests.checkpoints.checkpoint_files import write

SMALL = ["--heads", "1", "--len", "8", "--head-dim", "8"]
#: Arguments, and the expected line; FILE stands for names in `files`.
MISUSES: dict[str, list[tuple[str, str]]] = {
    "commands": [
        ("lader", "there is no command 'lader', did you mean ladder?"),
        ("Ladder", "did you mean ladder?"),
        ("analyse x", "did you mean analyze?"),
        ("profle fa", "did you mean profile?"),
        ("quantum", "there is no command 'quantum' (see cupyattn --help)"),
        ("--verbose", "unrecognized arguments: --verbose"),
        ("fa_tc", "there is no command 'fa_tc'"),
        ("--no-such ladder", "unrecognized arguments: --no-such"),
    ],
    "ladder": [
        ("ladder --foo", "unrecognized arguments: --foo (see cupyattn ladder --help)"),
        ("ladder --len", "argument --len: expected one argument (see cupyattn ladder --help)"),
        ("ladder --len x", "argument --len: invalid int value: 'x'"),
        ("ladder --len 1.5", "invalid int value: '1.5'"),
        ("ladder --len 0", "--len must be at least 1, got 0"),
        ("ladder --len-q 0", "--len-q must be at least 1, got 0"),
        ("ladder --len-kv -3", "--len-kv must be at least 1, got -3"),
        ("ladder --heads 0 --len 8", "--heads must be at least 1, got 0"),
        ("ladder --heads-kv 0 --len 8", "--heads-kv must be at least 1, got 0"),
        ("ladder --batch 0 --len 8", "--batch must be at least 1, got 0"),
        ("ladder --head-dim 0 --len 8", "--head-dim must be at least 1, got 0"),
        ("ladder --dtype float64", "argument --dtype: invalid choice: 'float64'"),
        ("ladder --dtype half", "invalid choice: 'half'"),
        ("ladder --distribution gauss", "invalid choice: 'gauss'"),
        ("ladder --causal-align left", "invalid choice: 'left'"),
        ("ladder --causal=yes", "ignored explicit argument 'yes'"),
        ("ladder --variants", "expected at least one argument"),
        ("ladder --variants fa fb --len 8", "variant must be one of"),
        ("ladder --scale x", "invalid float value: 'x'"),
        ("ladder --len 8 --scale nan", "--scale must be positive and finite, got"),
        ("ladder --len 8 --scale inf", "--scale must be positive and finite, got"),
        ("ladder --seed x", "invalid int value"),
        ("ladder --seed -1 --len 8", "--seed must be at least 0, got -1"),
        ("ladder --rounds x", "invalid int value"),
        ("ladder --rounds 0", "--rounds must be at least 1, got 0"),
        ("ladder --qkv", "expected one argument"),
        ("ladder --qkv missing.npz", "cupyattn: missing.npz: No such file"),
        ("ladder --qkv folder", "takes a .npz or a .safetensors file, got folder"),
        ("ladder --qkv folder.npz", "folder.npz: Is a directory"),
        ("ladder --qkv empty.npz", "empty.npz is no usable .npz file"),
        ("ladder --qkv x.npy", "takes a .npz or a .safetensors file, got x.npy"),
        ("ladder --qkv half.npz --len 8", "give no --distribution or shape too"),
        ("ladder --layer layer5 --len 8", "give no --distribution or shape too"),
        ("ladder --qkv half.npz --layer q", "leave --layer out"),
        ("ladder --qkv axes.npz", "must be (batch, heads, len, head_dim)"),
        ("ladder --qkv lengths.npz", "k and v must agree on length"),
        ("ladder --qkv wide.npz", "q and k must agree on head_dim"),
        ("ladder --qkv types.npz", "must be of one type, float16, bfloat16 or float32, got"),
        ("ladder --qkv f64.safetensors", "add --dtype float16"),
        ("ladder --len 8 --json nowhere/x.json", "--json: there is no folder 'nowhere'"),
        ("ladder --len 8 --json .", "--json: '.' is a folder, give a file in it"),
        ("ladder --len 8 --plot x", "--plot must end in .png, .svg, .pdf"),
        ("ladder --len 8 --plot x.bmp", "--plot must end in .png, .svg, .pdf"),
    ],
    "records": [
        ("compare", "the following arguments are required: A.json, B.json"),
        ("compare a.json", "the following arguments are required: B.json"),
        ("compare a.json missing.json", "missing.json"),
        ("compare a.json a.json --margin -1", "--margin must be at least 0 and below 1, got -1"),
        ("compare a.json a.json --margin 1", "--margin must be at least 0 and below 1, got 1"),
        ("compare a.json a.json --margin nan", "--margin must be at least 0"),
        ("compare a.json a.json --margin x", "invalid float value"),
        ("compare a.json half.npz", "half.npz is no JSON"),
        ("compare a.json a.json a.json", "unrecognized arguments: a.json"),
        ("compare a.json timed.json", "no timed cell in common"),
        ("compare a.json a.json --json nowhere/x.json", "nowhere"),
        ("report folder", "folder has no record"),
        ("report a.json --out nowhere/x.html", "nowhere"),
        ("report missing.json", "missing.json"),
    ],
    "plans": [
        ("plan --len 0", "--len must be at least 1, got 0"),
        ("plan --batch -1", "--batch must be at least 1, got -1"),
        ("plan --len-kv 0", "--len-kv must be at least 1, got 0"),
        ("plan --head-dim 300", "head_dim must be 1 to 256"),
        ("plan --variant fb", "variant must be one of"),
        ("plan --variant fa_tc --dtype float32", "fa_tc takes float16, bfloat16, got float32"),
        ("plan --arch hopper", "arch must be sm_80"),
        ("plan --arch sm_75", "7.5"),
        ("plan --per-host 0", "--per-host must be at least 1, got 0"),
        ("plan --partition even", "invalid choice: 'even'"),
        ("plan --json nowhere/x.json", "nowhere"),
        ("interpret", "the following arguments are required: VARIANT"),
        ("interpret fa --len 8 --trace-lines x", "invalid int value"),
        ("interpret fa --len 8 --json nowhere/x.json", "nowhere"),
        ("interpret fa --len 8 --trace nowhere/x.txt", "--trace: there is no folder 'nowhere'"),
        ("interpret fa_tc --arch sm_70 --len 8", "sm_70"),
        ("profile", "the following arguments are required: VARIANT"),
        ("profile fa --warmup x", "invalid int value"),
        ("profile fa --kernel=fa", "--kernel=fa: give the rung's name, as in cupyattn profile fa"),
        ("verify fa --dtype int8", "invalid choice: 'int8'"),
        ("verify missing.cu", "missing.cu"),
        ("ablate speed --len 8", "NAME must be one of rungs, granularity"),
        ("judge", "the following arguments are required: MODULE:NAME"),
        ("judge mine", "give MODULE:NAME or FILE.py:NAME, got 'mine'"),
        ("judge missing.py:f", "there is no file 'missing.py'"),
        ("judge no_such_module:f", "no_such_module:f as numpy cannot be imported"),
        ("judge math:pi", "math:pi is no function"),
        ("judge math:nothing", "math:nothing is no function"),
        ("judge math:hypot --library triton", "invalid choice: 'triton'"),
        ("judge math:hypot --p fp4", "p must be one of 'fp32', 'fp16', 'bf16', 'e4m3'"),
        ("interpret fa --trace-lines 5", "--trace-lines changes nothing without --trace"),
        ("interpret fa --stops 2", "--stops changes nothing without --break: leave it out"),
        ("info --json=", "--json must name a file, got ''"),
        ("plan --devices 99999999", "--devices must be at most 65536, got 99999999"),
        ("advise deep.json --tokens 9", "deep.json is no configuration of a model"),
        ("judge math:hypot --dtypes half", "invalid choice: 'half'"),
        ("judge math:hypot --json nowhere/x.json", "nowhere"),
        ("judge math:hypot --out-name nowhere/x", "--out-name: there is no folder 'nowhere'"),
        ("cache --clear --threads x", "invalid int value"),
        ("cache --warm fa_tc:hd64:int8", "int8"),
    ],
    "checkpoints": [
        ("analyze", "the following arguments are required: MODEL"),
        ("analyze missing.safetensors", "missing.safetensors"),
        ("analyze half.npz", "its name must end in .safetensors"),
        ("analyze folder", "folder holds no .safetensors files"),
        ("analyze m.safetensors --max-outliers 2", "max_outlier_ratio"),
        ("analyze m.safetensors --max-outliers 1%", "invalid float value: '1%'"),
        ("analyze m.safetensors --min-elements -1", "min_elements_for_int8"),
        ("analyze m.safetensors --block-size 64", "block_size"),
        ("analyze m.safetensors --fallback-dtype fp8", "invalid choice: 'fp8'"),
        ("analyze m.safetensors --min-sqnr nan", "min_sqnr_db"),
        ("analyze m.safetensors --output nowhere/x.json", "--output: there is no folder 'nowhere'"),
        ("convert m.safetensors", "the following arguments are required: --output"),
        ("convert m.safetensors --output a.json", "exists already: nothing is overwritten"),
        ("convert m.safetensors --output out --analysis a.json", "analysis: it has no 'kind'"),
        ("convert m.safetensors --output out --export gguf", "invalid choice: 'gguf'"),
        ("convert m.safetensors --output out --max-shard-bytes 0", "--max-shard-bytes must be"),
        ("dequantize m.safetensors --output out", "has no weights with scales"),
        ("kandinsky --model-path m.safetensors", "arguments are required: --output-path"),
        ("analyze m.safetensors --output x.svg --plot ./x.svg", "--output and --plot both name"),
        ("kandinsky --model-path= --output-path out", "model_path must be a path, got ''"),
        ("kandinsky --model-path m.safetensors --output-path out", "no transformer of Kandinsky 5"),
        ("kandinsky --model-path m.safetensors --output-path out --tokens 0", "--tokens must be"),
        ("kandinsky --model-path m.safetensors --output-path out --config-path a.json",
         "no transformer of Kandinsky 5"),
        ("kandinsky --model-path m.safetensors --output-path out --config-path missing.yaml",
         "missing.yaml"),
    ],
}  # fmt: skip
ALL = [pytest.param(*pair, id=pair[0]) for some in MISUSES.values() for pair in some]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("misuses")
    x = np.ones((1, 2, 5, 8), np.float16)
    arrays: dict[str, dict[str, Any]] = {
        "half": dict.fromkeys("qkv", x), "axes": dict.fromkeys("qkv", x[0, 0]),
        "lengths": {"q": x, "k": x, "v": x[:, :, :3]}, "wide": {"q": x, "k": x[..., :4], "v": x},
        "types": {"q": x, "k": x.astype(np.float32), "v": x},
    }  # fmt: skip
    for name, some in arrays.items():
        np.savez(folder / f"{name}.npz", **some)
    np.save(folder / "x.npy", x)
    (folder / "empty.npz").write_bytes(b"")
    for name in ("folder", "folder.npz"):
        (folder / name).mkdir()
    write(folder / "m.safetensors", {"a.weight": np.ones((8, 8), np.float32)})
    write(folder / "f64.safetensors", dict.fromkeys("qkv", x.astype(np.float64)))
    judged = {"variant": "fa", "judgement": {"j2": 0.5}}
    for name, rows in (("a", [judged]), ("timed", [{"variant": "fa", "seconds": 1.0}])):
        (folder / f"{name}.json").write_text(json.dumps({"environment": {}, "rows": rows}))
    (folder / "deep.json").write_text("[" * 99_999)
    return folder


@pytest.mark.parametrize(("arguments", "message"), ALL)
def test_a_misuse_is_answered_by_one_line(
    arguments: str, message: str, files: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(files)
    try:
        status = cli.main(arguments.split())
    except SystemExit as ended:  # of the parser
        status = int(ended.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("cupyattn") and message in line
    assert "Error" not in line and "Traceback" not in line
    assert not (files / "out").exists()


# ---- numbers -------------------------------------------------------------------------------------

#: Arguments of a command beside the tested flag.
BESIDE = {
    "ladder": "--variants fa", "ablate": "rungs", "compare": "a.json a.json",
    "verify": "fa --distribution normal --dtype float16", "profile": "fa", "interpret": "fa",
    "plan": "--devices 2", "analyze": "m.safetensors", "benchmark": "m.safetensors",
    "calibrate": "m.safetensors --output out",
    "convert": "m.safetensors --output out --dry-run", "dequantize": "m.safetensors --output out",
    "kandinsky": "--model-path m.safetensors --output-path out", "cache": "",
    "advise": "m.safetensors --tokens 4096", "trial": "mine.py:flux",
    "judge": "math:hypot", "mutate": "mine.cu true",
}  # fmt: skip
#: Numbers that would otherwise be tried, by their flags: they mean something.
MEANT = {
    "--seed": ("0",), "--warmup": ("0",), "--margin": ("0",), "--max-outliers": ("0",),
    "--min-elements": ("0",), "--min-sqnr": ("0", "-1"), "--exponential": ("0",), "--tanh": ("0",),
}  # fmt: skip
#: Flags that a message has by the name of the argument in Python.
IN_PYTHON = {
    "--min-elements": "min_elements_for_int8", "--block-size": "block_size",
    "--percentile": "percentile", "--promote": "promote must be", "--tanh": "tanh must be",
    "--exponential": "exponential must be",
    "--tiles": "--tiles describes a kernel in a .cu file",
}  # fmt: skip


def numeric_flags() -> list[tuple[str, str, int | str, str]]:
    """Command, flag, how many numbers it takes and a number that means nothing, of all there are.

    Flags of both kinds are read off the parsers, so that a new one is tried, too.
    """
    found = []
    (commands,) = (a.choices for a in cli.parser()._actions if isinstance(a.choices, dict))
    for command, parser in commands.items():
        for action in parser._actions:
            if action.type not in (int, float) or not action.option_strings:
                continue
            flag = action.option_strings[-1]
            numbers = ["0", "-1", *(["nan", "inf"] if action.type is float else [])]
            numbers = [number for number in numbers if number not in MEANT.get(flag, ())]
            count = action.nargs if isinstance(action.nargs, int) else 1
            found += [(command, flag, count, number) for number in numbers]
    return found


@pytest.mark.parametrize(("command", "flag", "count", "number"), numeric_flags())
def test_a_number_that_means_nothing_is_refused(
    command: str, flag: str, count: int, number: str, files: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(files)
    arguments = [command, *BESIDE[command].split(), flag, *[number] * count]
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cupyattn: ") and IN_PYTHON.get(flag, flag) in line, line
    assert f"got {number}" in line or flag == "--tiles"


def test_flags_with_numbers_are_many() -> None:
    tried = numeric_flags()
    assert len({(command, flag) for command, flag, *_ in tried}) > 60
    assert {command for command, *_ in tried} == BESIDE.keys()
    assert MEANT.keys() | IN_PYTHON.keys() <= {flag for _, flag, *_ in tried}


@pytest.mark.parametrize(
    "arguments", ["ladder --len 4611686018427387904", "plan --heads 4611686018427387904"]
)
def test_sizes_past_any_memory_are_one_line(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "4611686018427387904" in line and "give smaller sizes" in line


@pytest.mark.skipif(not device_missing(), reason="there is a device")
@pytest.mark.parametrize(
    "arguments",
    ["profile fa", "profile fa --energy",
     "kandinsky --model-path m.safetensors --output-path out --benchmark"],
)  # fmt: skip
def test_without_a_device_a_command_says_that_it_needs_one(
    arguments: str, files: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(files)
    assert cli.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs a CUDA device" in line


def test_the_misuses_are_many_and_different() -> None:
    pairs = [pair[0] for some in MISUSES.values() for pair in some]
    assert len(pairs) == len(set(pairs)) >= 100


# ---- outputs that are inputs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("analyze model --json model/model.safetensors", "--output"),
        ("analyze model --json model/config.json", "--output"),
        ("analyze model/model.safetensors --output link", "--output"),
        ("convert model --output new --json model/config.json", "--json"),
        ("interpret fa --qkv x.npz --trace x.npz", "--trace"),
        ("ladder --qkv x.npz --json ./x.npz", "--json"),
        ("compare a.json b.json --json a.json", "--json"),
        ("report a.json --out a.json", "--out"),
        ("trial made.py:pipe --html made.py", "--html"),
    ],
)
def test_no_output_replaces_what_the_command_reads(
    arguments: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    write(Path("model", "model.safetensors"), {"a.weight": np.ones((8, 8), np.float32)})
    for name in ("model/config.json", "x.npz", "a.json", "b.json", "made.py"):
        Path(name).write_text("{}")
    Path("link").symlink_to("model/model.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert cli.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{flag} would replace " in line and "which the command reads" in line
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
