"""README and the pages that it leads to: code runs, commands exist, figures are the records'."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.arrays.kinds import as_float64
from cupyattn.errors import KernelCompileError
from cupyattn.interpret import KernelFault
from cupyattn.kernels import ladder as kernels
from cupyattn.reference.gemm import activate
from docs import write_readme
from experiments._harness import recording
from experiments.diffusion import diffusers_blocks
from experiments.speed import ladder

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def code(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_front_page_is_short() -> None:
    assert len(README.splitlines()) <= 200 and len(README.split()) <= 1800


def test_the_clone_address_is_in_one_place() -> None:
    found = re.search(r"^url = (.*)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    if found is None:
        assert "There is no public clone address" in README
    else:
        assert f"git clone {found[1]}" in README and "no public clone address" not in README


def test_the_first_block_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The others need diffusers: tests/interop/test_interop_readme.py."""
    names: dict[str, object] = {}
    exec(code(README)[0], names)
    printed = capsys.readouterr().out
    assert "fa_tc: O is within its bound" in printed
    assert "fa_tc: the fastest rung of accuracy class 'full' for float16" in printed


def test_the_examples_of_arrays_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = code(page("ARRAYS.md"))
    ten_lines, features, varlen, padded, codes, keys, linear, normed, prepared, gradients = blocks
    assert len(ten_lines.splitlines()) <= 10
    names: dict[str, object] = {}
    exec(ten_lines, names)
    printed = capsys.readouterr().out
    assert "fa_tc: O is within its bound" in printed
    assert "fa_tc: the fastest rung of accuracy class 'full' for float16" in printed
    assert names["o"].shape == names["o8"].shape == (1, 8, 256, 64)  # type: ignore[attr-defined]
    first = names["o"]
    exec(features, names)
    found = [names[name] for name in ("recent", "capped", "few", "biased")]
    assert all(o.shape == (1, 8, 256, 64) and np.isfinite(o).all() for o in found)  # type: ignore[attr-defined]
    exec(varlen, names)
    assert names["within"].shape == (256, 8, 64)  # type: ignore[attr-defined]
    exec(padded, names)
    alone = ca.attention(*(names[n][:, :, :200] for n in "qkv"), causal=True)  # type: ignore[index]
    np.testing.assert_array_equal(names["filled"][:, :, :200], alone)  # type: ignore[index]
    assert not names["filled"][:, :, 200:].any()  # type: ignore[index]
    exec(codes, names)
    close = names["o88"]
    assert np.abs(close - first).max() < 0.1 and not np.array_equal(close, first)  # type: ignore[operator]
    assert len(keys.splitlines()) <= 6
    exec(keys, names)
    assert not names["kv"].has_queries and names["z"].len_q == 256  # type: ignore[attr-defined]
    exec(linear, names)
    layer, rows, w = (names[name] for name in ("layer", "rows", "w"))
    product = rows.astype(np.float64) @ w.astype(np.float64).T  # type: ignore[attr-defined]
    exact = activate(product, "gelu")
    assert (np.abs(names["y"] - exact) <= layer.error(rows, w)).all()  # type: ignore[attr-defined]
    assert np.abs(names["c"] - product).max() < 0.1  # type: ignore[operator]
    exec(normed, names)
    y, of_scale, of_shift = (as_float64(names[name]) for name in ("rows", "scale", "shift"))
    y = (y - y.mean(1, keepdims=True)) / y.std(1, keepdims=True) * (1 + of_scale) + of_shift
    product = y @ w.astype(np.float64).T  # type: ignore[attr-defined]
    assert np.linalg.norm(names["c"] - product) < 0.014 * np.linalg.norm(product)
    exec(prepared, names)
    np.testing.assert_array_equal(names["o"], first)  # type: ignore[arg-type]
    exec(gradients, names)
    received = [names[name] for name in ("d_out", "q", "k", "v", "o", "lse")]
    found = [names[name] for name in ("dq", "dk", "dv")]
    assert ca.gradients.judge_backward(found, *received, causal=True).passed


