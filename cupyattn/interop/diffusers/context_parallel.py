"""Context parallelism of diffusers: attention to a sequence that several ranks share.

`ContextParallelConfig` makes a mesh of ``ring`` times ``ulysses`` ranks. Hooks of the model give
each rank a contiguous part of the rows, in the order of ranks. Here the ranks of such a mesh are a
group of `cupyattn.distributed`, on the process group that diffusers made.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.agreement import ShardedCall, ShardedSettings
from cupyattn.distributed.group import Group, Message
from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.parallel import on_ranks
from cupyattn.distributed.rank_calls import NO_SCORES, Scores
from cupyattn.distributed.torch_groups import on_process_group
from cupyattn.interop.diffusers import masks
from cupyattn.interop.torch.bridge import as_array, on_device_of
from cupyattn.problem.settings import Settings

#: Name of these calls in error messages.
WHAT = "attention of diffusers"
#: Groups by process group and mesh, since models may share one process group differently.
_groups: weakref.WeakKeyDictionary[Any, dict[Mesh, Group]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Said:
    """Facts about a rank's call, which all ranks exchange.

    Parameters
    ----------
    obstacle : str or None
        Why native attention must run.
    len_q, len_kv : int
        Its rows and keys.
    mask : tuple of int or None
        Rows and keys of its mask.
    """

    obstacle: str | None
    len_q: int
    len_kv: int
    mask: tuple[int, int] | None


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the sequence of a call, seen from one of them.

    Parameters
    ----------
    group : Group
    wide_sums : bool
        ``convert_to_fp32``: whether a ring sums in float32.
    """

    group: Group
    wide_sums: bool

    @classmethod
    def of(cls, parallel_config: Any) -> Ranks | None:
        """Return the ranks of a configuration; None if no sequence is shared."""
        config = getattr(parallel_config, "context_parallel_config", None)
        if config is None:
            return None
        process_group = config._flattened_mesh.get_group()
        mesh = Mesh(config.ring_degree * config.ulysses_degree, config.ulysses_degree)
        groups = _groups.setdefault(process_group, {})
        if mesh not in groups:
            place = None if config._flattened_mesh.device_type == "cuda" else "cpu"
            groups[mesh] = on_process_group(process_group, mesh, device=place)
        return cls(groups[mesh], bool(config.convert_to_fp32))

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, min_length: int) -> str | None:
        """Return why this rank's facts prevent a shared call, or None."""
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if recorded and q.dtype == torch.float32:
            return "gradients in float32"
        if min(q.shape[2], k.shape[2]) * self.group.size < min_length:
            return f"fewer than {min_length} queries or keys"
        if mask is None:
            return None
        if kind := masks.obstacle_of_kind(mask, q):
            return kind
        if mask.requires_grad:
            return "gradients of an attention mask"
        batch, heads = ((1, 1, 1, 1) + tuple(mask.shape))[mask.ndim :][:2]
        if mask.ndim not in (1, 2, 3, 4) or heads != 1 or batch not in (1, len(q)):
            return "attention mask of heads, in context parallelism"
        return None

    def agreed(self, own: Said) -> tuple[str | None, list[Said]]:
        """Return why some rank cannot take the call, or None, and the facts of all ranks.

        Raises
        ------
        RankError
            If a rank has failed, or does not answer within the timeout.
        """
        given = self.group.gather(WHAT, [own.obstacle, own.len_q, own.len_kv, own.mask])
        said = [
            Said(obstacle, len_q, len_kv, None if mask is None else tuple(mask))
            for obstacle, len_q, len_kv, mask in given
        ]
        if own.obstacle is not None:
            return own.obstacle, said
        for rank, one in enumerate(said):
            if one.obstacle is not None:
                return f"{one.obstacle} (rank {rank})", said
        return _misfit(said), said

    def attend(
        self, form: Mapping[str, Any], given: Mapping[str, Tensor], said: list[Said]
    ) -> tuple[ShardedCall, Tensor]:
        """Return a description of the call, and O of this rank's rows.

        Parameters
        ----------
        form : mapping
            ``variant``, ``quant``, ``tiles``, ``scale``, ``backend``, ``arch`` and ``accuracy`` of
            `cupyattn.attention`.
        given : mapping of str to Tensor
            q, k, v, (batch, heads, len, head_dim), and `mask` or `bias` if the call has one.
        said : list of Said
            Facts of each rank.
        """
        settings = ShardedSettings(
            Settings(**form), "auto", None, "contiguous", wide_sums=self.wide_sums
        )
        qkv = {name: given[name] for name in "qkv"}
        masked = {name: given[name] for name in ("mask", "bias") if name in given}
        with on_device_of(given["q"]):
            scores = self._scores(masked, said) if masked else NO_SCORES
            call, o, _ = on_ranks(WHAT, settings, self.group, qkv, scores, finish=False)
        return call, o

    def _scores(self, masked: Mapping[str, Tensor], said: list[Said]) -> Scores:
        """Return the mask of all keys: unchanged, or joined from all ranks."""
        ((name, tensor),) = masked.items()
        own = as_array(tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape)))
        group = self.group
        if own.shape[3] == sum(one.len_kv for one in said):
            return Scores({name: own})
        xp = array_namespace(own)
        own = xp.ascontiguousarray(own)
        shapes = [(*own.shape[:3], one.len_kv) for one in said]
        parts = [
            own if rank == group.rank else xp.empty(shape, own.dtype)
            for rank, shape in enumerate(shapes)
        ]
        others = [Message(rank, x) for rank, x in enumerate(parts) if rank != group.rank]
        with group.failing_together(WHAT):
            group.exchange([one._replace(array=own) for one in others], others).wait()
        return Scores({name: xp.concatenate(parts, axis=3)})


#: Ranks that share a call, and their facts.
Shared = tuple[Ranks, list[Said]]


def facts_of_call(obstacle: str | None, q: Tensor, k: Tensor, mask: Any) -> Said:
    """Return this rank's facts about a call on tensors (batch, heads, len, head_dim)."""
    if obstacle is not None or mask is None:
        return Said(obstacle, int(q.shape[2]), int(k.shape[2]), None)
    rows, keys = (1, *mask.shape)[-2:]
    return Said(None, int(q.shape[2]), int(k.shape[2]), (int(rows), int(keys)))


def _misfit(said: list[Said]) -> str | None:
    """Return why the masks of ranks do not fit a call of all keys, or None."""
    found = [one.mask for one in said]
    if found == [None] * len(found):
        return None
    if None in found:
        return "attention masks on some ranks alone"
    rows, keys = sum(one.len_q for one in said), sum(one.len_kv for one in said)
    of_rows, of_keys = ([mask[n] for mask in found if mask] for n in (0, 1))
    if not all(n in (1, rows) for n in of_rows) or len(set(of_rows)) > 1:
        return "attention mask whose rows are not all ranks' queries"
    if of_keys not in ([keys] * len(said), [one.len_kv for one in said]):
        return "attention mask whose keys are neither one rank's nor all ranks'"
    return None


def words(call: ShardedCall) -> str:
    """Return how ranks shared a call, for reports.

    A ring of ``fa_int8`` passes codes on; all other arrays travel unchanged.
    """
    mesh = call.mesh
    what = "codes" if mesh.ring > 1 and call.described.variant.family == "int8" else "16 bits"
    if call.described.call.dtype == "float32" and what != "codes":
        what = "32 bits"
    shape = [f"{n} {name}" for name, n in (("ring", mesh.ring), ("ulysses", mesh.ulysses)) if n > 1]
    return f"{' x '.join(shape)}, {what}"
