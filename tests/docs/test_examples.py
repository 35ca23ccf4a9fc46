"""Every script of examples/ runs from an installed cupyattn, or names the missing library.

`make test-interop` runs those of torch, JAX and diffusers, tests/gpu that of CuPy.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupyattn.measure.device import device_missing

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: The library that a script needs, its arguments, and its last output.
SCRIPTS = {
    "numpy_script": ("numpy", (), r"gradients of shapes \(1, 4, 256, 64\)"),
    "calibrate_then_sample": (
        "numpy", ("--quick",), r"'balanced': \d.*\n(9\d|100)\.\d% of samples end at the same point"
    ),
    "calibrate_recorded": (
        "numpy", ("--quick",), r"(block [14], step .* static [1-9]\.\de-03, dynamic .*\n){6}"
    ),
    "torch_module": ("torch", (), r"qkv: INT8, linear\nout: INT8, linear\nINT8 .* 0\.\d\d% away"),
    "jax_gradient": ("jax", (), r"loss 1\.0\d+\n.*\(2, 1, 2, 128, 64\)"),
    "jax_int8_linear": ("jax", (), r"INT8 \(2, 64, 256\) is [01]\.\d\d% away.* 5\d%"),
    "diffusers_pipeline": ("diffusers", (), r"balanced(.|\n)*INT8 is 0\.\d+% away"),
}  # fmt: skip
#: Needs a device: tests/gpu/test_examples.py.
ON_DEVICE = {"cupy_script"}
#: The message of a script if a library is missing, by library.
WITHOUT = {
    ("cupy_script", "cupy"): "cupy_script.py needs a CUDA device: CuPy is not installed",
    ("torch_module", "torch"): "torch_module.py needs torch: pip install torch",
    ("jax_gradient", "jax"): "jax_gradient.py needs JAX: pip install jax",
    ("jax_int8_linear", "jax"): "jax_int8_linear.py needs JAX: pip install jax",
    ("diffusers_pipeline", "torch"): "needs torch and diffusers: pip install torch diffusers",
    ("diffusers_pipeline", "diffusers"): "needs torch and diffusers: pip install torch diffusers",
}


def installed(folder: Path) -> Path:
    """Lay out the package as a wheel does, with kernels and data inside it."""
    skipped = shutil.ignore_patterns("__pycache__")
    for source, place in (
        ("cupyattn", "cupyattn"),
        ("kernels_cu", "cupyattn/kernels_cu"),
        ("experiments/data", "cupyattn/data"),
    ):
        shutil.copytree(ROOT / source, folder / place, ignore=skipped)
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("site"))


def run(name: str, *arguments: str, site: Path = ROOT) -> str:
    """Run a script of examples/ in a separate process; return its output."""
    path = str(site)
    if site == ROOT:  # other libraries may be found by the path alone
        path = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    script = EXAMPLES / f"{name}.py"
    if site != ROOT:  # nothing of the checkout beside it
        script = Path(shutil.copy(script, site))
    done = subprocess.run(
        [sys.executable, script, *arguments], cwd=script.parent, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if library == "numpy" else pytest.mark.slow)
        for name, (library, *_) in SCRIPTS.items()
    ],
)
def test_an_example_runs_from_a_wheel(name: str, wheel: Path) -> None:
    """Where a framework has to be imported once more, among the slow ones."""
    library, arguments, printed = SCRIPTS[name]
    pytest.importorskip(library)
    found = run(name, *arguments, site=wheel)
    assert re.search(printed, found), found


@pytest.mark.parametrize("name", [name for name in SCRIPTS if SCRIPTS[name][0] != "numpy"])
def test_an_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library, arguments, printed = SCRIPTS[name]
    pytest.importorskip(library)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    found = capsys.readouterr().out
    assert re.search(printed, found), found


@pytest.mark.parametrize(("name", "library"), WITHOUT)
def test_an_example_without_its_library_ends_with_a_sentence(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = str(ended.value.code)  # which Python prints on standard error, with status 1
    assert WITHOUT[name, library] in said
    assert said.endswith(".") and "\n" not in said


@pytest.mark.skipif(not device_missing(), reason="there is a device")
@pytest.mark.parametrize("name", sorted(ON_DEVICE))
def test_an_example_without_its_device_ends_with_a_sentence(name: str) -> None:
    with pytest.raises(SystemExit, match=rf"^{name}\.py needs a CUDA device: .*\.$"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_run_with_and_without_and_says_how() -> None:
    found = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(found) == SCRIPTS.keys() | ON_DEVICE
    needing = {name for name, (library, *_) in SCRIPTS.items() if library != "numpy"}
    assert {name for name, _ in WITHOUT} == needing | ON_DEVICE
    for name, text in found.items():
        assert f"python examples/{name}.py" in text.split('"""')[1]
        assert "__file__" not in text and "import experiments" not in text