def test_four_lines_add_a_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / "kernels_cu" / "attn_fa.cu").read_text()
    (tmp_path / "attn_mine.cu").write_text(source.replace("attn_fa(", "attn_mine("))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "VARIANTS", dict(kernels.VARIANTS))
    block, _ = code(page("OWN_KERNEL.md"))
    assert len([line for line in block.splitlines() if line]) <= 4
    exec(block, {})
    from cupyattn.compiler import modules as kc
    from cupyattn.distributions import make
    from cupyattn.ops.attention import resolved
    from cupyattn.ops.explain import plans

    q, k, v = make("normal", 1, 2, 40, 40, 24)
    table = ca.ladder(q, k, v, variants=["fa", "mine"])
    assert table.ok and table.rungs[1].idea == "the one idea"
    (plan,) = plans(resolved(q, k, v, variant="mine"))
    assert "attn_mine" in kc.build(plan.launches[0].module, "sm_80").kernels


def test_the_rung_that_the_page_breaks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page("OWN_KERNEL.md")
    good = (ROOT / "kernels_cu" / "attn_fa.cu").read_text().replace("attn_fa(", "attn_mine(")
    file = tmp_path / "attn_mine.cu"
    file.write_text(good)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "VARIANTS", dict(kernels.VARIANTS))
    register, judge = code(text)
    names: dict[str, object] = {}
    exec(register, names)

    def printed(removed: str) -> str:
        assert good.count(removed) == 1 or not removed
        file.write_text(good.replace(removed, ""))
        exec(judge, names)
        return f"`{capsys.readouterr().out.splitlines()[0].split(' at ')[0]}`"

    assert f"| none | {printed('')} |" in text
    removed = "O_acc[e] *= smem.alpha[row];"
    assert f"| remove `{removed}` | {printed(removed)} |" in text
    barrier = "__syncthreads();  // P and alpha visible to the whole block"
    assert f"remove the barrier *{barrier.split('// ')[1]}*" in text
    with pytest.raises(KernelFault, match="race"):
        printed(barrier)
    file.write_text(good.replace("state.advance(m)", "state.advnce(m)"))
    with pytest.raises(KernelCompileError, match="advnce"):
        exec(judge, names)


def test_the_table_is_what_the_record_says() -> None:
    inside = page("LADDER.md").split(ladder.BEGIN)[1].split(ladder.END)[0]
    table = ladder.page_table(recording.stored("ladder"))
    assert inside == f"\n{table}\n", (
        "run python -m experiments.speed.ladder --stored --update-docs"
    )


FIGURES = write_readme.figures()


@pytest.mark.parametrize("place", FIGURES, ids=lambda place: place[1].split()[1])
def test_figures_are_what_the_records_say(place: tuple[Path, str, str]) -> None:
    file, begin, end = place
    inside = file.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    assert inside == f"\n{FIGURES[place]}\n", "run python -m docs.write_readme"


def test_the_drawing_is_of_the_record(tmp_path: Path) -> None:
    write_readme.draw(recording.stored("whole_models"), tmp_path / "drawn.svg")
    drawn, kept = (
        re.sub(r"<path.*?/>", "", path.read_text("utf-8"), flags=re.DOTALL)
        for path in (tmp_path / "drawn.svg", write_readme.DRAWING)
    )
    assert re.findall(r"<!-- (.*?) -->", drawn) == re.findall(r"<!-- (.*?) -->", kept)


def test_a_slower_record_makes_another_sentence() -> None:
    peers = recording.stored("peers")
    for cell in peers["against_rival"]["cells"]:
        cell["ratio"] = [0.5, 0.5, 0.5]
    assert "0.500 to 0.500 times as fast" in write_readme.speed(peers)


def test_sentences_on_int8_follow_the_record() -> None:
    blocks = recording.stored("diffusers_blocks")
    blocks["rows"][0]["ways"]["both INT8"]["steps_ratio"] = [0.75, 0.5, 0.9]
    said = " ".join(write_readme.when_int8_pays(blocks))
    assert "Without `torch.compile` ten steps with both take longer" in said and "0.75 in" in said
    for row in blocks["rows"]:
        row["ways"]["both INT8"]["steps_ratio"] = [1.5, 1.4, 1.6]
        row["ways"]["INT8 linear layers, compiled"]["ratio"] = [0.75, 0.5, 1.0]
        row["ways"]["both INT8, compiled"]["ratio"] = [1.25, 1.0, 1.5]
    said = " ".join(write_readme.when_int8_pays(blocks))
    assert "Without `torch.compile`" not in said and "INT8 linear layers alone 0.75." in said
    assert all(f"1.25 in {row['model']}" in said for row in blocks["rows"])


