"""How fast are INT8 linear layers of torch beside BF16 and comfy-kitchen?

Varies       the layer, of Flux, Wan 14B, Kandinsky 5 Pro, HunyuanVideo and SD3.5, and a product of
             8,192 cubed by itself; what shares a scale
Holds fixed  N(0, 1) activations and weights in BF16, bias, BF16 out; activations quantised in the
             call
Measures     the largest error as a share of its bound, on 64 rows and 256 columns; time; the ratios
             to the others in the same rounds, and their geometric mean and least; of the product
             TOP/s, with clock and power; of a layer of few rows the host's time for a call
Beside       torch.nn.functional.linear in BF16; comfy-kitchen's int8_linear, given the codes and
             scales of channels, where it is installed (the record says why it is not there); beside
             the product torch._int_mm
Expect       channels 1.6 times BF16 in the geometric mean and 1.35 at least, blocks 1.25 and 1.1,
             1.5 times comfy-kitchen; the product of channels 1,500 TOP/s, 1.6 times torch._int_mm;
             15 us of the host
Run          python -m experiments.speed.int8_layers [--only LABEL] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import as_float64
from cupyattn.cli import output
from cupyattn.measure import device, timing
from cupyattn.quant import gemm_error, gemm_exact
from cupyattn.quant.blocks import BLOCK_SIZE, STRATEGIES
from experiments._harness import others_linear, recording
from experiments._harness.cells import rotating
from experiments._harness.others import format_comparison, geometric_mean
from experiments._harness.others_linear import COMFY
from experiments.speed import host_time
from experiments.speed.gemm import Size

BF16, INT_MM = "torch BF16", "torch._int_mm"
#: Names of the compared layers, in the order of the table.
OTHERS = (BF16, INT_MM, COMFY)
#: Rows of C that are judged, and columns from its first and its last on.
JUDGED_ROWS, JUDGED_COLUMNS = 64, 128

LAYERS = (
    Size("Flux, attention out", 4608, 3072, 3072),
    Size("Flux, qkv", 4608, 9216, 3072),
    Size("Flux, feed-forward in", 4608, 12_288, 3072),
    Size("Flux, feed-forward out", 4608, 3072, 12_288),
    Size("Flux, single block out", 4608, 3072, 15_360),
    Size("Wan 14B, attention", 32_760, 5120, 5120),
    Size("Wan 14B, feed-forward in", 32_760, 13_824, 5120),
    Size("Wan 14B, feed-forward out", 32_760, 5120, 13_824),
    Size("Kandinsky 5 Pro, attention", 16_384, 4096, 4096),
    Size("Kandinsky 5 Pro, feed-forward in", 16_384, 16_384, 4096),
    Size("Kandinsky 5 Pro, feed-forward out", 16_384, 4096, 16_384),
    Size("HunyuanVideo, attention out", 32_896, 3072, 3072),
    Size("HunyuanVideo, single block in", 32_896, 21_504, 3072),
    Size("HunyuanVideo, single block out", 32_896, 3072, 15_360),
    Size("SD3.5 Large, attention", 4096, 2432, 2432),
    Size("SD3.5 Large, feed-forward in", 4096, 9728, 2432),
    Size("SD3.5 Large, feed-forward out", 4096, 2432, 9728),
)
PRODUCT = Size("product", 8192, 8192, 8192)
#: A layer that the device is done with before the host has made the next call.
SMALL = Size("Flux, attention out", 16, 3072, 3072)
QUICK_LAYERS, QUICK_PRODUCT = (Size("small", 80, 264, 272),), Size("product", 70, 136, 256)

Way = Callable[..., Any]


def draw(size: Size, seed: int, where: str) -> tuple[Any, Any, Any]:
    """Return x, weight and bias in BF16, on torch's device of a name."""
    import torch

    generator = torch.Generator(where).manual_seed(seed)

    def normal(*shape: int) -> Any:
        x = torch.randn(shape, generator=generator, device=where, dtype=torch.float32)
        return x.to(torch.bfloat16)

    return normal(size.m, size.k), normal(size.n, size.k), normal(size.n)


