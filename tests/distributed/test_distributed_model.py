"""The cost model: bytes and operations counted by hand, and bytes that ranks really send."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import cli, distributed
from cupyattn.cli.plan import DEVICES, LENGTHS, rows_of
from cupyattn.distributed import CopyGroup, HostGroup, Mesh, NcclGroup, Partition
from cupyattn.distributed.choice import choose_mesh
from cupyattn.distributed.model import H200, H200_NCCL, Machine, fastest, meshes, predict, rate
from cupyattn.distributed.torch_groups import TorchDeviceGroup
from cupyattn.problem.checks import AttentionSpec
from experiments._harness.recording import stored
from experiments.speed.scaling import Problem
from tests.distributed.distributed_cases import asked_for
from tests.support.runs import normal

#: B 1, 32 heads of 8 key heads, 131,072 rows of 128 channels in 16 bits.
CALL = AttentionSpec(1, 32, 8, 131072, 131072, 128, "float16", 0.1)
#: Rates that are easy to divide by.
ROUND = Machine(
    "round numbers", 4, 1e9, 1e8, 1e9, 0.0, 10**12, {"fa_tc": 1e12, "fa_int8": 1e12}, 1.0,
    codes_rate=1.0, network_latency=0.0, host_heads=0.0, host_ring=0.0, host_codes=0.0,
)  # fmt: skip


def test_one_device_computes_and_sends_nothing() -> None:
    costs = predict(CALL, Mesh(1, 1), ROUND)
    assert costs.operations == 4 * 32 * 131072**2 * 128
    assert costs.seconds == costs.compute == costs.operations / 1e12
    assert (costs.heads_bytes, costs.ring_bytes, costs.exposed, costs.merging) == (0, 0, 0, 0)
    assert costs.memory == {
        "q, k and v": 131072 * 128 * 2 * (32 + 16),
        "o and lse": 131072 * 32 * (128 * 2 + 4),
    }


def test_four_devices_that_exchange_heads() -> None:
    """Each sends a quarter of the rows of three quarters of the heads, and gets O back."""
    costs = predict(CALL, Mesh(4, 4), ROUND)
    row = 128 * 2
    assert costs.operations == 4 * 8 * 131072**2 * 128
    assert costs.heads_bytes == 32768 * row * (24 + 2 * 6) + 3 * 32768 * row * 8
    steps = 2  # a rank has two key heads
    assert costs.exposed == pytest.approx(costs.heads_bytes / 1e9 / steps)
    assert costs.memory["heads of two steps"] == 2 * row * 131072 * (4 + 2 * 1)
    assert costs.memory["o and lse of two steps"] == 131072 * 2 * 4 * (row + 4)


def test_four_devices_in_a_ring() -> None:
    costs = predict(CALL, Mesh(4, 1), ROUND)
    assert costs.ring_bytes == 3 * 2 * 8 * 32768 * 128 * 2
    of_step, compute = costs.ring_bytes / 3 / 1e9, costs.compute / 4
    assert costs.exposed == pytest.approx(3 * max(0.0, of_step - compute))
    elements = 32 * 32768 * 128
    first, middle, last = 2 + 2 + 4, 4 + 2 + 4, 4 + 2 + 2
    assert costs.merging == pytest.approx(elements * (first + middle + last) / 1e9)
    row = 128 * 2 + 4
    assert costs.memory["partial results"] == 32 * 32768 * (4 * 128 + 2 * row)
    two = predict(CALL, Mesh(2, 1), ROUND)
    assert two.merging == pytest.approx(2 * elements * (2 + 2 + 2) / 1e9)
    assert two.memory["partial results"] == 32 * 65536 * row
    half = predict(CALL, Mesh(4, 1), replace(ROUND, ring_rate=0.5))
    assert half.compute == 2 * costs.compute
    slow = predict(CALL, Mesh(4, 1), replace(ROUND, link=1e6))
    assert slow.exposed == pytest.approx(3 * (slow.ring_bytes / 3 / 1e6 - compute))
    half = predict(CALL, Mesh(4, 1), ROUND, variant="fa_int8")
    assert half.ring_bytes == 0.75 * costs.ring_bytes
    far = replace(ROUND, network=1e6)
    assert predict(CALL, Mesh(4, 1), far).exposed == costs.exposed
    assert predict(CALL, Mesh(8, 1), far).exposed > 0  # two hosts


def test_rows_behind_each_other_are_uneven_work_under_a_causal_mask() -> None:
    causal = replace(CALL, causal=True)
    even = predict(causal, Mesh(4, 1), ROUND, balanced=True)
    uneven = predict(causal, Mesh(4, 1), ROUND)
    assert uneven.compute == pytest.approx(even.compute * 7 / 4)
    rows = np.arange(131072) + 1
    assert even.operations == pytest.approx(4 * 32 * 128 * rows.sum() / 4)
    assert uneven.operations == pytest.approx(4 * 32 * 128 * rows[-32768:].sum(), rel=1e-4)


def test_what_was_measured_is_the_rate() -> None:
    problems = {one["problem"]["name"]: one["rows"] for one in stored("ladder")["problems"]}
    rows = {row["variant"]: row for row in problems["B4 H16 4096 hd128 float16 normal"]}
    assert rate(H200, "fa_tc", CALL) == pytest.approx(rows["fa_tc"]["tflops"] * 1e12, rel=0.01)
    narrow = rate(H200, "fa_tc", replace(CALL, head_dim=96))
    assert narrow == pytest.approx(0.75 * rate(H200, "fa_tc", CALL))
    with pytest.raises(ValueError, match="no rate of 'mine' is known: give Machine"):
        rate(H200, "mine", CALL)


@given(st.integers(1, 24), st.integers(1, 8), st.sampled_from([2**12, 2**17, 2**20]))
def test_no_mesh_is_faster_than_its_share(size: int, heads_kv: int, length: int) -> None:
    call = replace(CALL, heads=4 * heads_kv, heads_kv=heads_kv, len_q=length, len_kv=length)
    alone = predict(call, Mesh(1, 1)).seconds
    best = fastest(call, size)
    assert size * best.seconds >= 0.999 * alone
    assert best.seconds == min(predict(call, mesh).seconds for mesh in meshes(size))


def test_auto_exchanges_heads_within_a_host_and_passes_keys_between() -> None:
    hosts = [f"host{i // 8}" for i in range(16)]
    many = replace(CALL, heads_kv=32, len_q=2**20, len_kv=2**20)
    assert choose_mesh("auto", None, many, "fa_tc", hosts, balanced=True).ulysses == 8
    assert choose_mesh("auto", None, CALL, "fa_tc", hosts[:4], balanced=False) == Mesh(4, 1)
    assert choose_mesh("auto", None, many, "fa_tc", hosts[:4], balanced=False) == Mesh(4, 4)
    few = replace(CALL, heads=2, heads_kv=2)
    assert choose_mesh("auto", None, few, "fa_tc", hosts[:8], balanced=True) == Mesh(8, 1)
    how: dict[str, Any] = {"balanced": True, "without_ring": True}
    assert choose_mesh("auto", None, few, "fa_int8", hosts[:8], **how) == Mesh(8, 8)
    assert choose_mesh("mixed", 4, CALL, "fa_tc", hosts, balanced=True) == Mesh(16, 4)


def test_auto_knows_that_nccl_takes_multiprocessors() -> None:
    """Exchanged heads then cost more than a ring: which wins, a group's transport decides."""
    call, of_two = replace(CALL, heads=40, heads_kv=40, len_q=32760, len_kv=32760), ["host"] * 2
    groups = HostGroup, CopyGroup, NcclGroup, TorchDeviceGroup
    assert [group.machine for group in groups] == [H200, H200, H200_NCCL, H200_NCCL]
    chosen = [
        choose_mesh("auto", None, call, "fa_int8", of_two, balanced=False, machine=group.machine)
        for group in groups
    ]
    assert chosen == [Mesh(2, 2)] * 2 + [Mesh(2, 1)] * 2


