"""Context parallelism of diffusers, and groups of torch, with real processes on gloo.

Quick tests ask threads for the same: `test_distributed_torch.py` for groups, here for masks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import distributed
from cupyattn.distributed import Mesh, Partition, Shared
from cupyattn.errors import UnsupportedError
from experiments.diffusion import context_parallel as experiment
from tests.support.torch_ranks import ROOT, on_threads, processes, torchrun

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = "tests.interop.torch_ranks"


def attend_on_threads(
    mesh: Mesh, lengths: list[int], masks: list[Any] | None, form: dict[str, Any]
) -> tuple[np.ndarray, list[np.ndarray], list[str | None]]:
    """O of all ranks, the operands, and what each rank says against the call."""
    from cupyattn.interop.diffusers import masks as of_scores
    from cupyattn.interop.diffusers.context_parallel import Ranks, facts_of_call, words

    rows = Partition.contiguous(lengths)
    whole = list(np.random.default_rng(1).standard_normal((3, 1, 4, sum(lengths), 16)))
    whole = [x.astype(np.float16) for x in whole]

    def on_rank(group: Any) -> Any:
        group.mesh = mesh
        q, k, v = (torch.from_numpy(rows.take(x, group.rank)) for x in whole)
        mask = None if masks is None else masks[group.rank]
        ranks = Ranks(group, True)
        reason, said = ranks.agreed(facts_of_call(ranks.obstacle(q, k, v, mask, 1), q, k, mask))
        if reason is not None:
            return None, reason
        given = {"q": q, "k": k, "v": v}
        given |= {
            name: x
            for name, x in zip(("mask", "bias"), of_scores.of_scores(mask), strict=True)
            if x is not None
        }
        call, o = ranks.attend(form, given, said)
        assert words(call).startswith(f"{mesh.ring} ring" if mesh.ulysses == 1 else "")
        return o, None

    found, errors = on_threads(on_rank, mesh.size)
    assert errors == [None] * mesh.size
    reasons = [reason for _, reason in found]
    o = np.empty(0) if any(reasons) else rows.join([x.numpy() for x, _ in found])
    return o, whole, reasons


@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(2, 2), Mesh(4, 2)], ids=str)
@pytest.mark.parametrize("own", [True, False])
def test_masks_of_a_ranks_keys_and_of_all_keys(mesh: Mesh, own: bool) -> None:
    lengths = [9, 12, 7, 8][: mesh.size]
    every = torch.arange(sum(lengths))[None, None, None] % 3 != 1
    masks = list(every.split(lengths, dim=3)) if own else [every] * mesh.size
    o, (q, k, v), _ = attend_on_threads(mesh, lengths, masks, {"variant": "fa_tc"})
    kept = every.reshape(-1).numpy()
    of_ranks = np.split(kept, np.cumsum(lengths)[:-1])
    shared = Shared(
        mesh, Partition.contiguous(lengths),
        Partition.contiguous([int(x.sum()) for x in of_ranks]),
    )  # fmt: skip
    assert distributed.judge(o, q, k[:, :, kept], v[:, :, kept], shared, variant="fa_tc") <= 1


def test_masks_are_cut_by_ranges() -> None:
    from cupyattn.distributed.rank_calls import NO_SCORES, Scores

    x = np.arange(24).reshape(1, 1, 4, 6)
    found = Scores({"bias": x}).cut([(0, 1), (3, 4)], [(1, 2), (4, 6)]).arrays["bias"]
    assert found.tolist() == [[[[1, 4, 5], [19, 22, 23]]]]
    assert Scores({"mask": x[:, :, :1]}).cut([(2, 4)], []).arrays["mask"].shape == (1, 1, 1, 0)
    assert NO_SCORES.cut([(0, 1)], [(0, 1)]) == NO_SCORES


@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
def test_a_bias_of_rows_is_that_of_one_process(variant: str) -> None:
    import cupyattn as ca

    lengths = [8, 8]
    bias = torch.from_numpy(np.random.default_rng(2).standard_normal((1, 1, 16, 16)) * 3).half()
    o, (q, k, v), _ = attend_on_threads(Mesh(2, 1), lengths, [bias] * 2, {"variant": variant})
    exact = ca.attention(*(x.astype(np.float32) for x in (q, k, v)), bias=bias.numpy())
    without = ca.attention(*(x.astype(np.float32) for x in (q, k, v)))
    near = np.abs(o - exact).max()
    assert near < (0.005 if variant == "fa_tc" else 0.05) < 0.3 < np.abs(o - without).max()


@pytest.mark.parametrize(
    ("masks", "reason"),
    [
        ([None, torch.ones(1, 1, 1, 8)], "attention masks on some ranks alone"),
        ([torch.ones(1, 1, 1, 5)] * 2, "attention mask whose keys are neither"),
        ([torch.ones(1, 1, 8, 16)] * 2, "attention mask whose rows are not all ranks' queries"),
        ([torch.ones(1, 4, 1, 8)] * 2, "attention mask of heads, in context parallelism"),
        ([torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8, dtype=torch.int32)],
         r"attention mask of dtype int32"),
    ],
)  # fmt: skip
def test_all_ranks_leave_a_call_native_where_one_has_to(masks: Any, reason: str) -> None:
    _, _, reasons = attend_on_threads(Mesh(2, 1), [8, 8], masks, {"variant": "fa_tc"})
    assert all(re.match(reason, str(one)) for one in reasons)


def test_all_ranks_fall_back_where_codes_do_not_travel() -> None:
    """The layer then asks for 16 bits: the group goes on."""
    import cupyattn as ca
    from cupyattn.interop.diffusers.context_parallel import Ranks, facts_of_call, words

    def on_rank(group: Any) -> Any:
        x = torch.ones(1, 2, 8, 16).half()
        ranks, given = Ranks(group, True), {"q": x, "k": x, "v": x}
        _, said = ranks.agreed(facts_of_call(None, x, x, None))
        with pytest.raises(UnsupportedError, match="a ring of fa_int8"):
            form = {"variant": "fa_int8", "quant": ca.QuantConfig(fused=True, smooth_k=False)}
            ranks.attend(form, given, said)
        return words(ranks.attend({"variant": "fa_tc"}, given, said)[0])

    found, errors = on_threads(on_rank, 2, method="ring")
    assert errors == [None] * 2 and found == ["2 ring, 16 bits"] * 2


def test_models_that_share_ranks_differently_have_groups_of_their_own() -> None:
    from cupyattn.interop.diffusers.context_parallel import Ranks

    def on_rank(group: Any) -> Any:
        mesh = SimpleNamespace(get_group=lambda: group.process_group, device_type="cpu")
        found = []
        for ring, ulysses in ((2, 1), (1, 2), (2, 1)):
            config = SimpleNamespace(
                ring_degree=ring, ulysses_degree=ulysses, convert_to_fp32=True, _flattened_mesh=mesh
            )
            found.append(Ranks.of(SimpleNamespace(context_parallel_config=config)))
        assert found[0].group is found[2].group is not found[1].group
        return [one.group.mesh for one in found]

    found, errors = on_threads(on_rank, 2)
    assert errors == [None] * 2
    assert found == [[Mesh(2, 1), Mesh(2, 2), Mesh(2, 1)]] * 2
    tensor_parallel = SimpleNamespace(context_parallel_config=None)
    assert Ranks.of(None) is Ranks.of(tensor_parallel) is None


# ---- processes -----------------------------------------------------------------------------------


def test_the_page_has_what_was_measured() -> None:
    file = experiment.recording.RESULTS / "context_parallel.json"
    said = experiment.PAGE.read_text().partition(experiment.BEGIN)[2].partition(experiment.END)[0]
    wanted = "It has not been measured yet."
    if file.exists():
        wanted = experiment.section(json.loads(file.read_text()))
    assert said.strip() == wanted


@pytest.mark.slow
def test_the_experiment_runs_in_small(tmp_path: Path) -> None:
    file, page = tmp_path / "record.json", tmp_path / "page.md"
    page.write_text(f"before {experiment.BEGIN} nothing {experiment.END} after")
    assert experiment.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    rows = {(row["ranks"], row["way"]): row for row in record["rows"]}
    assert len(rows) == 4 + 6 and all(row["to_native"] < 0.02 for row in rows.values())
    short = "fewer than 128 queries or keys"  # a rank's rows, which look at the prompt
    assert all({*row["native"]} <= {short} for row in rows.values())
    bits, codes = rows[2, "16 bits, ring"], rows[2, "INT8, ring of codes"]
    assert (bits["ran"], codes["ran"]) == ("2 ring, 16 bits", "2 ring, codes")
    assert 0.7 < codes["bytes_sent"] / bits["bytes_sent"] < 0.85
    assert bits["bytes_sent"] == experiment.native_bytes(
        experiment.WAYS[1], 2, (1, record["tokens"], 4, 32), 2
    )
    experiment.update_page(record, page)
    assert "| 2 | INT8, ring of codes |" in page.read_text()


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "DISTRIBUTED.md").read_text()
    (block,) = (x for x in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "from_torch" in x)
    (tmp_path / "torch_attend.py").write_text(block)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    said = torchrun(2, "torch_attend")  # whose ranks may write their lines into one
    for rank in (0, 1):
        assert said.count(f"{rank} (1, 8, 256, 64) (1, 8, 256, 64)") == 1


@pytest.mark.slow
def test_torchrun_starts_groups_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "DISTRIBUTED.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = (x for x in blocks if "from_environment" in x)
    (tmp_path / "attend.py").write_text(block)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    said = torchrun(2, "attend")  # whose ranks may write their lines into one
    for rank in (0, 1):
        assert said.count(f"{rank} 2 (1, 8, 2048, 64)") == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_groups_of_processes(size: int) -> None:
    torchrun(size, RANKS, "cpu", "groups")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("wan", "2", "1", "precision", "bfloat16", '{"train": true}'),
        ("wan", "2", "1", "precision", "bfloat16", '{"train": true, "convert_to_fp32": false}'),
        ("wan", "1", "2", "precision", "bfloat16", '{"train": true}'),
        ("wan", "2", "1", "balanced", "bfloat16", '{"train": true}'),
        ("wan", "1", "2", "aggressive", "float32"),
        ("wan_uneven", "2", "1", "balanced", "float32", '{"ring_anything": true}'),
        ("wan_uneven", "1", "2", "precision", "float32", '{"ulysses_anything": true}'),
        ("qwen", "2", "1", "precision", "bfloat16", '{"train": true}'),
        ("qwen", "1", "2", "balanced", "bfloat16"),
        ("wan", "2", "2", "balanced", "bfloat16"),
        ("qwen", "2", "2", "precision", "bfloat16", '{"convert_to_fp32": false}'),
        ("wan_uneven", "4", "1", "aggressive", "float32", '{"ring_anything": true}'),
    ],
    ids="-".join,
)  # fmt: skip
def test_models_of_diffusers_on_several_processes(arguments: tuple[str, ...]) -> None:
    size = int(arguments[1]) * int(arguments[2])
    said = torchrun(size, RANKS, "cpu", "context_parallel", *arguments)
    assert " from native, one process " in said


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [("2", "1"), ("1", "2")], ids="x".join)
def test_compiled_models_on_several_processes(degrees: tuple[str, str]) -> None:
    torchrun(2, RANKS, "cpu", "compiled", *degrees)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", "rank 1 raised KeyError: 'of the caller'"),
        ("dies", "rank 1 did not come to 'parallel_attention, call 5' within 15 s"),
        ("dies while it sends", "rank 1 ended: its connection closed"),
        ("differs", "rank 1 called parallel_attention with scale=0.5, rank 0 with scale=0.25: "
                    "give all ranks the same scale"),
    ],
)  # fmt: skip
def test_a_process_that_fails_ends_the_others_with_one_sentence(kind: str, said: str) -> None:
    found = processes(3, RANKS, "cpu", "fault", kind)
    others = [found[0], found[2]] if kind != "differs" else found
    sentences = [re.findall(r"rank \d says: (.*)", output) for _, output in others]
    assert sentences == [[said]] * len(others), found
    assert [code for code, _ in others] == [0 if kind == "differs" else 7] * len(others)


#: Rank 1 raises and ends. Rank 0, which waits for its arrays, ends as programs do, but with a sleep
#: that holds the GIL: a thread that wakes meanwhile finds an interpreter that has ended.
ENDS = """
import atexit, ctypes, os, time