def test_ratios_are_those_of_pairs_of_rounds() -> None:
    blocks, ladder, heads = map(recording.stored, ("diffusers_blocks", "ladder", "scores_h100"))
    way = blocks["rows"][0]["ways"]["both INT8, compiled"]
    way["ratio"], way["to_float32"] = [7.654, 7.5, 7.8], 0.125
    assert "| 7.65 | 32% | 3.3e-03 | 1.2e-01 |" in write_readme.int8(blocks, ladder, heads)


def test_the_settings_that_were_measured_stand_under_the_table() -> None:
    attention, linear = diffusers_blocks.REPLACED["both INT8"][0], diffusers_blocks.STRATEGY
    interop = page("INTEROP.md")
    assert f'replace_attention_with_int8(model, policy="{attention}")' in interop
    assert f'Int8Config(strategy="{linear}")' in interop


def test_no_ratio_below_one_is_printed_as_one() -> None:
    peers = recording.stored("peers")
    peers["against_rival"]["cells"][3]["ratio"] = [0.99951, 1.0, 1.0]
    peers["against_rival"]["cells"][4]["ratio"] = [1.99999, 2.0, 2.0]
    least = min(cell["ratio"][0] for cell in peers["against_rival"]["cells"])
    (low, high) = re.findall(r"is ([\d.]+) to ([\d.]+) times", write_readme.speed(peers))[0]
    assert float(low) <= least < float(low) + 1e-3 and high == "1.999"


@pytest.mark.parametrize("place", FIGURES, ids=lambda place: place[1].split()[1])
def test_sentences_beside_figures_are_short(place: tuple[Path, str, str]) -> None:
    text = "\n".join(line for line in FIGURES[place].splitlines() if line[:1] != "|")
    sentences = re.split(r"(?<=[.:])\s+(?=[A-Z*\d])|\n\n", text)
    assert len(sentences) > 1
    assert not {one: len(one.split()) for one in sentences if len(one.split()) > 30}


def test_the_first_screens_use_no_words_of_ours() -> None:
    first, learn = README.split("## Arrays")[0], README.split("## Learn")[1]
    for word in ("rung", "form", "mirror", "J1", "J2", "J3"):
        assert not re.search(rf"\b{word}s?\b", re.sub(r"\(docs/.*?\)", "", first)), word
    assert "A *rung* is" in learn and "rung" not in README.split("## Learn")[0].lower()
    assert "for you if" in first and "not for you if" in first


def test_every_command_is_named() -> None:
    commands, makefile = page("COMMANDS.md"), (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", commands + README, re.MULTILINE)
    assert {"ladder", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for name in cli.COMMANDS:
        assert f"`{name}`" in commands


def test_the_output_that_the_page_of_commands_shows_is_that_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = re.search(r"^cupyattn (.*)\n```\n\n```text\n(.*?)```", page("COMMANDS.md"), re.M | re.S)
    assert shown and cli.main(shown[1].split()) == 0
    lines = [line for line in shown[2].splitlines() if line != "..."]
    assert len(lines) == 3 and set(lines) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "docs/LADDER.md"])
def test_the_files_that_a_page_names_exist(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    named = r"`((?:cupyattn|kernels_cu|experiments|tests|docs)/[\w./]*)`"
    for path in re.findall(named, text):
        assert (ROOT / path).exists(), path
    for diffed in re.findall(r"^(?:less|diff(?: -y)?) (.*?)(?: +#.*)?$", text, re.MULTILINE):
        for name in diffed.split():
            assert (ROOT / "kernels_cu" / name).is_file(), name


def test_the_chain_of_diffs_is_the_ladder() -> None:
    steps = re.findall(r"^diff(?: -y)? ([\w/]+)\.cu ([\w/]+)\.cu", page("LADDER.md"), re.MULTILINE)
    names = [f"attn_{name}" for name in kernels.VARIANTS]
    assert steps[:-4] == list(zip(names, names[1:], strict=False))
    last = names[-1]
    pv8, whole, v8, fused = (
        f"forms/{last}_{form}" for form in ("pv8", "pv8_whole", "v8", "fused")
    )
    assert steps[-4:] == [(last, pv8), (pv8, whole), (last, v8), (last, fused)]