def test_ranks_choose_by_the_machine_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 4, 8, 16), np.float16)
    k = q[:, :2]

    def bytes_sent(heads_rate: float, ring_rate: float) -> int:
        machine = replace(ROUND, heads_rate=heads_rate, ring_rate=ring_rate)
        monkeypatch.setattr(HostGroup, "machine", machine)

        def on_rank(group: Any) -> int:
            distributed.parallel_attention(q, k, k, group, variant="fa_tc")
            return int(group.bytes_sent)

        return distributed.run(on_rank, 2)[0]

    assert bytes_sent(1e-9, 1) == 2 * k.nbytes  # a ring: all keys and values
    assert bytes_sent(1, 1e-9) == 2 * (q.nbytes + k.nbytes) // 2  # half of the heads


def test_the_model_is_within_15_percent_of_two_devices() -> None:
    """At the rate of one of them."""
    record, alone, found = stored("scaling"), {}, {}
    for row in record["rows"]:
        if row["ranks"] == 1 and row["axis"] == "":
            alone.setdefault((row["problem"], row["variant"]), float(np.median(row["samples"])))
    for row in record["rows"]:
        if row["ranks"] != 2 or row["axis"]:
            continue
        names = "batch", "heads", "length", "causal", "heads_kv", "head_dim"
        call = Problem(*(row[name] for name in names)).call
        how = {"variant": row["variant"], "balanced": row["causal"]}
        operations = predict(call, Mesh(1, 1), **how).operations
        machine = H200_NCCL if row["transport"] == "nccl" else H200
        rates = {row["variant"]: operations / alone[row["problem"], row["variant"]]}
        mesh = Mesh(2, row["ulysses"] or 2)
        seconds = predict(call, mesh, replace(machine, per_host=2, rates=rates), **how).seconds
        key = row["variant"], row["causal"], row["length"], row["transport"], row["ulysses"]
        found[key] = seconds / float(np.median(row["samples"]))
    assert len(found) >= 24
    assert all(0.85 <= x <= 1.15 for x in found.values()), found


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(4, 4), Mesh(4, 1), Mesh(4, 2), Mesh(8, 2)])
@pytest.mark.parametrize("heads_kv", [8, 2, 1])
def test_ranks_send_what_the_model_says(mesh: Mesh, heads_kv: int) -> None:
    """The first rank sends most."""
    call = AttentionSpec(2, 8, heads_kv, 64, 128, 16, "float16", 0.25)
    q, k = normal((2, 8, 64, 16), (2, heads_kv, 128, 16))[:2]
    rows, keys = Partition.contiguous(64, mesh.size), Partition.contiguous(128, mesh.size)

    def on_rank(group: Any) -> int:
        own = rows.take(q, group.rank), *(keys.take(k, group.rank) for _ in range(2))
        distributed.parallel_attention(*own, group, variant="fa_tc", **asked_for(mesh))
        return group.bytes_sent

    sent = distributed.run(on_rank, mesh.size)
    costs = predict(call, mesh, ROUND)
    assert max(sent) == costs.heads_bytes + costs.ring_bytes


