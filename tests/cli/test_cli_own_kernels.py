"""``verify`` and ``profile`` of kernels without registration; ``interpret`` of copies of rungs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import cli, interpret
from cupyattn.cli import profile
from cupyattn.compiler import modules as compiler
from cupyattn.measure import device
from tests.support.own_kernels import renamed

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML"),
    pytest.mark.skipif(not device.device_missing(), reason="there is a device"),
]
#: One thread for each row of Q, and one head.
ROWS = """__global__ void rows(const float* q, const float* k, const float* v, float* o, int keys) {
  const int row = threadIdx.x, head_dim = 4;
  float largest = -1e30f, sum = 0, out[4] = {};
  for (int key = 0; key < keys; ++key) {
    float s = 0;
    for (int d = 0; d < head_dim; ++d) s += q[row * head_dim + d] * k[key * head_dim + d];
    s *= 0.5f;
    const float m = fmaxf(largest, s), alpha = expf(largest - m), p = expf(s - m);
    sum = sum * alpha + p;
    for (int d = 0; d < head_dim; ++d) out[d] = out[d] * alpha + p * v[key * head_dim + d];
    largest = m;
  }
  for (int d = 0; d < head_dim; ++d) o[row * head_dim + d] = out[d] / sum;
}
"""
LAUNCH = """entry = "rows"
grid = 1
block = 6
[[args]]
name = "q"
array = [1, 1, 6, 4]
dtype = "float32"
fill = "normal"
input = true
[[args]]
name = "k"
array = [1, 1, 9, 4]
dtype = "float32"
fill = "normal"
[[args]]
name = "v"
array = [1, 1, 9, 4]
dtype = "float32"
fill = "normal"
[[args]]
name = "o"
array = [1, 1, 6, 4]
dtype = "float32"
fill = "nan"
[[args]]
name = "keys"
scalar = 9
dtype = "int32"
[judge]
q = "q"
k = "k"
v = "v"
o = "o"
p = "fp32"
"""
LOSES_A_KEY = ("key < keys", "key < keys - 1")
PAST_THE_END = ("key < keys", "key < keys + 1")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the kernel and its description to the working directory, with a change in one."""
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "") -> None:
        assert old in ROWS + LAUNCH
        Path("rows.cu").write_text(ROWS.replace(old, new, 1))
        Path("rows.toml").write_text(LAUNCH.replace(old, new, 1))

    write()
    return write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out + printed.err


# ---- verify --------------------------------------------------------------------------------------


