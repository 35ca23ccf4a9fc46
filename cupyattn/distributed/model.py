"""Predicted costs of a call on many devices: operations, bytes and memory of the busiest rank.

With the rates of a machine these give seconds. ``method="auto"`` and ``cupyattn plan --devices``
use the model; ``experiments/speed/scaling.py`` compares it with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cupyattn.arrays.kinds import STORAGE
from cupyattn.distributed.mesh import Mesh, shares_of_heads
from cupyattn.kernels.measured_times import MEASURED
from cupyattn.measure.rungs import admitted_pairs
from cupyattn.problem.checks import AttentionSpec

#: Batch entries times heads of the calls in `cupyattn.kernels.measured_times`.
_MEASURED_HEADS = 64
#: Compute capability whose times are taken.
_CAPABILITY = 90
#: Bytes of an element of K and of V that go round a ring of ``fa_int8``, without their scales.
_CODE_BYTES = (1, 2)
_FLOAT = 4


@dataclass(frozen=True)
class Machine:
    """Rates of devices and of their connections.

    Parameters
    ----------
    name : str
    per_host : int
        Devices of a host.
    link, network : float
        Bytes per second that a device sends to others of its host, and to other hosts, while it
        receives as many.
    memory_rate : float
        Bytes per second of a device's memory.
    latency : float
        Seconds of an exchange within a host beside its bytes.
    memory : int
        Bytes of a device's memory.
    rates : dict of str to float
        Operations per second of a rung, where they are not those of
        `cupyattn.kernels.measured_times`.
    ring_rate : float
        Share of a rung's rate that remains in the steps of a ring: on some of the keys each, while
        the next ones are written to memory.
    codes_rate : float
        The same for a ring of codes, which are laid out and scaled for each part.
    heads_rate : float
        The same beside an exchange of heads: NCCL's kernels take multiprocessors.
    network_latency : float
        Seconds of an exchange between hosts beside its bytes.
    host_heads, host_ring, host_codes : float
        Seconds that the host needs for a step: of exchanged heads, of a ring, of a ring of codes.
        The first step's seconds always show. Later ones show as far as the device has no work.
    """

    name: str
    per_host: int = 8
    link: float = 360e9
    network: float = 45e9
    memory_rate: float = 4.0e12
    latency: float = 12e-6
    memory: int = 141 * 10**9
    rates: dict[str, float] = field(default_factory=dict)
    ring_rate: float = 0.99
    codes_rate: float = 0.955
    heads_rate: float = 1.0
    network_latency: float = 18e-6
    host_heads: float = 2.3e-3
    host_ring: float = 0.5e-3
    host_codes: float = 2.2e-3


#: H200 SXM with copy engines within a host. Links are from public figures. NVLink: 0.8 of 450 GB/s
#: a direction (NVIDIA's data sheet of H200: 900 GB/s in both). InfiniBand: 0.9 of a 400 Gb/s port
#: for each device (data sheets of DGX H200 and ConnectX-7). Memory: 0.83 of 4.8 TB/s. Latencies are
#: from NCCL's src/graph/tuning.cc, ring with protocol Simple: 8.4 us, and a step of 3.4 us (NVLink)
#: or 9.6 us (network). Seconds of the host, and rates, are fitted to the record of two
#: devices, experiments/results/scaling.json.
H200 = Machine("8 x H200 SXM a host")
#: The same with NCCL within a host, as several processes have it. Its kernels take multiprocessors
#: from attention: beside exchanged heads two devices had 0.83 of the rate at 118,800 rows. The host
#: needs longer for its steps, which short causal calls show.
H200_NCCL = replace(
    H200, name="8 x H200 SXM a host, by NCCL", heads_rate=0.83, host_heads=2.9e-3, host_codes=2.5e-3
)


def machine_of(devices: int, per_host: int) -> Machine:
    """Return the machine of so many devices: one process of one host has copy engines.

    Examples
    --------
    >>> machine_of(4, 8).per_host, machine_of(16, 8) == H200_NCCL
    (4, True)
    """
    machine = H200_NCCL if devices > per_host else H200
    return replace(machine, per_host=min(devices, per_host))


@dataclass(frozen=True)
class Costs:
    """Costs of a call for the busiest rank.

    Parameters
    ----------
    mesh : Mesh
    operations : float
        Operations of both products.
    compute : float
        Seconds of these.
    heads_bytes, ring_bytes : int
        Sent to neighbours, and round the ring.
    exposed : float
        Seconds of exchanging that no computation hides.
    merging : float
        Seconds of bringing partial results together.
    host : float
        Seconds in which the device waits for the host.
    memory : dict of str to int
        Bytes by name, without the scratch memory of kernels.
    """

    mesh: Mesh
    operations: float
    compute: float
    heads_bytes: int
    ring_bytes: int
    exposed: float
    merging: float
    host: float
    memory: dict[str, int]

    @property
    def seconds(self) -> float:
        """Time of the whole call."""
        return self.compute + self.exposed + self.merging + self.host

    @property
    def memory_bytes(self) -> int:
        """All memory."""
        return sum(self.memory.values())


def rate(machine: Machine, variant: str, call: AttentionSpec) -> float:
    """Return operations per second of a rung on one device.

    Examples
    --------
    >>> call = AttentionSpec(1, 1, 1, 4096, 4096, 128, "float16", 0.1)
    >>> 600e12 < rate(H200, "fa_tc", call) < 989e12
    True
    """
    if variant in machine.rates:
        return machine.rates[variant]
    rows = [
        row for row in MEASURED
        if row[0] == _CAPABILITY and row[5] == call.causal and variant in row[6]
    ]  # fmt: skip
    if not rows:
        raise ValueError(
            f"no rate of {variant!r} is known: give Machine(rates={{{variant!r}: ...}})"
        )
    wide = [row for row in rows if row[2] >= call.head_dim] or rows
    _, _, head_dim, len_q, len_kv, causal, micros = min(
        wide, key=lambda row: (abs(row[2] - call.head_dim), row[1] != call.dtype, -row[3])
    )
    measured = AttentionSpec(1, 1, 1, len_q, len_kv, head_dim, "float16", 1.0, causal=causal)
    operations = 4 * head_dim * _MEASURED_HEADS * admitted_pairs(measured)
    # NOTE: a narrower head takes the tiles of the next wider one, and their time.
    return operations / (1e-6 * micros[variant]) * call.head_dim / max(head_dim, call.head_dim)


def predict(
    call: AttentionSpec,
    mesh: Mesh,
    machine: Machine = H200,
    *,
    variant: str = "fa_tc",
    balanced: bool = False,
) -> Costs:
    """Return the costs of a call on a mesh of devices.

    Parameters
    ----------
    call : AttentionSpec
        The call of the whole sequence.
    mesh : Mesh
    machine : Machine
    variant : str
        The rung.
    balanced : bool
        Rows are shared zigzag: under a causal mask all ranks of a ring have the same work.

    Returns
    -------
    Costs

    Notes
    -----
    Exchanging heads is hidden but for the first of c steps on the way there and the last on the
    way back, and what computation is too short to hide. A step of the ring is hidden as far as the
    computation of a step is long. The host launches steps ahead of the device: it shows at the
    first step, and where all steps take it longer than the device. Merging reads and writes
    float32 for each element, but of the first part and of the result, which are in their own type.

    Examples
    --------
    >>> call = AttentionSpec(1, 32, 8, 131072, 131072, 128, "float16", 0.1)
    >>> four = predict(call, Mesh(4, 4))
    >>> round(predict(call, Mesh(1, 1)).seconds / (4 * four.seconds), 3)
    0.968
    """
    sizes = _Sizes.of(call, mesh, variant)
    share = sizes.heads / call.heads if call.heads else 0.0
    skew = 1.0
    if mesh.ring > 1 and call.causal and not balanced:
        skew = (2 * mesh.ring - 1) / mesh.ring  # of the rank with the last rows
    operations = 4.0 * call.head_dim * call.batch * call.heads * admitted_pairs(call)
    operations *= share * skew / mesh.ring
    compute = operations / rate(machine, variant, call)
    codes = variant == "fa_int8"
    if mesh.ring > 1:
        compute /= machine.codes_rate if codes else machine.ring_rate
    if mesh.ulysses > 1:
        compute /= machine.heads_rate
    near, far = _rates(mesh, machine)
    exposed = 0.0
    if mesh.ulysses > 1:
        whole = sizes.heads_bytes / near.rate
        steps = sizes.steps
        hidden = (steps - 1) / steps
        exposed += whole / steps + max(0.0, whole - compute) * hidden
        exposed += 2 * near.latency
    merging = 0.0
    if mesh.ring > 1:
        of_step = sizes.ring_bytes / (mesh.ring - 1) / far.rate
        exposed += (mesh.ring - 1) * max(0.0, of_step - compute / mesh.ring)
        exposed += far.latency * (mesh.ring - 1)
        touched = 0.75 if call.causal and balanced else 1.0
        steps, item = mesh.ring - 1, sizes.itemsize
        each = touched * (item * (steps + 2) + 2 * _FLOAT * (steps - 1))
        if steps > 1:  # the other rows, to float32 and back
            each += (1 - touched) * 2 * (item + _FLOAT)
        merging = sizes.elements_of_o * each / machine.memory_rate
    first = (machine.host_codes if codes else machine.host_ring) if mesh.ring > 1 else 0.0
    all_steps = mesh.ring * first
    if mesh.ulysses > 1:
        first += machine.host_heads
        all_steps = sizes.steps * (machine.host_heads + all_steps)
    host = first + max(0.0, all_steps - (compute + exposed + merging))
    return Costs(
        mesh, operations, compute, sizes.heads_bytes, sizes.ring_bytes, exposed, merging, host,
        sizes.memory,
    )  # fmt: skip


def meshes(size: int) -> list[Mesh]:
    """Return all meshes of so many ranks, rings of single ranks first."""
    return [Mesh(size, ulysses) for ulysses in range(1, size + 1) if size % ulysses == 0]


def fastest(
    call: AttentionSpec,
    size: int,
    machine: Machine = H200,
    *,
    variant: str = "fa_tc",
    balanced: bool = False,
) -> Costs:
    """Return the costs on the mesh that takes the least time.

    Examples
    --------
    >>> from dataclasses import replace
    >>> call = AttentionSpec(1, 32, 8, 131072, 131072, 128, "float16", 0.1, causal=True)
    >>> fastest(call, 8).mesh, fastest(replace(call, heads=2, heads_kv=2), 8, balanced=True).mesh
    (Mesh(size=8, ulysses=8), Mesh(size=8, ulysses=1))
    """
    every = (predict(call, m, machine, variant=variant, balanced=balanced) for m in meshes(size))
    return min(every, key=lambda costs: costs.seconds)


class _Link(NamedTuple):
    """Bytes per second, and seconds of an exchange beside its bytes."""

    rate: float
    latency: float


def _rates(mesh: Mesh, machine: Machine) -> tuple[_Link, _Link]:
    """Return the links among neighbours, and round the ring."""
    inside = _Link(machine.link, machine.latency)
    between = _Link(machine.network, machine.network_latency)
    near = inside if mesh.ulysses <= machine.per_host else between
    far = inside if mesh.size <= machine.per_host else between
    return near, far


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the busiest rank."""

    heads: int  # of the rank with most
    steps: int
    itemsize: int
    heads_bytes: int
    ring_bytes: int
    elements_of_o: int  # that a ring makes
    memory: dict[str, int]

    @classmethod
    def of(cls, call: AttentionSpec, mesh: Mesh, variant: str) -> _Sizes:
        item, batch, wide = STORAGE[call.dtype].itemsize, call.batch, call.head_dim
        own_q, own_kv = (-(-length // mesh.size) for length in (call.len_q, call.len_kv))
        all_q, all_kv = own_q * mesh.ulysses, own_kv * mesh.ulysses
        of_ranks = shares_of_heads(call.heads, call.heads_kv, mesh.ulysses)
        if mesh.ulysses == 1:
            of_ranks = shares_of_heads(call.heads, call.heads_kv, 1, chunks=1)
        q_of, kv_of = (
            [[getattr(h, name)[1] - getattr(h, name)[0] for h in of_rank] for of_rank in of_ranks]
            for name in ("q", "kv")
        )
        heads = max((sum(x) for x in q_of), default=0)
        key_heads = max((sum(x) for x in kv_of), default=0)
        step_q = max((max(x, default=0) for x in q_of), default=0)
        step_kv = max((max(x, default=0) for x in kv_of), default=0)
        row = batch * wide * item
        of_lse = batch * _FLOAT
        memory = {
            "q, k and v": row * (call.heads * own_q + 2 * call.heads_kv * own_kv),
            "o and lse": (row + of_lse) * call.heads * own_q,
        }
        heads_bytes = ring_bytes = 0
        if mesh.ulysses > 1:
            away_q, away_kv = (sum(map(sum, x[1:])) for x in (q_of, kv_of))
            back = (mesh.ulysses - 1) * heads
            heads_bytes = row * (away_q * own_q + 2 * away_kv * own_kv) + row * back * own_q
            memory["heads of two steps"] = 2 * row * (step_q * all_q + 2 * step_kv * all_kv)
            two = min(2, len(of_ranks[0]))
            memory["o and lse of two steps"] = (row + of_lse) * two * step_q * all_q
        if mesh.ring > 1:
            of_key = 2 * item if variant != "fa_int8" else sum(_CODE_BYTES)
            ring_bytes = (mesh.ring - 1) * batch * wide * of_key * key_heads * all_kv
            memory["keys on their way"] = 2 * batch * wide * of_key * step_kv * all_kv
            if variant == "fa_int8":
                memory["codes"] = batch * wide * (of_key * step_kv * all_kv + step_q * all_q)
            several = mesh.ring > 2 or call.window  # else O is never float32
            partials = (batch * _FLOAT * wide + 2 * (row + of_lse)) if several else row + of_lse
            memory["partial results"] = partials * step_q * all_q
        elements = batch * wide * heads * all_q
        steps = max(1, len(of_ranks[0]))  # without heads, too
        return cls(heads, steps, item, heads_bytes, ring_bytes, elements, memory)
