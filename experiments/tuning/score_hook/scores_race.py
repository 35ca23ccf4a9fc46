"""What do softcap, bias and mask cost in fa_tc's Hopper form, as a hook before its softmax?

Varies       the feature: key padding (27 % of the keys of three entries of four), a half-true
             random mask shared by heads, a bias (heads, len, len) shared over the batch, softcap
             30 with scores that its polynomial holds and with others; tiles; head_dim
Holds fixed  16,384 tokens, length 4096, heads x head_dim = 2048, bfloat16, N(0, 1)
Measures     registers and spills; error as a fraction of a derived bound; time of a whole call,
             packing of masks included, and in the same rounds its ratio to the plain Hopper form
             and to the fastest of cuDNN, torch's efficient backend and FlexAttention
Expect       key padding at most 1.08 of plain by admitted keys, the random mask 1.35, bias 1.5,
             softcap 1.5 at head_dim 128 and 1.9 at 64
Run          python -m experiments.tuning.score_hook.scores_race [--json FILE]
             [--quick | --interpret] [--head-dims N ...] [--rounds N] [--seconds N] [--no-peers]

With ``--interpret`` small calls run in the interpreter, without a device and without times; with
``--quick`` they run on the device if there is one, and nothing is timed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.operand import Operand
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.measure import device, timing, words
from cupyattn.plans.records import Plan
from cupyattn.problem.call import AttentionSpec
from cupyattn.runtime import ready
from experiments._harness import recording
from experiments.tuning.score_hook.checks import FAILURES, check, dtype_of, judge, make, small_cases
from experiments.tuning.score_hook.hook_plans import (
    ARCH,
    CANDIDATES,
    PROBES,
    Choice,
    Hook,
    plain_plan,
    plan_of,
    resources,
)

TOKENS, WIDTH, LENGTH = 16_384, 2048, 4096
FEATURES = ("key padding", "mask", "bias", "bias of keys", "softcap", "softcap, large")
#: Share of the keys that an entry with padding keeps, of three entries of four.
KEPT = 0.73
#: What a feature is to be at most, as a multiple of plain: by head_dim.
AIMS = {
    "key padding": (1.08, 1.08), "mask": (1.35, 1.35), "bias": (1.5, 1.5),
    "bias of keys": (1.5, 1.5), "softcap": (1.9, 1.5),
}  # fmt: skip
LARGE = 20.0  # times q: scores whose tanh is no polynomial


@dataclass
class Timed:
    """One call to be timed: what it is, and the facts that its row has."""

    feature: str
    name: str
    run: Callable[[int], Any]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """The inputs of one head_dim on the device, and a clock that peers must keep to."""

    head_dim: int
    seed: int
    ends: float  #: time.monotonic() after which no more peers are compiled

    def __post_init__(self) -> None:
        import cupy

        rng = np.random.default_rng(self.seed)
        self.batch, self.heads = TOKENS // LENGTH, WIDTH // self.head_dim
        shape = self.batch, self.heads, LENGTH, self.head_dim
        drawn = [rng.standard_normal(shape, np.float32) for _ in range(3)]
        bfloat16 = dtype_of("bfloat16")
        self.inputs = tuple(cupy.asarray(x.astype(bfloat16)) for x in drawn)
        self.sets = [(q, k, v) for q, k, v in timing.rotated(self.inputs)]
        large_q = cupy.asarray((LARGE * drawn[0]).astype(bfloat16))
        self.large = [(large_q, k, v) for _, k, v in self.sets]
        self.call = AttentionSpec(
            self.batch, self.heads, self.heads, LENGTH, LENGTH, self.head_dim, "bfloat16",
            self.head_dim**-0.5,
        )  # fmt: skip
        self.lengths = np.full(self.batch, LENGTH, np.int32)
        self.lengths[1:] = int(KEPT * LENGTH)
        keys = np.arange(LENGTH) < self.lengths[:, None, None, None]
        rows = rng.random((1, 1, LENGTH, LENGTH)) < 0.5
        bias = cupy.empty((1, self.heads, LENGTH, LENGTH), np.float16)
        one = cupy.asarray(rng.standard_normal((LENGTH, LENGTH), np.float32).astype(np.float16))
        for head in range(self.heads):
            bias[0, head] = cupy.roll(one, 37 * head, axis=1)
        self.hooks = {
            "key padding": Hook(mask=cupy.asarray(keys)), "mask": Hook(mask=cupy.asarray(rows)),
            "bias": Hook(bias=bias), "softcap": Hook(30.0), "softcap, large": Hook(30.0),
            "bias of keys": Hook(bias=cupy.ascontiguousarray(bias[:, :, :1])),
            "bias, one head": Hook(bias=bias[:, :1]),
            "bias, loaded once": Hook(bias=bias, bias_loads=False),
            "mask, all true": Hook(mask=cupy.asarray(np.ones_like(rows))),
            "mask, lower half": Hook(mask=cupy.asarray(np.tril(np.ones_like(rows)))),
        }  # fmt: skip
        self.o = self.empty_output()

    def empty_output(self) -> Any:
        """Return an output in which nothing is written yet: NaN."""
        import cupy

        return cupy.asarray(np.full(self.call.output_shape, np.nan, dtype_of("bfloat16")))

    def sets_of(self, feature: str) -> list[tuple[Any, Any, Any]]:
        """Return the inputs that a feature is timed on, in turns."""
        return self.large if feature == "softcap, large" else self.sets

    def plan(self, feature: str, choice: Choice) -> Plan:
        """Return the candidate's plan."""
        hook = replace(self.hooks[feature], terms=choice.terms)
        q, k, v = self.inputs
        return plan_of(self.call, hook, choice.tiles, q, k, v, self.o)

    def candidate(self, feature: str, choice: Choice) -> Timed:
        """Return a candidate, judged on some rows of every head."""
        import cupy

        plan, hook, tiles = self.plan(feature, choice), self.hooks[feature], choice.tiles

        def call(q: Any, k: Any, v: Any, o: Any) -> None:
            ready.run(plan, {"q": q, "k": k, "v": v, "o": o, **hook.buffers}, ARCH)

        o, (q, k, v) = self.empty_output(), self.sets_of(feature)[0]
        call(q, k, v, o)
        rows = cupy.asarray([0, 1, 191, 192, 1000, 2047, 3333, LENGTH - 1])
        facts = {"tiles": vars(tiles), **resources(plan)}
        if hook.bias_loads:  # otherwise it is wrong by intent
            facts["j2"] = judge(o, q, k, v, self.call, hook, tiles, rows)
        sets = self.sets_of(feature)
        return Timed(
            feature, f"hook {choice}", lambda i: call(*sets[i % len(sets)], self.o), facts
        )

    def packing(self, feature: str) -> Timed:
        """Return the passes over a mask by themselves, as the first choice has them."""
        choice = CANDIDATES[feature][self.head_dim][0]
        plan, buffers = self.plan(feature, choice), self.hooks[feature].buffers
        q, k, v = self.inputs
        passes = tuple(one for one in plan.launches if one.entry != "attn_fa_tc")
        plan = replace(plan, launches=passes)
        return Timed(
            feature, "packing alone",
            lambda i: ready.run(plan, {"q": q, "k": k, "v": v, "o": self.o, **buffers}, ARCH),
        )  # fmt: skip

    def plain(self) -> Timed:
        """Return plain attention in the Hopper form."""
        plan = plain_plan(self.call, *self.sets[0], self.o)

        def run(i: int) -> None:
            q, k, v = self.sets[i % len(self.sets)]
            ready.run(plan, {"q": q, "k": k, "v": v, "o": self.o}, ARCH)

        return Timed("plain", "plain", run, resources(plan))

    def today(self, feature: str) -> Timed:
        """Return what ``cupyattn.attention`` does today: the portable form."""
        hook = self.hooks[feature]
        given: dict[str, Any] = {"softcap": hook.softcap} if hook.softcap else hook.buffers
        prepared = ca.plan(*self.inputs, variant="fa_tc", **given)
        sets = self.sets_of(feature)
        return Timed(feature, "portable", lambda i: prepared(*sets[i % len(sets)]))

    # ---- other libraries

    def tensors(self, feature: str) -> list[tuple[Any, ...]]:
        """Return the inputs as torch tensors of the same memory."""
        return [tuple(tensor(x) for x in one) for one in self.sets_of(feature)]

    def sdpa(self, feature: str, backend: str) -> Timed:
        """Return torch's attention with a mask or a bias."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        hook, sets = self.hooks[feature], self.tensors(feature)
        mask = tensor(hook.mask) if hook.bias is None else tensor(hook.bias).to(torch.bfloat16)
        which = getattr(SDPBackend, backend)

        def run(i: int) -> Any:
            with sdpa_kernel(which):
                return torch.nn.functional.scaled_dot_product_attention(
                    *sets[i % len(sets)], attn_mask=mask
                )

        name = {"CUDNN_ATTENTION": "cuDNN", "EFFICIENT_ATTENTION": "efficient"}[backend]
        facts = {"peer": True, "difference": self.difference(run, feature)}
        return Timed(feature, name, run, facts)

    def flex(self, feature: str) -> Timed:
        """Return FlexAttention, compiled, its block mask made beforehand."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        hook, sets = self.hooks[feature], self.tensors(feature)
        options: dict[str, Any] = {}
        if feature == "key padding":
            lengths = torch.from_numpy(self.lengths).cuda()
            options["block_mask"] = create_block_mask(
                lambda b, h, q, kv: kv < lengths[b], self.batch, None, LENGTH, LENGTH, "cuda"
            )
        elif feature == "mask":
            mask = tensor(hook.mask)[0, 0]
            options["block_mask"] = create_block_mask(
                lambda b, h, q, kv: mask[q, kv], None, None, LENGTH, LENGTH, "cuda"
            )
        elif feature.startswith("bias"):
            bias, dense = tensor(hook.bias)[0], not hook.bias_of_keys
            options["score_mod"] = lambda score, b, h, q, kv: score + bias[h, q if dense else 0, kv]
        else:
            cap = hook.softcap
            options["score_mod"] = lambda score, b, h, q, kv: cap * torch.tanh(score / cap)
        if feature == FEATURES[0]:  # once a head_dim: code compiled before it would be lost, too
            torch.compiler.reset()
        compiled = torch.compile(flex_attention, dynamic=False)

        def run(i: int) -> Any:
            return compiled(*sets[i % len(sets)], **options)

        facts = {"peer": True, "difference": self.difference(run, feature)}
        return Timed(feature, "FlexAttention", run, facts)

    def difference(self, run: Callable[[int], Any], feature: str) -> float:
        """Return how far a peer is from the candidate at most, on the same input."""
        import cupy

        plan = self.plan(feature, CANDIDATES[feature][self.head_dim][0])
        hook = self.hooks[feature]
        q, k, v = self.sets_of(feature)[0]
        ready.run(plan, {"q": q, "k": k, "v": v, "o": self.o, **hook.buffers}, ARCH)
        theirs = cupy.from_dlpack(run(0).detach().float().contiguous())
        return float(cupy.abs(theirs - self.o.astype(np.float32)).max())

    def calls(self) -> Iterator[functools.partial[Timed]]:
        """Yield what makes each call that is timed; peers last, as they may take no time left."""
        yield functools.partial(self.plain)
        for feature in FEATURES:
            for choice in CANDIDATES[feature][self.head_dim]:
                yield functools.partial(self.candidate, feature, choice)
        for probe, feature in PROBES.items():
            yield functools.partial(self.candidate, probe, CANDIDATES[feature][self.head_dim][0])
        for feature in ("key padding", "mask"):
            yield functools.partial(self.packing, feature)
        for feature in FEATURES[:-1]:
            yield functools.partial(self.today, feature)

    def peers(self) -> Iterator[functools.partial[Timed]]:
        """Yield what makes the calls of other libraries."""
        for feature in ("key padding", "mask", "bias", "bias of keys"):
            for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
                yield functools.partial(self.sdpa, feature, backend)
        for feature in FEATURES[:-1]:
            yield functools.partial(self.flex, feature)