# ---- cupyattn plan -------------------------------------------------------------------------------


def planned(capsys: Any, tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    file = tmp_path / "plan.json"
    assert cli.main(["plan", *arguments, "--json", str(file)]) == 0
    return capsys.readouterr().out, json.loads(file.read_text())


def test_plan_of_one_device(capsys: Any, tmp_path: Path) -> None:
    out, record = planned(capsys, tmp_path, "--variant", "unfused", "--len", "4096")
    assert "attn_unfused_scores<<<" in out
    assert record["memory"]["scratch of the kernels"] == 4 * 16 * 4096**2
    rows = [line.split() for line in out.splitlines()]
    assert ["memory", "bytes"] in rows
    assert ["total", f"{sum(record['memory'].values()):,}", "1.1", "GiB"] in rows
    assert re.search(r"^  tiles +block_q=", out, re.MULTILINE) and "Features(" not in out


def test_plan_of_a_million_rows_on_four_devices(capsys: Any, tmp_path: Path) -> None:
    out, record = planned(
        capsys, tmp_path, "--len", "1048576", "--heads", "32", "--heads-kv", "8", "--causal",
        "--devices", "4", "--arch", "sm_90a",
    )  # fmt: skip
    assert [(m["ulysses"], m["ring"]) for m in record["meshes"]] == [(1, 4), (2, 2), (4, 1)]
    assert (record["ulysses"], record["ring"]) == (4, 1) and "rows zigzag" in out
    memory = record["memory"]
    assert memory["q, k and v"] == 2 * 128 * (32 + 16) * 262144
    assert sum(memory.values()) < 12 * 2**30
    assert re.search("^memory of each device +bytes$", out, re.MULTILINE) and "taken" in out
    ring = planned(capsys, tmp_path, "--devices", "4", "--ulysses", "1", "--variant", "fa_int8")[1]
    assert ring["ring"] == 4 and "codes" in ring["memory"]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_codes_of_heads_would_save_less_than_merging_costs(devices: int) -> None:
    """Heads travel in 16 bits: what fewer bytes save is not what computation hides."""
    for heads, length in ((40, 32760), (24, 118800), (24, 524288)):
        call = AttentionSpec(1, heads, heads, length, length, 128, "float16", 128**-0.5)
        in_heads = predict(call, Mesh(devices, devices), variant="fa_int8")
        # As many elements of O as in a ring, and as many partial results.
        merging = predict(call, Mesh(devices, 1), variant="fa_int8").merging
        for share in (6 / 8, 5 / 8):  # of the bytes of q, k, v and o: V in 16 bits, or in 8
            assert (1 - share) * in_heads.exposed < merging


def test_plan_of_all_sizes_says_which_mesh_and_what_codes_win(capsys: Any, tmp_path: Path) -> None:
    out, record = planned(capsys, tmp_path, "--heads", "24", "--all-sizes")
    sizes = {(x["devices"], x["length"]): x for x in record["sizes"]}
    assert [*sizes] == [(n, length) for n in DEVICES for length in LENGTHS]
    assert (min(DEVICES), max(DEVICES), LENGTHS[0], LENGTHS[-1]) == (2, 64, 2**15, 2**22)
    two, many = sizes[2, 2**17], sizes[64, 2**19]
    assert (two["ulysses"], two["ring"]) == (1, 2) and (many["ulysses"], many["ring"]) == (8, 8)
    # Between hosts a ring of all devices waits for its links, with codes for half as long.
    assert 1.5 < many["ring_exposed"] / many["codes_exposed"] < 2.5
    assert out.count("8 x 8") >= 2 and "16 bits: ulysses x ring" in out


def test_plan_says_what_is_wrong(capsys: Any) -> None:
    assert cli.main(["plan", "--devices", "0"]) == 2
    assert cli.main(["plan", "--heads-kv", "5"]) == 2
    assert cli.main(["plan", "--devices", "4", "--ulysses", "3"]) == 2
    said = capsys.readouterr().err
    assert "--devices must be at least 1" in said and "--heads-kv must divide --heads" in said
    assert "ulysses must divide the 4 ranks, got 3" in said


@pytest.mark.parametrize(
    "flags",
    ["--all-sizes --devices 3", "--all-sizes --len 8192", "--all-sizes --ulysses 2",
     "--all-sizes --variant fa_int8", "--ulysses 2", "--per-host 4", "--partition zigzag"],
)  # fmt: skip
def test_plan_refuses_flags_that_change_nothing(capsys: Any, flags: str) -> None:
    assert cli.main(["plan", *flags.split()]) == 2
    name = flags.removeprefix("--all-sizes ").split()[0]
    assert f"{name} changes nothing with" in capsys.readouterr().err


def test_shapes_without_memory() -> None:
    call = replace(CALL, len_q=2**30, len_kv=2**30)
    q, k, _ = rows_of(call, 32, 8, (2**30, 2**30))
    assert q.shape == (1, 32, 2**30, 128) and q.strides == (2**43, 2**38, 256, 2)
    assert k.shape == (1, 8, 2**30, 128)
