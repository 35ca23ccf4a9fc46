"""Code of the plan that this library began as runs, or names its successor in one line.

`founding_blocks.md` has the blocks as they stand. Typed here, only their imports change, and
``...``, which stands there for the arguments of the first block, is filled in; without a device
tensors stay on the CPU and are smaller.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.checkpoints.roles import PRECISE_ROLES, role_of
from cupyattn.lazy_face import RENAMED
from cupyattn.measure.device import device_missing
from docs import founding_names, write_founding, write_performance
from docs.founding_claims import PROMISES
from docs.founding_names import ENDS, NO_CODE, SUCCESSOR, TYPED
from docs.performance_claims import REFUTED
from tests.checkpoints.checkpoint_files import write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "FOUNDING_NOTES.md"
BLOCKS = {
    title: (language, body)
    for title, language, body in re.findall(
        r"^## ([^\n]*)\n\n```(\w+)\n(.*?)^```$",
        Path(__file__).with_name("founding_blocks.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
}
#: Modules of the plan, and where what they were to hold is.
IMPORTS = {
    "kernels.attention_int8 import Int8Attention": "cupyattn.interop.torch import Int8Attention",
    "attention_int8_pytorch import Int8Attention": "cupyattn.interop.torch import Int8Attention",
    "kernels.attention_int8 import replace": "cupyattn.interop.diffusers import replace",
    "attention_int8_pytorch import replace": "cupyattn.interop.diffusers import replace",
    "kandinsky_int8_optimizer import": "cupyattn import",
    "triton_int8_converter import": "cupyattn import",
}
#: Imports of blocks that the plan gives none for.
OWN = {
    "torch: factors of timesteps": (
        "from cupyattn import compute_adaptive_scales, compute_sigma_schedule"
    ),
    "torch: 16 bits for critical steps": "from cupyattn import attention_fp16, attention_int8",
    "precision by step": "from cupyattn import int8_attention, int8_attention_hq",
    "configuration": "from cupyattn import TritonInt8Config",
}
#: Sizes and places that become smaller and nearer where there is no device.
ON_A_CPU = {
    ".cuda()": "", "device='cuda'": "device='cpu'", '.to("cuda")': '.to("cpu")',
    "16, 32, 4096, 128": "1, 2, 130, 64", "16, 32, 128": "1, 2, 64", "num_heads=32": "num_heads=2",
    "head_dim=128": "head_dim=64", "Attention(32, 128": "Attention(2, 64",
    "[512, 1024, 2048, 4096, 8192]": "[130]", "= 512, 128, 32": "= 16, 8, 2",
    "ProfilerActivity.CUDA": "ProfilerActivity.CPU", "cuda_time_total": "cpu_time_total",
}  # fmt: skip
PYTHON = [t for t, (language, _) in BLOCKS.items() if language == "python" and t not in NO_CODE]


def typed(title: str) -> str:
    """A block with its imports changed and its dots filled in."""
    text = f"{OWN.get(title, '')}\n{BLOCKS[title][1]}"
    for old, new in IMPORTS.items():
        text = text.replace(f"from {old}", f"from {new}")
    filled = "Int8Attention(num_heads=32, head_dim=128,"
    text = re.sub(r"Int8Attention\(\s*\.\.\.,", filled, text)
    text = text.replace("randn(...,", "randn(16, 32, 4096, 128, dtype=torch.float16,")
    if device_missing():
        for old, new in ON_A_CPU.items():
            text = text.replace(old, new)
    return text


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop printed text, and warnings of options without effect, which tests/diffusion checks."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def before(title: str) -> dict[str, Any]:
    """The names defined by earlier blocks, here by the first."""
    names: dict[str, Any] = {"np": np}
    if title not in ("call", "torch: call"):
        with quiet():
            exec(typed("call"), names)
        names |= dict.fromkeys(("Q_cond", "Q_uncond"), names["Q"]) | {"timestep": 500}
    return names


def small_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pipeline that the plan downloads be a small one with random weights."""
    diffusers = pytest.importorskip("diffusers")
    case = importlib.import_module("tests.interop.diffusers_cases").CASES["sd15"]

    class Small(diffusers.StableDiffusionPipeline):  # type: ignore[name-defined,misc]
        def __call__(self, prompt: str, num_inference_steps: int = 2) -> Any:
            given = case.call() | {"num_inference_steps": 2, "output_type": "latent"}
            return super().__call__(**given)

    def from_pretrained(name: str) -> Any:
        pipe = case.make()
        pipe.set_progress_bar_config(disable=True)
        pipe.__class__ = Small
        return pipe

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "from_pretrained", from_pretrained)