if os.environ["RANK"] == "0":
    atexit.register(ctypes.PyDLL(None).usleep, 2_000_000)  # the first, which is called last

import numpy as np
from torch import distributed as dist
from cupyattn import distributed

dist.init_process_group("gloo")
group = distributed.from_torch(method="ring", timeout=30)
if group.rank == 0:
    try:
        group.exchange([], [(1, np.empty(3))]).wait()
    except distributed.RankError as error:
        print(f"rank 0 says: {error}", flush=True)
else:
    time.sleep(0.3)  # rank 0 waits by then
    try:
        with group:
            raise KeyError("of the caller")
    finally:
        time.sleep(1)
        os._exit(0)
"""


@pytest.mark.slow
def test_a_process_ends_in_peace_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (code, said), _ = processes(2, "ends")
    assert (code, said.strip()) == (0, "rank 0 says: rank 1 raised KeyError: 'of the caller'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", "rank 1 raised MemoryError in attention of diffusers: no room"),
        ("dies", "rank 1 (did not come to 'attention of diffusers, call .*' within 15 s|"
                 "ended: its connection closed)"),
    ],
)  # fmt: skip
def test_a_rank_that_ends_within_a_model_ends_the_others(kind: str, said: str) -> None:
    found = processes(3, RANKS, "cpu", "model_fault", kind)
    for _, output in (found[0], found[2]):
        (sentence,) = re.findall(r"rank \d says: (.*)", output)
        assert re.fullmatch(said, sentence), found