def tensor(x: Any) -> Any:
    """Return a CuPy array as a torch tensor of the same memory."""
    import torch

    if x.dtype == bool:
        return torch.from_dlpack(x.view(np.uint8)).view(torch.bool)
    return torch.from_dlpack(x)


def compile_all(args: argparse.Namespace) -> None:
    """Compile what a run on a device needs, several modules at a time; print spills."""
    modules: dict[ModuleSpec, str] = {}
    for case in small_cases(tuple(args.head_dims), quick=not args.all):
        q, k, v, call, hook = make(case)
        plan = plan_of(call, hook, case.tiles, q, k, v, np.empty(call.output_shape, q.dtype))
        modules |= {one.module: "" for one in plan.launches}
    for head_dim in args.head_dims:
        batch, heads = TOKENS // LENGTH, WIDTH // head_dim
        call = AttentionSpec(
            batch, heads, heads, LENGTH, LENGTH, head_dim, "bfloat16", head_dim**-0.5
        )
        operand = np.lib.stride_tricks.as_strided(
            np.zeros(8, dtype_of("bfloat16")), call.output_shape,
            tuple(2 * s for s in Operand.contiguous(call.output_shape, 2).strides),
        )  # fmt: skip
        plain = plain_plan(call, *[operand] * 4)
        modules |= {one.module: "" for one in plain.launches}
        shapes = {"key padding": (batch, 1, 1, LENGTH), "mask": (1, 1, LENGTH, LENGTH)}
        for feature in FEATURES:
            hook = Hook(30.0) if feature.startswith("softcap") else Hook()
            if feature in shapes:
                hook = Hook(mask=np.zeros(shapes[feature], bool))
            if feature.startswith("bias"):
                zero, rows = np.zeros(1, np.float16), LENGTH if feature == "bias" else 1
                hook = Hook(bias=np.broadcast_to(zero, (1, heads, rows, LENGTH)))
            for choice in CANDIDATES[feature][head_dim]:
                own = replace(hook, terms=choice.terms)
                plan = plan_of(call, own, choice.tiles, *[operand] * 4)
                title = f"hd{head_dim} {feature} {choice}"
                modules |= {
                    one.module: title if one.entry == "attn_fa_tc" else "" for one in plan.launches
                }
    with ThreadPoolExecutor(args.threads) as pool:
        built = pool.map(lambda one: compiler.build(one, ARCH), modules)
        for (_, title), binary in zip(modules.items(), built, strict=True):
            if title:
                taken = binary.kernels["attn_fa_tc"]
                print(
                    f"{title}: {taken.registers} registers, spills {taken.spill_stores} + "
                    f"{taken.spill_loads}, {binary.smem_bytes} bytes shared"
                    f"{', wgmma SERIALISED' if 'serialized' in binary.log else ''}",
                    flush=True,
                )