@pytest.mark.frameworks
@pytest.mark.parametrize("title", PYTHON)
def test_a_block_runs_or_names_its_successor(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if title.endswith("pipeline") and "Kandinsky" not in title:
        small_pipeline(monkeypatch)
    names, code = before(title), compile(typed(title), title, "exec")
    ended = "ran"
    with quiet():
        try:
            exec(code, names)
        except Exception as error:  # noqa: BLE001  whatever it is, it has to be the one above
            ended = f"{type(error).__name__}: {error}"
    assert "\n" not in ended.strip()
    assert re.match(ENDS[title][0] if title in ENDS else "ran$", ended), ended
    if "pipe" in names:
        assert names["pipe"].report().modes  # INT8 ran, and not native attention alone


def test_what_is_no_code_names_nothing_of_ours() -> None:
    for title in NO_CODE:
        assert not re.search(r"Int8Attention|Triton\w+\(", BLOCKS[title][1])
    assert ENDS.keys() <= set(PYTHON)


#: Packages where people try such names, and what they need.
PACKAGES = {
    "cupyattn": None, "cupyattn.bounds": None, "cupyattn.checkpoints": None,
    "cupyattn.diffusion": None, "cupyattn.distributed": None, "cupyattn.gradients": None,
    "cupyattn.interpret": None, "cupyattn.quant": None, "cupyattn.reference": None,
    "cupyattn.testing": None, "cupyattn.interop": None, "cupyattn.interop.torch": "torch",
    "cupyattn.interop.diffusers": "diffusers",
}  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.parametrize("place", PACKAGES)
def test_every_package_answers_for_names_of_the_plan(place: str) -> None:
    if PACKAGES[place] is not None:
        pytest.importorskip(PACKAGES[place])
    package = importlib.import_module(place)
    for name in RENAMED:
        if name in getattr(package, "__all__", ()):
            continue
        sentence = f"^{name} is not in {re.escape(place)}: use (cupyattn|torchmetrics)"
        with pytest.raises(AttributeError, match=sentence) as asked:
            getattr(package, name)
        assert isinstance(asked.value, ca.UnsupportedError)
        assert not hasattr(package, name) and getattr(package, name, 3) == 3
        with pytest.raises(ImportError, match=sentence) as imported:
            exec(f"from {place} import {name}", {})
        assert isinstance(imported.value, ca.UnsupportedError)
        assert name not in dir(package)


def test_names_of_the_core_are_pointed_to_from_other_packages() -> None:
    sentence = "^quantize_kv is not in cupyattn.diffusion: use cupyattn.quantize_kv$"
    with pytest.raises(ImportError, match=sentence):
        exec("from cupyattn.diffusion import quantize_kv", {})
    exec("from cupyattn.reference import quantize", names := {})  # a module of that name
    assert names["quantize"].__name__ == "cupyattn.reference.quantize"
    for name in ("nothing", "__wrapped__"):
        assert not hasattr(ca, name)
    with pytest.raises(ImportError, match="^cannot import name 'nothing'"):
        exec("from cupyattn import nothing", {})


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_successors_are_there_and_on_the_page(name: str) -> None:
    assert name in PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"cupyattn\.(?!interop)([\w.]*\w)", RENAMED[name]):
        found: Any = ca
        for part in path.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_int8_attention_without_its_sizes_says_what_to_give() -> None:
    for given, missing in (((), "num_heads and head_dim"), ((4,), "head_dim")):
        with pytest.raises(TypeError, match=rf"^Int8Attention needs {missing}, .*: give Int8Att"):
            ca.Int8Attention(*given, block_q=64)
    with pytest.raises(TypeError, match=r"^Int8Attention needs num_heads, which"):
        ca.Int8Attention(head_dim=64)
    assert ca.Int8Attention(head_dim=64, num_heads=2).head_dim == 64


@pytest.mark.parametrize("name", ["precision_mode", "v_precision"])
def test_keywords_of_the_plan_name_their_successor(name: str) -> None:
    q = np.ones((1, 1, 4, 8), np.float16)
    layer = ca.Int8Attention(1, 8)
    for call in (
        lambda **k: ca.attention(q, q, q, **k), lambda **k: ca.explain(q, q, q, **k),
        lambda **k: ca.plan(q, q, q, **k), lambda **k: ca.Int8Attention(1, 8, **k),
        lambda **k: layer(q, q, q, 3, **k), lambda **k: layer.fused_cfg(q, q, q, q, 3, **k),
    ):  # fmt: skip
        with pytest.raises(ca.UnsupportedError, match=f"^{name} is not supported: .*mode"):
            call(**{name: "fp16"})


# ---- commands ------------------------------------------------------------------------------------