def test_every_distribution_is_judged(
    mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = run(capsys, "verify", "rows.cu", "--json", "found.json")
    assert status == 0
    assert "rows.cu: rows, q (1, 1, 6, 4), k (1, 1, 9, 4), float32, in the interpreter" in printed
    assert printed.splitlines()[-1].startswith("verify: passed, 9 distributions, largest error")
    cells = json.loads(Path("found.json").read_text())["cells"]
    assert len(cells) == 9 and all(0 <= cell["j2"] <= 1 and cell["ok"] for cell in cells)
    assert len({cell["j2"] for cell in cells}) > 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (LOSES_A_KEY, "fp32 P, fp32 sums: O is OUTSIDE its bound"),
        (PAST_THE_END, "FAILED: normal: out of bounds: an access of 4 bytes"),
    ],
    ids=["edge", "bounds"],
)
def test_a_fault_fails(
    change: tuple[str, str], says: str, mine: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    mine(*change)
    status, printed = run(capsys, "verify", "rows.cu", "--distribution", "normal")
    assert status == 1 and says in printed
    assert "verify: FAILED, 1 of 1 distribution" in printed


def test_a_seed_draws_other_numbers(
    mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("verify", "rows.cu", "--distribution", "normal", "--seed")
    first, again, other = (run(capsys, *asked, seed)[1] for seed in "112")
    assert first == again != other


@pytest.mark.parametrize(
    ("old", "new", "options", "says"),
    [
        (LAUNCH[LAUNCH.index("[judge]") :], "", (), r"rows.toml has no table \[judge\], which"),
        ('[1, 1, 9, 4]\ndtype = "float32"', '[1, 1, 9, 4]\ndtype = "float16"', (),
         "verify draws q, k and v of one type out of float16, .* got float16, float32"),
        ("array = [1, 1, 9, 4]", "array = [1, 9, 4]", (), "draws q, k and v of .batch, heads,"),
        ("", "", ("--dtype", "float16"), "--dtype is for a rung of the ladder: arrays and numbers"),
        ("", "", ("--launch", "no.toml"), "there is no no.toml, which describes the launch"),
    ],
)  # fmt: skip
def test_a_wrong_description_is_one_sentence(
    old: str, new: str, options: tuple[str, ...], says: str, mine: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    mine(old, new)
    status, printed = run(capsys, "verify", "rows.cu", *options)
    assert status == 2 and re.search(says, printed), printed


def test_a_file_without_description_must_be_a_copy_of_a_rung(
    mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.toml").unlink()
    for command in ("interpret", "verify"):
        status, printed = run(capsys, command, "rows.cu")
        assert status == 2 and "or describe its launch in rows.toml" in printed


def test_another_layout(mine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """One head of one entry lies the same way in both layouts."""
    described = re.sub(r"\[1, 1, (\d), 4\]", r"[1, \1, 1, 4]", LAUNCH)
    Path("rows.toml").write_text(described + 'layout = "BSHD"\n')
    status, printed = run(capsys, "verify", "rows.cu")
    assert status == 0, printed
    assert "verify: passed, 9 distributions" in printed


def test_words_of_codes_widen_the_bound(
    mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = []
    for words in ("", 'qk = "int8"\n', 'v_codes = "e4m3"\n', "exponential = 0.01\n"):
        Path("rows.toml").write_text(LAUNCH + words)
        status, printed = run(capsys, "verify", "rows.cu", "--distribution", "normal")
        assert status == 0, printed
        ratios.append(float(printed.split()[-1]))
    assert all(wider < ratios[0] / 2 for wider in ratios[1:]), ratios


# ---- profile -------------------------------------------------------------------------------------


def test_without_a_device_the_interpreter_counts(
    mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = run(capsys, "profile", "rows.cu", "--json", "counts.json")
    assert status == 0
    assert printed.startswith("Not timed, as CuPy ")
    assert "O is within its bound" in printed and "global load" in printed
    assert json.loads(Path("counts.json").read_text())["kernels"]
    mine(*PAST_THE_END)
    status, printed = run(capsys, "profile", "rows.cu")
    assert status == 1 and "FINDING: out of bounds" in printed


def test_a_tool_is_given_the_file(
    mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = run(capsys, "profile", "rows.cu", "--ncu", "--dry-run")
    assert status == 0 and "profile rows.cu --nvtx" in printed
    assert "cupyattn_rows.ncu-rep" in printed
    status, printed = run(capsys, "profile", "rows.cu", "--ncu")
    assert status == 2 and "cupyattn interpret rows.cu counts instructions" in printed


class Driver:
    """Stands in for CuPy on a device of compute capability 9.0: the interpreter runs the code."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.calls: list[tuple[Any, ...]] = []
        driver = SimpleNamespace(CUDADriverError=OSError)
        current = SimpleNamespace(compute_capability="90")
        self.cuda = SimpleNamespace(driver=driver, Device=lambda: current)
        self.asarray = np.array

    def RawModule(self, path: str) -> Any:
        code = Path(path).read_bytes()
        return SimpleNamespace(get_function=lambda entry: self.Kernel(self, code, entry))

    class Kernel:
        """A kernel of a module."""

        kernel = None
        max_dynamic_shared_size_bytes = 0

        def __init__(self, driver: Driver, code: bytes, entry: str) -> None:
            self.driver, self.code, self.entry = driver, code, entry

        def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int) -> None:
            self.driver.calls.append((grid, block, shared_mem))
            source: Any = self.driver.source
            if not self.code.startswith(b"\x7fELF"):
                source = self.code.rstrip(b"\0").decode()
            interpret.launch(source, self.entry, grid, block, args, shared_bytes=shared_mem)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, mine: Callable[..., None]) -> Driver:
    made = Driver(Path("rows.cu"))
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(device, "device_missing", lambda: "")
    monkeypatch.setattr(device, "clocks", dict)
    monkeypatch.setattr(device, "environment", dict)

    def times(once: Callable[[int], Any], warmup: int, runs: int, *, nvtx: bool) -> list[float]:
        for i in range(warmup + runs):
            once(i)
        return [1e-6] * runs

    monkeypatch.setattr(profile, "_times", times)
    return made


@pytest.mark.parametrize("suffix", [".cu", ".ptx"])
def test_a_device_times_what_is_within_its_bound(
    suffix: str, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    if suffix == ".ptx":
        module = compiler.ModuleSpec(Path("rows.cu").resolve())
        Path("rows.ptx").write_text(compiler.translate(module, "sm_80").ptx)
    status, printed = run(capsys, "profile", f"rows{suffix}", "--json", "times.json")
    assert status == 0, printed
    assert "O is within its bound" in printed and "run 3: 1 us" in printed
    record = json.loads(Path("times.json").read_text())
    assert record["operations"] == 4 * 6 * 9 * 4 and record["seconds"] == [1e-6] * 3
    assert driver.calls == [((1, 1, 1), (6, 1, 1), 0)] * (1 + 2 + 3)
    assert "1 us, 0.000864 TFLOP/s" in printed


def test_what_misses_its_bound_is_not_timed(
    driver: Driver, mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    mine(*LOSES_A_KEY)
    status, printed = run(capsys, "profile", "rows.cu")
    assert status == 1 and len(driver.calls) == 1
    assert "OUTSIDE" in printed and "it is not timed" in printed


def test_a_device_verifies(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, "verify", "rows.cu")
    assert status == 0 and "float32, on the device." in printed
    assert len(driver.calls) == 9 and "verify: passed, 9 distributions" in printed


def test_what_a_device_launch_cannot_do_is_one_sentence(
    driver: Driver, mine: Callable[..., None], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    mine("block = 6", "block = 6\ncluster = 2")
    assert "runs in the interpreter only: let the kernel" in run(capsys, "profile", "rows.cu")[1]
    mine('[1, 1, 9, 4]\ndtype = "float32"', '[1, 1, 9, 4]\ndtype = "float32"\nbox=[1,1,9,4]\n'
         "swizzle = 32")  # fmt: skip
    printed = run(capsys, "profile", "rows.cu")[1]
    assert "a tensor map of float32 with swizzle 32 runs in the interpreter only" in printed
    mine("block = 6", "block = 6\nshared_bytes = 65536")
    assert run(capsys, "profile", "rows.cu")[0] == 0 and driver.calls[-1][2] == 65536

    def refused(path: str) -> Any:
        raise OSError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(driver, "RawModule", refused)
    printed = run(capsys, "profile", "rows.cu")[1]
    assert "the device refuses the code of _Z4rows" in printed and "UNSUPPORTED_PTX" in printed


# ---- copies of rungs -----------------------------------------------------------------------------


def test_a_copy_of_a_rung_is_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = renamed(tmp_path)
    line = next(n for n, x in enumerate(copy.read_text().splitlines(), 1) if "S6 store" in x)
    small = ("--len", "20", "--head-dim", "8")
    status, printed = run(capsys, "interpret", copy.name, *small, "--break", f"{copy.name}:{line}")
    assert status == 2 and f"no instruction comes from {copy.name}:{line}" in printed
    nearest = re.findall(r"nearest lines with some are (\d+)", printed)[0]
    place = f"{copy.name}:{nearest}"
    status, printed = run(capsys, "interpret", copy.name, *small, "--break", place)
    assert status == 0 and f"attn_mine at {place}: block 0" in printed
    assert "J2 0." in printed and "mine (portable)" in printed
    status, printed = run(capsys, "profile", copy.name)
    assert status == 2 and f"cupyattn interpret {copy.name} counts" in printed


def test_a_stop_needs_line_information(
    mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    ptx = compiler.translate(compiler.ModuleSpec(Path("rows.cu").resolve()), "sm_80").ptx
    Path("rows.ptx").write_text(ptx)
    status, printed = run(capsys, "interpret", "rows.ptx", "--break", "rows.cu:6")
    assert status == 0 and " at rows.cu:6: block 0, warp 0, lane 0-5" in printed
    Path("rows.ptx").write_text(re.sub(r"(?m)^\s*\.(loc|file)\b.*$", "", ptx))
    status, printed = run(capsys, "interpret", "rows.ptx", "--break", "rows.cu:6")
    assert status == 2 and "has no line information, so that nothing can stop at" in printed