def measure(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge and time all calls of one head_dim in one interleaved run; return their rows."""
    timed: list[Timed] = []
    makers = [(make_one, False) for make_one in bench.calls()]
    makers += [(make_one, True) for make_one in bench.peers()] if args.peers else []
    for make_one, is_peer in makers:
        if is_peer and time.monotonic() > bench.ends:
            print(f"no time left for {make_one.args}")
            continue
        began = time.monotonic()
        try:
            one = make_one()
            one.run(0)
            device_synchronize()
        except FAILURES as error:  # a peer or a candidate that does not take the call
            said = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"left out: {make_one.args}: {said}", flush=True)
            continue
        said = f"J2 {one.facts['j2']:.3f}" if "j2" in one.facts else ""
        if "difference" in one.facts:
            said = f"differs by {one.facts['difference']:.2e}"
        print(
            f"  {one.feature}, {one.name}: {said} ({time.monotonic() - began:.1f} s)", flush=True
        )
        if one.facts.get("j2", 0.0) <= 1:
            timed.append(one)
    names = [f"{one.feature}|{one.name}" for one in timed]
    samples = timing.time_interleaved(
        dict(zip(names, (one.run for one in timed), strict=True)), rounds=args.rounds
    )
    plain = samples["plain|plain"]
    rows = []
    for name, one in zip(names, timed, strict=True):
        found = samples[name]
        rows.append({
            "feature": one.feature, "name": one.name, **one.facts,
            "seconds": timing.median(found).to_list(), "samples": found,
            "ratio": timing.paired_ratio(found, plain).to_list(),
        })  # fmt: skip
    return rows


def device_synchronize() -> None:
    """Wait for the device, so that an error is told where it was made."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def table(rows: list[dict[str, Any]], head_dim: int, lengths: Any) -> list[list[str]]:
    """Return the lines of one head_dim: times, ratios to plain and to the fastest peer."""
    result = [
        ["", "call", "time", "x plain", "x admitted", "aim", "x best peer", "best peer", "J2"]
    ]
    for feature in ("plain", *FEATURES, *PROBES):
        own = [row for row in rows if row["feature"] == feature]
        peers = [row for row in own if row.get("peer")]
        best = min(peers, key=lambda row: row["seconds"][0], default=None)
        share = float(np.mean(lengths)) / LENGTH if feature == "key padding" else 1.0
        aim = AIMS.get(feature)
        for row in own:
            is_hook = row["name"].startswith("hook")
            result.append([
                feature, row["name"], words.format_seconds(row["seconds"][0]),
                f"{row['ratio'][0]:.3f}", f"{row['ratio'][0] / share:.3f}" if share < 1 else "",
                f"{aim[head_dim == 128]:.2f}" if aim and is_hook else "",
                f"{row['seconds'][0] / best['seconds'][0]:.2f}" if best and is_hook else "",
                best["name"] if best and is_hook else "",
                f"{row['j2']:.2f}" if "j2" in row else "",
            ])  # fmt: skip
    return result


def run(args: argparse.Namespace) -> int:
    """Check small calls, then judge and time large ones."""
    began = time.monotonic()
    if args.interpret or (args.quick and device.device_missing()):
        return 0 if all(one["ok"] for one in check(args, on_device=False)) else 1
    recording.check_rounds(args)
    compile_all(args)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    checked = check(args, on_device=True)
    print(f"checked after {time.monotonic() - began:.0f} s", flush=True)
    content: dict[str, Any] = {"rounds": args.rounds, "checked": checked, "problems": []}
    failed = False
    for i, head_dim in enumerate([] if args.quick else args.head_dims):
        left = began + args.seconds - time.monotonic()
        ends = time.monotonic() + left * (0.9 if i + 1 == len(args.head_dims) else 0.45)
        bench = Bench(head_dim, args.seed, ends)
        try:
            rows = measure(bench, args)
        except FAILURES as error:  # the other head_dim may do better
            print(f"head_dim {head_dim} failed: {type(error).__name__}: {error}", flush=True)
            failed = True
            continue
        lines = table(rows, head_dim, bench.lengths)
        print(f"\nhead_dim {head_dim}, {device.environment()['device']['name']}")
        output.print_table(lines[0], lines[1:])
        content["problems"].append({"head_dim": head_dim, "rows": rows})
        recording.keep(args, "score_hook", "cuda", content)
        del bench, rows
        print(f"head_dim {head_dim} done after {time.monotonic() - began:.0f} s", flush=True)
    return 0 if all(one["ok"] for one in checked) and not failed else 1


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--interpret", action="store_true", help="small calls, without a device")
    parser.add_argument("--only", default="", metavar="WORD", help="small calls so named")
    parser.add_argument("--all", action="store_true", help="small calls with more tiles")
    parser.add_argument("--trace", action="store_true", help="where a small call failed")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], metavar="N")
    parser.add_argument("--seconds", type=float, default=450.0, help="peers start no later")
    parser.add_argument("--threads", type=int, default=12, help="compilations at a time")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    args = parser.parse_args(argv)
    if args.interpret:
        return recording.guarded(run, args)
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