SCRIPTS = {
    "python analyze_weights_enhanced.py": "cupyattn analyze",
    "python triton_int8_converter.py": "cupyattn convert",
    "python optimize_kandinsky.py": "cupyattn kandinsky",
    "./bin/profile_": "cupyattn profile ",
}


def commands(title: str, **places: str) -> list[list[str]]:
    """The words of the commands of a block, ours in place of the plan's scripts."""
    text = BLOCKS[title][1].replace("\\\n", " ")
    for old, new in SCRIPTS.items():
        text = text.replace(old, new)
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [[places.get(word, word) for word in words] for words in lines if words]


def test_the_commands_for_checkpoints_run_with_their_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    weights = {"a.fc1.weight": rng.standard_normal((128, 256)).astype(np.float32)}
    model = write(tmp_path / "x.safetensors", weights)
    places = {"/path/to/model": str(model), "/path/to/output": str(tmp_path / "int8")}
    for _, *words in commands("commands: analyse and convert", **places):
        assert cli.main(words) == 0
    assert list((tmp_path / "int8").glob("*.safetensors"))
    flags = commands("commands: flags")
    assert len(flags) == 4
    for words in flags:
        assert cli.main(["analyze", str(model), *words]) == 0
    (kandinsky,) = commands("commands: Kandinsky")
    assert cli.main(kandinsky[1:]) == 2  # there is no such model, and no device
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not device_missing(), reason="there is a device")
@pytest.mark.parametrize(
    "title",
    ["commands: profile", "commands: Nsight Compute", "commands: cycles", "commands: sanitizer",
     "commands: debugger"],
)
def test_the_commands_for_profiling_say_what_they_need(
    title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = commands(title)[0]
    tool = words[: words.index("cupyattn")]
    words = words[words.index("cupyattn") + 1 :]
    words = words[: words.index("2>&1")] if "2>&1" in words else words
    assert cli.main(words) == 2
    assert "profile needs a CUDA device" in (said := capsys.readouterr().err)
    assert f"cupyattn interpret {words[1]} counts" in said
    # The tool's own command, of ours, needs no device.
    flag = {"compute-sanitizer": "--sanitizer", "cuda-gdb": "--gdb"}.get("".join(tool), "--ncu")
    assert cli.main([*words, flag, "--dry-run"]) == 0
    program, *rest = shlex.split(capsys.readouterr().out.splitlines()[0])
    assert program == (tool[0] if tool else "ncu")
    assert rest[rest.index("profile") :][: len(words)] == words


def test_a_flag_that_is_gone_names_its_successor(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands("commands: report")
    with pytest.raises(SystemExit):
        cli.main(words[words.index("cupyattn") + 1 :])
    assert "--kernel=fa --warmup" not in (said := capsys.readouterr().err)
    assert "--kernel=fa: give the rung's name" in said and said.count("\n") == 1


@pytest.mark.parametrize("title", ["commands: build in place", "commands: build and install"])
def test_the_command_to_build_in_place_names_its_successor(title: str) -> None:
    (words,) = [words for words in commands(title) if "build_ext" in words]
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "there is no extension to build" in done.stderr and "pip install -e" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_command_to_build_says_that_there_is_nothing_to_build() -> None:
    words = BLOCKS["commands: build"][1].replace("<kernel_name>", "fa_int8").replace("XX", "80")
    *_, build = words.strip().split(" && ")
    command = [*shlex.split(build), f"PYTHON={sys.executable}", "NO_VENV=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "KERNEL=fa_int8 builds nothing" in done.stderr and "cupyattn profile" in done.stderr


def test_the_page_has_every_name_command_and_flag_of_the_plan() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in ("precision_mode", "v_precision", *SCRIPTS, "KERNEL=", "NVCC_ARCH="):
        assert name.removeprefix("python ") in page, name
    every = "".join(body for language, body in BLOCKS.values() if language == "bash")
    flags = set(re.findall(r"(--[a-z][a-z-]+)", every))
    assert len(flags) > 12
    for flag in flags:
        assert flag in page, flag
    for path in re.findall(r"`cupyattn\.(?!interop)([\w.]+)`", page):
        found: Any = ca
        for part in path.split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("marks", write_founding.tables(), ids=lambda marks: marks[0].split()[1])
def test_the_tables_of_the_page_are_those_of_the_code(marks: tuple[str, str]) -> None:
    inside = PAGE.read_text(encoding="utf-8").partition(marks[0])[2].partition(marks[1])[0]
    table = write_founding.tables()[marks]
    assert inside == f"\n{table}\n", "run python -m docs.write_founding"


def names_of_the_plan() -> set[str]:
    """Modules, functions, classes and arguments that code of the plan takes for its own."""
    found: set[str] = set()
    calls = r"Int8Attention|attention|TritonInt8Config|get_T2V_pipeline|fused_cfg|optimizer"
    for title in PYTHON:
        for node in ast.walk(ast.parse(BLOCKS[title][1])):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom) and re.match(
                r"kernels|attention|triton|kandinsky", node.module or ""
            ):
                found |= {str(node.module), *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Call) and re.search(f"({calls})$", ast.unparse(node.func)):
                found |= {str(key.arg) for key in node.keywords}
    return found - {"forward", "__init__", "dtype", "bias"}


def test_the_page_has_every_name_of_code_of_the_plan() -> None:
    names, page = names_of_the_plan(), PAGE.read_text(encoding="utf-8")
    assert len(names) > 30 and {"get_T2V_pipeline", "eval_images", "softmax_eps"} <= names
    assert not [name for name in names if not re.search(rf"\b{name}\b", page)]


def test_every_verdict_is_one_that_the_page_explains() -> None:
    rows = (*founding_names.MODULES, *founding_names.NAMES, *founding_names.COMMANDS)
    assert {row.verdict for row in rows} == {TYPED, SUCCESSOR}
    for row in founding_names.NAMES:
        renamed = [name for name in re.findall(r"`(\w+)", row.notes) if name in RENAMED]
        typed = row.verdict == TYPED
        assert not typed or set(renamed) <= {"replace_attention_with_int8"}, row


def test_promises_that_a_number_answers() -> None:
    """Each sentence of `docs.founding_claims` that states one."""
    said = {promise.says: promise.found for promise in PROMISES}
    ones = np.ones((1, 1, 4096, 64), np.float16)
    assert (ca.attention(ones[:, :, :16], ones, ones) == 1).all()
    assert "they give 1" in said["ones give 128 / 4096 at length 4,096"]
    sigmas = ca.compute_sigma_schedule(1000)
    found = ", ".join(f"{x:.2g}" for x in (sigmas[0], sigmas[500]))
    assert found == "80, 2.5" and f"{sigmas[999]:.3f}" == "0.002"
    assert "80, 2.5 and 0.002" in said["sigma is 79.4, 1.0 and 0.002 at steps 0, 500 and 999"]
    assert 256 * 127 * 127 < 2**24 and float(np.float32(2**24 + 1)) != 2**24 + 1
    assert abs(float(np.float16(1 + 2**-11)) - (1 + 2**-11)) == 2**-11
    assert "4.9e-4" in said["FP32 to FP16 rounds by about 1e-4"]
    tiles, q = ca.Tiles(128, 128, 4, 1), np.ones((1, 1, 128, 256), np.float32)
    with pytest.raises(ca.KernelLaunchError, match="bytes of shared memory") as refused:
        ca.attention(q, q, q, variant="fa", tiles=tiles)
    assert "\n" not in str(refused.value)
    for problem in (ladder := write_performance.stored("ladder"))["problems"]:
        asked = problem["problem"]
        work = 4 * asked["batch"] * asked["heads"] * asked["length"] ** 2 * asked["head_dim"]
        assert {row["operations"] * (1 + asked["causal"]) // work for row in problem["rows"]} == {1}
    assert ladder and "2 B H N^2 D" in said["P V takes 2 B H N D operations"]
    a, w = ca.act_quant(ones[0, 0, :, :]), ca.weight_quant(ones[0, 0, :, :])
    for given, dtype in (({}, "float16"), ({"out_dtype": "float32"}, "float32")):
        assert ca.int8_gemm(*a, *w, **given).dtype == dtype
    for name in ("layer_norm", "pos_embed", "final_layer.linear", "proj_out"):
        assert role_of(f"{name}.weight", (1024, 1024)) in PRECISE_ROLES


def test_promises_have_a_verdict_and_what_they_name_is_there() -> None:
    assert len(PROMISES) == len({promise.says for promise in PROMISES}) > 35
    for promise in PROMISES:
        assert promise.found
        files = re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", promise.found)
        assert files or promise.verdict != REFUTED, "name the record that refutes it"
        for path in files:
            assert (PAGE.parent / path).exists(), path


@pytest.mark.frameworks
def test_float32_that_wants_gradients_names_what_to_give() -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import Int8Attention

    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(ca.UnsupportedError, match="float32: give torch.float16 or torch.bfloat16"):
        Int8Attention(1, 8)(q, q, q, 3)


def test_the_core_class_has_cuda_as_the_plan_calls_it() -> None:
    layer = ca.Int8Attention(1, 8).cuda()
    q = np.ones((1, 1, 4, 8), np.float16)
    assert layer(q, q, q, timestep=500).shape == q.shape

