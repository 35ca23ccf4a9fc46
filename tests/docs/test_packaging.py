"""Wheel and sdist carry what the checkout has, and work where only the core's dependencies are."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path.relative_to(ROOT / "kernels_cu").as_posix()
    for path in (ROOT / "kernels_cu").rglob("*")
    if path.suffix in (".cu", ".cuh")
)
#: Packages whose folders lie elsewhere in the checkout (``package_dir`` in setup.cfg).
MAPPED = {
    "cupyattn.kernels_cu": "kernels_cu",
    "cupyattn.data": "experiments/data",
    "cupyattn.docs": "docs",
    "cupyattn.docs.your_kernel": "examples/your_kernel",
}


def configuration() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the checkout on its path; its output is the failure message."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_setup_cfg_lists_every_package() -> None:
    listed = set(configuration()["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "cupyattn").rglob("__init__.py")
    }
    assert listed == found | set(MAPPED), "add the sub-package to [options] packages in setup.cfg"


def test_the_mapped_folders_hold_what_the_package_data_names() -> None:
    assert any(name.startswith("prims/") for name in SOURCES)
    assert any(not name.startswith(("prims/", "sm90/")) for name in SOURCES)
    assert list((ROOT / "experiments" / "data").glob("*.npz"))


@pytest.mark.parametrize(
    "module", ["cupyattn", "cupyattn.compiler.modules", "cupyattn.kernels.ladder"]
)
def test_importing_needs_no_extra(module: str) -> None:
    """No GPU's part and no tool's part is imported before it is asked for."""
    extras = ("cupy", "torch", "jax", "matplotlib", "rich", "hypothesis", "pytest")
    script = f"import sys, {module}; print([m for m in {extras} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_holds_kernels_and_data_inside_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packed = sorted(
        name.removeprefix("cupyattn/kernels_cu/")
        for name in names
        if name.startswith("cupyattn/kernels_cu/")
    )
    assert packed == SOURCES
    data = {path.name for path in (ROOT / "experiments" / "data").iterdir() if path.is_file()}
    assert {name.rpartition("/")[2] for name in names if name.startswith("cupyattn/data/")} == data
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"API.md"}
    example = {f"your_kernel/{x.name}" for x in (ROOT / "examples" / "your_kernel").glob("*.*")}
    place = "cupyattn/docs/"
    assert {n.removeprefix(place) for n in names if n.startswith(place)} == pages | example
    for table in ("measure/whole_gains.json", "diffusion/advice_rates.json"):
        assert f"cupyattn/{table}" in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"cupyattn", f"{wheel.name.split('-py3')[0]}.dist-info"}, "stray top levels"
    entry_points = zipfile.ZipFile(wheel).read(
        next(name for name in names if name.endswith("entry_points.txt"))
    )
    assert b"cupyattn = cupyattn.cli:main" in entry_points
    assert b"[pytest11]\ncupyattn.testing.plugin = cupyattn.testing.plugin" in entry_points


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sdist_holds_sources_and_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"kernels_cu/{name}" for name in SOURCES} <= names
    assert {"setup.cfg", "pyproject.toml", "LICENSE", "Makefile", "tests/conftest.py"} <= names
    tracked = subprocess.run(
        ["git", "ls-files", "*.md", "*.cff", "Dockerfile*", ".ci", "docs/*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert set(tracked.stdout.split()) <= names, "name it in MANIFEST.in"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the core's dependencies and nothing else."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, with_pip=True)
    needed = configuration()["options"]["install_requires"].split()
    assert {name.partition(">")[0] for name in needed} == {"numpy", "scipy", "ml_dtypes"}
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *needed, cwd=folder)
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def test_it_works_in_an_empty_environment(
    built: Path, core: Path, tmp_path: Path, kind: str
) -> None:
    (archive,) = built.glob(kind)
    run(core, "-m", "pip", "install", "--quiet", "--no-deps", archive, cwd=tmp_path)
    try:
        seen = run(core, ROOT / "tests" / "docs" / "wheel_trial.py", *SOURCES, cwd=tmp_path)
        for name in ("numpy_script.py", "calibrate_recorded.py"):
            script = shutil.copy(ROOT / "examples" / name, tmp_path)
            seen += run(core, script, *["--quick"] * (name != "numpy_script.py"), cwd=tmp_path)
        command = core.with_name("cupyattn")
        seen += run(command, "docs", "tutorial", cwd=tmp_path)
        run(command, "docs", "your_kernel", "--example", "mine", cwd=tmp_path)
        assert (tmp_path / "mine" / "attention.toml").is_file()
    finally:
        run(core, "-m", "pip", "uninstall", "--quiet", "--yes", "cupyattn", cwd=tmp_path)
    print(seen)
    assert "ok: mirror within bound" in seen and "# The ladder, rung by rung" in seen
    assert "gradients of shapes" in seen and seen.count("relative error with scales") == 6