def judge(size: Size, x: Any, layer: Any, y: Any, seed: int) -> float:
    """Return the largest error of a layer's product as a share of its bound, on a part of it."""
    from cupyattn.interop.torch.bridge import as_array

    rng = np.random.default_rng(seed)
    rows = np.unique([0, size.m - 1, *rng.integers(0, size.m, JUDGED_ROWS - 2)])
    ends = sorted({0, (size.n - 1) // BLOCK_SIZE})  # blocks of columns
    columns = np.concatenate([np.arange(b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE) for b in ends])
    columns = columns[columns < size.n]
    of_scales = columns if layer.strategy == "channel" else np.array(ends)
    host = [
        as_array(part.detach().cpu().contiguous())
        for part in (
            x[rows], layer.weight_codes[columns], layer.weight_scale[of_scales],
            layer.bias[columns], y[rows][:, columns],
        )
    ]  # fmt: skip
    codes = (*ca.act_quant(host[0], strategy=layer.strategy), *host[1:3])
    error = np.abs(as_float64(host[4]) - gemm_exact(*codes, bias=host[3]))
    return float((error / gemm_error(*codes, "bfloat16", bias=host[3])).max())


def layers_of(weight: Any, bias: Any) -> dict[str, Any]:
    """Return the INT8 layers of a weight by what shares a scale."""
    import torch

    from cupyattn.interop.torch import Int8Linear

    linear = torch.nn.Linear(1, 1, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return {s: Int8Linear.from_linear(linear, strategy=s) for s in STRATEGIES}


def ways_of(
    x: Any, weight: Any, bias: Any, layers: Mapping[str, Any]
) -> tuple[dict[str, Way], dict[str, str]]:
    """Return what runs a layer, by name, each ``way(x, weight, bias, layers)``; and why not."""
    import torch

    ways: dict[str, Way] = {
        strategy: lambda x, w, b, layers, s=strategy: layers[s](x) for strategy in STRATEGIES
    }
    ways[BF16] = lambda x, w, b, layers: torch.nn.functional.linear(x, w, b)
    own, reference = layers["channel"], ways[BF16](x, weight, bias, layers)
    backend = "cuda" if x.is_cuda else "eager"
    try:
        comfy = others_linear.comfy_kitchen(
            x, own.weight_codes, own.weight_scale, bias, reference, backend
        )
    except ca.UnsupportedError as error:
        return ways, {COMFY: " ".join(str(error).split())}
    ways[COMFY] = lambda x, w, b, layers: comfy(
        x, layers["channel"].weight_codes, layers["channel"].weight_scale, b
    )
    return ways, {}


def measure_layer(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Judge both INT8 layers of a size, then time them and the others."""
    import torch

    on_device = not args.quick
    x, weight, bias = draw(size, args.seed, "cuda" if on_device else "cpu")
    row: dict[str, Any] = asdict(size) | {"shares": {}}
    layers = layers_of(weight, bias)
    for strategy, layer in layers.items():
        row["shares"][strategy] = judge(size, x, layer, layer(x), args.seed)
    row["ok"] = max(row["shares"].values()) <= 1
    ways, row["refused"] = ways_of(x, weight, bias, layers)
    if not on_device or not row["ok"]:
        return row
    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    copies = 1 + max(1, -(-cache // (size.n * size.k)))  # of codes alone, which are the least
    sets = [(x, weight, bias, layers)]
    for _ in range(copies - 1):
        sets.append((x.clone(), weight.clone(), bias, layers_of(weight, bias)))
    return row | _timed(ways, sets, args)


def measure_product(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Time the products of codes by themselves, and torch's two; 16-bit out where there are scales.

    Judged are the layers, whose kernels these are.
    """
    import torch

    from cupyattn.interop.torch.bridge import as_array

    on_device = not args.quick
    x, weight, bias = draw(size, args.seed, "cuda" if on_device else "cpu")
    layers = layers_of(weight, bias)
    row: dict[str, Any] = asdict(size) | {"shares": {}}
    for strategy, layer in layers.items():
        row["shares"][strategy] = judge(size, x, layer, layer(x), args.seed)
    row["ok"] = max(row["shares"].values()) <= 1
    if not on_device or not row["ok"]:
        return row
    codes = {}
    for strategy, layer in layers.items():
        a = ca.act_quant(as_array(x), strategy=strategy)
        codes[strategy] = (*a, as_array(layer.weight_codes), as_array(layer.weight_scale))
    a, _, b, _ = (torch.from_dlpack(part) for part in codes["channel"])
    ways: dict[str, Way] = {
        strategy: lambda s=strategy: ca.int8_gemm(*codes[s], "bfloat16") for strategy in STRATEGIES
    }
    ways[INT_MM] = lambda: torch._int_mm(a, b.t())
    ways[BF16] = lambda: torch.nn.functional.linear(x, weight)
    found = _timed(ways, [()], args)
    operations = 2 * size.m * size.n * size.k
    return row | found | {"tops": {n: operations / s / 1e12 for n, s in found["seconds"].items()}}


def measure_host(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Time the host alone, call after call without waiting, of a layer of few rows."""
    import torch

    on_device = not args.quick
    x, weight, bias = draw(size, args.seed, "cuda" if on_device else "cpu")
    given = x, weight, bias, layers_of(weight, bias)
    ways, refused = ways_of(*given)
    row: dict[str, Any] = asdict(size) | {"refused": refused}
    if not on_device:
        return row
    calls = {name: functools.partial(way, *given) for name, way in ways.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            host_time.sample(call, host_time.CALLS, torch.cuda.synchronize)
        for _ in range(args.rounds):
            for name, call in calls.items():
                seconds = host_time.sample(call, host_time.CALLS, torch.cuda.synchronize)
                samples[name].append(seconds)
    found = {name: timing.median(some).to_list() for name, some in samples.items()}
    return row | {"seconds": found, "samples": samples}


def _timed(
    ways: Mapping[str, Way], sets: Sequence[Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Return times of ways that take turns, and how many times as fast ours are as the others."""
    import torch

    calls = {name: rotating(way, sets) for name, way in ways.items()}
    with torch.no_grad():
        samples = timing.time_interleaved(calls, rounds=args.rounds)
    return {
        "seconds": {name: timing.median(found).median for name, found in samples.items()},
        "ratios": {
            f"{mine} over {other}": timing.paired_ratio(samples[other], samples[mine]).to_list()
            for mine in STRATEGIES
            for other in OTHERS
            if other in samples
        },
        "samples": samples,
        "clocks": device.clocks(),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the layers and of the product."""
    header = ["", "m x n x k", "bound", "channel, us", "block, us", f"{BF16}, us"]
    compared = [(s, other) for other in OTHERS for s in STRATEGIES[::-1]]
    header += [f"{mine} x {other}" for mine, other in compared]
    lines = []
    for r in rows:
        seconds, ratios = r.get("seconds", {}), r.get("ratios", {})
        lines.append([
            r["label"], f"{r['m']} x {r['n']} x {r['k']}", f"{max(r['shares'].values()):.3f}",
            *(f"{1e6 * seconds[w]:.4g}" if w in seconds else "-"
              for w in ("channel", "block", BF16)),
            *(format_comparison(ratios.get(f"{mine} over {other}")) for mine, other in compared),
        ])  # fmt: skip
    return header, lines


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the geometric mean and the least of each ratio over layers.

    Examples
    --------
    >>> summary([{"ratios": {"a over b": [2.0]}}, {"ratios": {"a over b": [8.0]}}])
    {'a over b': {'geometric mean': 4.0, 'least': 2.0}}
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, ratio in row.get("ratios", {}).items():
            found.setdefault(name, []).append(ratio[0])
    return {
        name: {"geometric mean": geometric_mean(x), "least": min(x)} for name, x in found.items()
    }


def run(args: argparse.Namespace) -> int:
    """Measure every layer and the product, print the tables, write the record."""
    recording.check_rounds(args)
    sizes = QUICK_LAYERS if args.quick else LAYERS
    sizes = tuple(x for x in sizes if args.only is None or x.label.startswith(args.only))
    rows = [measure_layer(size, args) for size in sizes]
    product = measure_product(QUICK_PRODUCT if args.quick else PRODUCT, args)
    output.print_table(*table([*rows, product]))
    if "tops" in product:
        tops = ", ".join(f"{name} {x:.4g}" for name, x in product["tops"].items())
        print(f"\nthe product by itself, TOP/s: {tops}; {product['clocks']}")
    host = measure_host(QUICK_LAYERS[0] if args.quick else SMALL, args)
    for name, (seconds, *_) in host.get("seconds", {}).items():
        print(f"the host's time for a call, {host['label']}, {name}: {1e6 * seconds:.1f} us")
    means = summary(rows)
    for name, found in means.items():
        print(f"{name}: " + ", ".join(f"{what} {x:.3f}" for what, x in found.items()))
    for row in rows:
        for why in row["refused"].values():
            print(f"{row['label']}: {why}")
    if args.only is None or args.json is not None:
        content = {
            "versions": others_linear.versions(), "rows": rows, "product": product,
            "host": host, "summary": means,
        }  # fmt: skip
        recording.keep(args, "int8_layers", "mirror" if args.quick else "cuda", content)
    return 0 if all(r["ok"] for r in (*rows, product)) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--only", metavar="LABEL", help="layers whose label begins so, alone")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
