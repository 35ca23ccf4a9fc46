"""Program of ranks started by torchrun: ``python -m tests.interop.torch_ranks KIND NAME [...]``.

KIND is "cpu" (gloo, NumPy arrays) or "cuda" (NCCL, CuPy arrays, a device for each rank). A rank
that finds something else than it should ends with an error, and all of them with it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cupyattn as ca
from cupyattn import distributed
from cupyattn.distributed import Mesh, Partition, Shared

SEED = 5
KIND = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def gathered(value: Any) -> list[Any]:
    """Gather the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def normal(*shape: int, seed: int = SEED) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(KIND)


# ---- groups --------------------------------------------------------------------------------------


def groups() -> None:
    """The default group, a mesh with one axis and one with two: J2, gradients, and their names."""
    size = dist.get_world_size()
    two = init_device_mesh(KIND, (2, size // 2), mesh_dim_names=("ring", "ulysses"))
    found = [
        (distributed.from_torch(), None),
        (distributed.from_torch(method="ring"), Mesh(size, 1)),
        (distributed.from_torch(init_device_mesh(KIND, (size,), mesh_dim_names=("ulysses",))),
         Mesh(size, size)),
        (distributed.from_torch(two), Mesh(size, size // 2)),
    ]  # fmt: skip
    rows = Partition.zigzag(40, size)
    whole = [normal(1, 4, 40, 16, seed=n).half() for n in range(4)]
    for group, mesh in found:
        assert (group.rank, group.size, group.mesh) == (dist.get_rank(), size, mesh)
        *own, d_out = (
            torch.from_numpy(rows.take(x.cpu().numpy(), group.rank)).to(KIND) for x in whole
        )
        own = [x.requires_grad_() for x in own]
        o, lse = distributed.parallel_attention(
            *own, group, "auto" if mesh else "ulysses", causal=True, partition="zigzag",
            variant="fa_tc", return_lse=True,
        )
        gradients = torch.autograd.grad(o, own, d_out)
        parts = gathered([x.detach().cpu().numpy() for x in (o, *gradients)])
        joined = [rows.join([part[n] for part in parts]) for n in range(4)]
        of_lse = rows.join(gathered(lse.detach().cpu().numpy()), axis=-1)
        shared = Shared(mesh or Mesh(size, size), rows, rows)
        options: dict[str, Any] = {"causal": True}
        how = {"variant": "fa_tc", **options}
        assert distributed.judge(joined[0], *whole[:3], shared, **how) <= 1
        given = whole[3], *whole[:3], joined[0], of_lse
        assert distributed.judge_backward(joined[1:], *given, shared, **options) <= 1
        group.close()
    part = distributed.from_torch(two["ring"])
    assert part.mesh == Mesh(2, 1) and part.size == 2
    for mesh, method in ((init_device_mesh(KIND, (size,), mesh_dim_names=("ring",)), "ulysses"),
                         (init_device_mesh(KIND, (2, size // 2)), "ring")):  # fmt: skip
        with contextlib.suppress(ValueError):
            distributed.from_torch(mesh, method)
            raise AssertionError("a mesh and a method that differ were taken")


# ---- diffusers -----------------------------------------------------------------------------------


def wan(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model of two blocks, whose text stays whole on every rank, and its inputs."""
    import diffusers

    torch.manual_seed(SEED)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=32, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=64, num_layers=2, rope_max_seq_len=64,
    ).to(KIND, dtype)  # fmt: skip
    return model, (normal(1, 4, 5, 6, 16).to(dtype), torch.tensor([500], device=KIND),
                   normal(1, 6, 16).to(dtype)), {}  # fmt: skip


def wan_uneven(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same with 135 tokens, which no number of ranks here divides."""
    model, (_, *rest), _ = wan(dtype)
    return model, (normal(1, 4, 5, 6, 18).to(dtype), *rest), {}


def qwen(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model of two blocks with joint text tokens, and a mask of these."""
    import diffusers

    torch.manual_seed(SEED)
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    ).to(KIND, dtype)  # fmt: skip
    mask = torch.ones(1, 8, dtype=torch.bool, device=KIND)
    mask[:, 5:] = False
    return model, (), {
        "hidden_states": normal(1, 64, 16).to(dtype),
        "timestep": torch.tensor([0.5]).to(KIND, dtype),
        "encoder_hidden_states": normal(1, 8, 16).to(dtype), "encoder_hidden_states_mask": mask,
        "img_shapes": [(1, 8, 8)],
    }  # fmt: skip


class Seen:
    """Attention that ranks shared: operands and results of this rank."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        from cupyattn.interop.diffusers.context_parallel import Ranks

        own = Ranks.attend

        def attend(ranks: Any, form: Any, given: Any, said: Any) -> Any:
            call, o = own(ranks, form, given, said)
            self.calls.append({
                "q": given["q"], "k": given["k"], "v": given["v"], "o": o, "call": call,
                "mask": given.get("mask"), "sent": ranks.group.bytes_sent,
            })  # fmt: skip
            return call, o

        Ranks.attend = attend  # type: ignore[method-assign]
        try:
            yield
        finally:
            Ranks.attend = own  # type: ignore[method-assign]

    def judge(self, wide_sums: bool) -> None:
        """Hold every call to its bound: J2 of all ranks' rows, without the keys that are masked."""
        for one in self.calls:
            call = one["call"]
            arrays = {name: as_numpy(one[name]) for name in "qkvo"}
            parts = gathered(arrays)
            masks = gathered(None if one["mask"] is None else as_numpy(one["mask"]).reshape(-1))
            q, k, v, o = (np.concatenate([p[name] for p in parts], axis=2) for name in "qkvo")
            kept = [p["k"].shape[2] for p in parts]
            variant = call.described.variant.name
            options: dict[str, Any] = {"scale": call.described.call.scale, "wide_sums": wide_sums}
            if masks[0] is not None:
                every = np.concatenate(masks)
                assert not every.all()
                if variant == "fa_int8":  # whose codes are made of all keys: see the whole model
                    continue
                k, v, kept = k[:, :, every], v[:, :, every], [int(m.sum()) for m in masks]
            if variant == "fa_int8":
                options["quant"] = call.calls.settings.quant
            rows = Partition.contiguous([p["q"].shape[2] for p in parts])
            shared = Shared(call.mesh, rows, Partition.contiguous(kept))
            assert distributed.judge(o, q, k, v, shared, variant=variant, **options) <= 1


def as_numpy(x: torch.Tensor) -> np.ndarray:
    from cupyattn.interop.torch.bridge import as_array

    return np.array(as_array(x.detach().cpu()))


def uneven_on_gloo() -> None:
    """Let diffusers bring tensors of several lengths together, which gloo refuses."""
    from diffusers.hooks import context_parallel

    def bring_together(tensor: Any, dim: int, group: Any) -> Any:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, tensor.detach(), group=group)
        return torch.cat(found, dim=dim)

    context_parallel._all_gather_anything = bring_together


def context_parallel(
    make: str, ring: str, ulysses: str, mode: str, dtype: str, extra: str = "{}"
) -> None:
    """A model of diffusers on all ranks and on one: J2 of each call, results, report, gradients."""
    import diffusers

    from cupyattn.interop.diffusers import replace_attention_with_int8

    if KIND == "cpu":
        torch.accelerator.device_count = lambda: 1  # type: ignore[assignment]
        uneven_on_gloo()
    diffusers.utils.logging.set_verbosity_error()
    options, way = json.loads(extra), globals()[make]
    train = bool(options.pop("train", False))
    kind = getattr(torch, dtype)
    native, args, kwargs = way(kind)
    context = torch.enable_grad if train else torch.no_grad
    quant = {"quant": ca.QuantConfig(smooth_k=False)} if mode != "precision" else {}
    with context():
        expected = native(*args, **kwargs, return_dict=False)[0]
        alone, *_ = way(kind)
        with replace_attention_with_int8(alone, policy=mode, min_length=1, **quant):
            one = alone(*args, **kwargs, return_dict=False)[0]
        model, *_ = way(kind)
        handle = replace_attention_with_int8(model, policy=mode, min_length=1, **quant)
        model.enable_parallelism(
            config=diffusers.ContextParallelConfig(
                ring_degree=int(ring), ulysses_degree=int(ulysses), **options
            )
        )
        seen = Seen()
        with seen.watching():
            found = model(*args, **kwargs, return_dict=False)[0]
    report = handle.report()
    assert len(seen.calls) == 2 and sum(report.on_ranks.values()) == 2, report
    int8 = mode != "precision"
    codes = int8 and int(ring) > 1
    travels = "codes" if codes else "32 bits" if kind == torch.float32 else "16 bits"
    mesh = [f"{n} {name}" for n, name in ((ring, "ring"), (ulysses, "ulysses")) if n != "1"]
    assert report.on_ranks == {f"{' x '.join(mesh)}, {travels}": 2}, report
    assert set(report.modes) == {mode} and "context parallelism" not in str(report.native)
    seen.judge(options.get("convert_to_fp32", True))
    far = (one - expected).abs().max().item()
    own = (found - expected).abs().max().item()
    room = 1e-5 if kind == torch.float32 else 2**-6  # of a model whose output is about 1
    assert own <= room + (2 * far if int8 else 0), (own, far)
    if train:
        expected.square().mean().backward()
        found.square().mean().backward()
        wanted = dict(native.named_parameters())
        for name, parameter in model.named_parameters():
            if re.search(r"attn1?\.to_[qkv]\.weight", name):
                total = parameter.grad.float()
                dist.all_reduce(total)
                other = wanted[name].grad.float()
                assert (total - other).abs().max() <= 2**-5 * other.abs().max(), name
    if dist.get_rank() == 0:
        print(f"{make} {ring} x {ulysses} {mode}: {own:.2e} from native, one process {far:.2e}; "
              f"sent {seen.calls[-1]['sent']}")  # fmt: skip


def compiled(ring: str, ulysses: str) -> None:
    """Compiled models: a ring runs between graphs, exchanged heads within them."""
    import diffusers

    from cupyattn.interop.diffusers import replace_attention_with_int8

    if KIND == "cpu":
        torch.accelerator.device_count = lambda: 1  # type: ignore[assignment]
    diffusers.utils.logging.set_verbosity_error()
    model, args, _ = wan(torch.bfloat16)
    with torch.no_grad():
        expected = model(*args, return_dict=False)[0]
        handle = replace_attention_with_int8(model, policy="balanced", min_length=1)
        degrees = {"ring_degree": int(ring), "ulysses_degree": int(ulysses)}
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
        model.compile()
        found = [model(*args, return_dict=False)[0] for _ in range(2)]
    assert torch.equal(*found) and (found[0] - expected).abs().max() <= 2**-5
    report = handle.report()
    if ring != "1":
        assert report.on_ranks == {f"{ring} ring, codes": 4}, report
    else:
        assert [layer.compiled for layer in report.layers] == [("balanced",)] * 4, report


# ---- faults --------------------------------------------------------------------------------------


def fault(kind: str) -> None:
    """Rank 1 raises, dies or differs; the others print what they are told."""
    group = distributed.from_torch(method="ring", timeout=15)
    x = normal(1, 2, 8, 16).half()
    distributed.parallel_attention(x, x, x, group)
    group.barrier()  # or a rank fails that is still in this call
    options = {}
    if group.rank == 1:
        if kind == "raises":
            with contextlib.suppress(KeyError), group:
                raise KeyError("of the caller")
            os._exit(3)
        if kind == "dies":
            os._exit(9)
        if kind == "dies while it sends":
            group.prepare = lambda *_: os._exit(9)
        if kind == "differs":
            options["scale"] = 0.5
    try:
        distributed.parallel_attention(x, x, x, group, **options)
    except distributed.RankError as error:
        print(f"rank {group.rank} says: {error}", flush=True)
        if kind == "differs":  # which was found before anything travelled: the group goes on
            group.barrier()
            return
        time.sleep(0 if group.rank else 2)  # rank 0 holds the store of torch
        os._exit(7)  # torch's group has a rank that does not close it
    raise AssertionError("a call of ranks one of which failed has ended")


def model_fault(kind: str) -> None:
    """Rank 1 ends within a model; the others say what they are told, in torch's timeout."""
    import diffusers

    from cupyattn.distributed import parallel
    from cupyattn.interop.diffusers import replace_attention_with_int8

    if KIND == "cpu":
        torch.accelerator.device_count = lambda: 1  # type: ignore[assignment]
    diffusers.utils.logging.set_verbosity_error()
    model, args, _ = wan(torch.bfloat16)
    replace_attention_with_int8(model, policy="balanced", min_length=1)
    size = dist.get_world_size()
    model.enable_parallelism(config=diffusers.ContextParallelConfig(ring_degree=size))

    def fail(*_: Any) -> Any:
        if kind == "dies":
            os._exit(9)
        raise MemoryError("no room")

    if dist.get_rank() == 1:
        parallel.compute = fail
    try:
        with torch.no_grad():
            model(*args, return_dict=False)
    except (distributed.RankError, MemoryError) as error:
        print(f"rank {dist.get_rank()} says: {error}", flush=True)
        time.sleep(0 if dist.get_rank() else 2)  # rank 0 holds the store of torch
        os._exit(7)
    raise AssertionError("a model of ranks one of which failed has ended")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if KIND == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    name, *args = sys.argv[2:]
    limit = {"timeout": datetime.timedelta(seconds=15)} if name == "model_fault" else {}
    dist.init_process_group("nccl" if KIND == "cuda" else "gloo", **limit)
    globals()[name](*args)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # NOTE: a thread of gloo may let go of a tensor late. If the interpreter ends meanwhile, torch
    # aborts: "terminate called without an active exception". So this process ends without that.
    os._exit(0)


if __name__ == "__main__":
    main()
