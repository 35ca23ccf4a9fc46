"""Does every call give the right value or one clear sentence?

Varies       rung, dtype, shape, grouped heads, layout, causal, window, softcap, mask, bias, strides
             and addresses of attention; operands of the other functions
Holds fixed  the seed; small shapes
Measures     errors against float64 written here, beside crude limits of rounding and quantisation;
             exceptions that are no refusals; inputs that were changed
Run          python -m experiments.fuzz [--backend mirror] [--calls 10000] [--others 2000]
             python -m experiments.fuzz --case attention:17       # one case again

Every case has a seed of its own, made of --seed, function and number. Exit status 1: a case failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn import unfused
from cupyattn.cli import output
from cupyattn.diffusion import key_importance
from cupyattn.measure import device

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
#: Largest relative error of one rounding.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
#: The library, whose calls are made with arguments of any kind.
api: Any = ca
#: Kinds of exceptions that are refusals.
REFUSALS = (ValueError, TypeError, ca.UnsupportedError)
#: Keys whose scores lie further below the maximum have no weight in float32.
REACH = 120.0


class Wrong(Exception):
    """A result outside its limit, or an input that was changed."""


class Case:
    """One call: random choices, arrays that must not change, and where they are sent."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.rng, self.backend = rng, backend
        self._held: list[tuple[np.ndarray, bytes]] = []

    def pick(self, *choices: Any) -> Any:
        """Return one of several choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        """Return True in this share of all cases."""
        return bool(self.rng.random() < share)

    def normal(self, *shape: int, dtype: str = "float16", size: float = 1.0) -> np.ndarray:
        """Return random numbers."""
        found: np.ndarray = (size * self.rng.standard_normal(shape)).astype(DTYPES[dtype])
        return found

    def placed(self, x: np.ndarray) -> np.ndarray:
        """Return the same values with other strides or at another address, in NaN padding."""
        how = self.pick("plain", "plain", "odd", "reversed", "sliced", "transposed", "padded")
        if how == "odd":
            memory = np.full(x.nbytes + 32, 0xFF, np.uint8)
            y: np.ndarray = np.ndarray(x.shape, x.dtype, memory.data, int(self.rng.integers(1, 16)))
            y[...] = x
            return y
        fill = np.nan if x.dtype.kind in "fV" else 0
        if x.ndim < 2 or how == "plain":
            return x.copy()
        if how == "reversed":
            return x[..., ::-1, :].copy()[..., ::-1, :]
        if how == "sliced":
            whole = np.full((*x.shape[:-1], 2 * x.shape[-1]), fill, x.dtype)
            whole[..., ::2] = x
            return whole[..., ::2]
        if how == "transposed":
            return x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
        whole = np.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 3), fill, x.dtype)
        whole[..., :-1, 2:-1] = x
        return whole[..., :-1, 2:-1]

    def sent(self, x: np.ndarray) -> Any:
        """Return what the call is given for x, and hold it to staying the same."""
        x = self.placed(x)
        self._held.append((x, x.tobytes()))
        if self.backend != "cuda":
            return x
        import cupy

        start, memory = x.ctypes.data % 16, np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        room = cupy.zeros(x.nbytes + 32, "uint8")
        room[start : start + x.nbytes] = cupy.asarray(memory)
        return cupy.ndarray(x.shape, x.dtype, room.data + start)

    def host(self, x: Any) -> np.ndarray:
        """Return a result as float64."""
        x = x.get() if hasattr(x, "get") else x
        return np.asarray(x.astype(np.float32) if x.dtype.name == "bfloat16" else x, np.float64)

    def options(self) -> dict[str, Any]:
        """Return the backend of a call on NumPy arrays."""
        return {} if self.backend == "cuda" else {"backend": self.backend}

    def check_inputs(self) -> None:
        """Raise Wrong if an input has changed."""
        if any(x.tobytes() != before for x, before in self._held):
            raise Wrong("an input was changed")


def near(name: str, found: np.ndarray, exact: np.ndarray, limit: Any) -> None:
    """Raise Wrong unless every element lies within its limit."""
    if found.shape != exact.shape:
        raise Wrong(f"{name} has shape {found.shape}, not {exact.shape}")
    with np.errstate(invalid="ignore"):
        bad = ~(abs(found - exact) <= limit) & ~(found == exact)
    if bad.any():
        where = tuple(int(i[0]) for i in np.nonzero(bad))
        limit = np.broadcast_to(limit, exact.shape)[where]
        raise Wrong(f"{name}{list(where)} = {found[where]}, exactly {exact[where]} +- {limit}")


def f64(x: np.ndarray) -> np.ndarray:
    """Return x as float64."""
    return x.astype(np.float32).astype(np.float64)  # bfloat16 has no other way


def softmax(S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P and lse; a row of -inf is 0 and -inf."""
    top = S.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(S - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.where(total == 0, 1, total), (top + np.log(total))[..., 0]


def scored(case: Case, q: np.ndarray, k: np.ndarray) -> tuple[dict[str, Any], np.ndarray, float]:
    """Draw what changes scores; return options, exact scores, and their largest sum of terms."""
    batch, heads, len_q, dim = q.shape
    len_kv = k.shape[2]
    k = np.repeat(f64(k), heads // k.shape[1], axis=1)
    S = np.einsum("bhqd,bhkd->bhqk", f64(q), k) / np.sqrt(dim)
    given: dict[str, Any] = {}
    if case.chance(0.15):
        given["softcap"] = 5.0
        S = 5 * np.tanh(S / 5)
    size = float(abs(S).max(initial=0))
    if case.chance(0.3):
        kind, shape = case.pick("float32", "float16"), (case.pick(1, batch), case.pick(1, heads),
                                                       case.pick(1, len_q), len_kv)  # fmt: skip
        bias = case.normal(*shape, dtype=kind, size=case.pick(1.0, 30.0))
        hidden = case.pick(-1e4, float(np.finfo(DTYPES[kind]).min), -np.inf)
        bias[case.rng.random(shape) < 0.3] = hidden
        if case.chance(0.3):
            bias[case.rng.random(shape) < 0.2] = -np.inf
        given["bias"] = case.sent(bias)
        S = S + f64(bias)
    if case.chance(0.25):
        mask = case.rng.random((batch, 1, case.pick(1, len_q), len_kv)) < 0.7
        given["mask"] = case.sent(mask)
        S = np.where(mask, S, -np.inf)
    rows, keys = np.arange(len_q)[:, None], np.arange(len_kv)
    align = case.pick("bottom-right", "top-left")
    shift = len_kv - len_q if align == "bottom-right" else 0
    given["causal_align"] = align
    if case.chance(0.3):
        given["causal"] = True
        S = np.where(keys <= rows + shift, S, -np.inf)
    if case.chance(0.2):
        left, right = case.pick(-1, 2, 9), case.pick(-1, 0, 5)
        given["window"] = left, right
        right = 0 if given.get("causal") else right
        kept = (left < 0) | (keys >= rows + shift - left)
        S = np.where(kept & ((right < 0) | (keys <= rows + shift + right)), S, -np.inf)
    return given, S, size


def limits(S: np.ndarray, size: float, v: np.ndarray, dtype: str, off: Any = 0.0) -> np.ndarray:
    """Return how far a row of O may be: rounding of scores in float32, of P and O in their type."""
    top = S.max(-1, keepdims=True, initial=-np.inf)
    counts = np.isfinite(S) & (top - S < REACH)
    largest = np.where(counts, abs(S), 0).max(-1, keepdims=True, initial=0) + size
    error = np.minimum(2.0**-20 * largest + off, 1.0)
    most = abs(v).max(axis=(2, 3), keepdims=True, initial=0)
    limit: np.ndarray = most * (np.expm1(2 * error) + 8 * ROUNDING[dtype] + 2.0**-18)
    return limit + 2.0**-22


def operands(case: Case, dtypes: tuple[str, ...] = tuple(DTYPES)) -> tuple[np.ndarray, ...]:
    """Draw Q, K and V."""
    dtype, dim = case.pick(*dtypes), case.pick(8, 16, 33, 64)
    batch, heads_kv, group = case.pick(1, 2), case.pick(1, 2), case.pick(1, 1, 3)
    len_q, len_kv = case.pick(0, 1, 7, 16, 33, 65), case.pick(0, 1, 5, 17, 64, 70)
    size = case.pick(1.0, 1.0, 4.0)
    q = case.normal(batch, heads_kv * group, len_q, dim, dtype=dtype, size=size)
    k = case.normal(batch, heads_kv, len_kv, dim, dtype=dtype, size=size)
    return q, k, case.normal(batch, heads_kv, len_kv, dim, dtype=dtype)


def attention(case: Case) -> None:
    """All rungs of `cupyattn.attention`."""
    q, k, v = operands(case)
    dtype = q.dtype.name
    variant = case.pick("auto", "unfused", "fa", "fa_warps", "fa_tc", "fa_int8")
    given, S, size = scored(case, q, k)
    P, lse = softmax(S)
    heads = np.repeat(f64(v), q.shape[1] // k.shape[1], axis=1)
    off: Any = 0.0
    value_error = 0.0
    if variant == "fa_int8":
        pv = case.pick("16bit", "16bit", "int8")
        given["quant"] = ca.QuantConfig(granularity_q=case.pick("token", "head"), pv=pv)
        tallest = [abs(f64(x)).max(initial=0) for x in (q, k)]
        step_q, step_k = tallest[0] / 254, tallest[1] / 127  # smoothing may double a key
        sums = [abs(f64(x)).sum(-1).max(initial=0) for x in (q, k)]
        off = (step_q * sums[1] + step_k * sums[0] + q.shape[3] * step_q * step_k) / q.shape[
            3
        ] ** 0.5
        biggest = abs(f64(v)).max(initial=0)
        value_error = biggest * (0.05 if pv == "int8" else 2.0**-8)
    back = case.chance(0.2)
    sent = [case.sent(x.swapaxes(1, 2) if back else x) for x in (q, k, v)]
    if case.chance(0.3) and case.backend != "cuda":
        given["out"] = np.zeros_like(q.swapaxes(1, 2) if back else q)
    found = api.attention(*sent, variant=variant, layout="BSHD" if back else "BHSD",
                         return_lse=True, **given, **case.options())  # fmt: skip
    o = case.host(found[0])
    limit = limits(S, size, heads, dtype, off) + value_error
    near("o", o.swapaxes(1, 2) if back else o, P @ heads, limit)
    largest = np.where(np.isfinite(S), abs(S), 0).max(-1, initial=0)
    plain = np.isfinite(lse) & (largest < 1e9)
    near("lse", np.where(plain, case.host(found[1]), 0), np.where(plain, lse, 0),
         2.0**-18 * (largest + size) + off + 2.0**-7)  # fmt: skip


def varlen(case: Case) -> None:
    """`attention_varlen` on sequences of many lengths, some empty."""
    dtype, dim = case.pick(*DTYPES), case.pick(8, 16, 64)
    counts = [case.rng.choice([0, 1, 5, 17, 33], size=3) for _ in "qk"]
    ends = [np.concatenate([[0], np.cumsum(n)]).astype(case.pick("int32", "int64")) for n in counts]
    q, k, v = (case.normal(int(e[-1]), 2, dim, dtype=dtype) for e in (ends[0], ends[1], ends[1]))
    causal = case.chance(0.5)
    o = case.host(api.attention_varlen(*map(case.sent, (q, k, v, *ends)), causal=causal,
                                      **case.options()))  # fmt: skip
    for (a, b), (c, d) in zip(*(zip(e[:-1], e[1:], strict=True) for e in ends), strict=True):
        x, y, z = (f64(t).swapaxes(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        S = np.einsum("bhqd,bhkd->bhqk", x, y) / np.sqrt(dim)
        if causal:
            last = np.arange(b - a)[:, None] + (d - c) - (b - a)
            S = np.where(np.arange(d - c) <= last, S, -np.inf)
        exact = softmax(S)[0] @ z
        near("o", o[a:b].swapaxes(0, 1)[None], exact, limits(S, 8.0, z, dtype))


def backward(case: Case) -> None:
    """Gradients, with the output and lse of the forward pass."""
    q, k, v = operands(case, ("float16", "bfloat16"))
    d_out = case.normal(*q.shape, dtype=q.dtype.name)
    causal: dict[str, Any] = {"causal": case.chance(0.5)}
    o, lse = api.attention(*map(case.sent, (q, k, v)), return_lse=True, **causal, **case.options())
    sent = [case.sent(x) for x in (d_out, q, k, v)]
    found = api.attention_backward(*sent, o, lse, **causal, **case.options())
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    Q, K, V, G = f64(q), *(np.repeat(f64(x), group, axis=1) for x in (k, v)), f64(d_out)
    S = Q @ K.swapaxes(2, 3) * scale
    if causal["causal"]:
        len_q, len_kv = S.shape[2:]
        S = np.where(np.arange(len_kv) <= np.arange(len_q)[:, None] + len_kv - len_q, S, -np.inf)
    P = softmax(S)[0]
    dP = G @ V.swapaxes(2, 3)
    dS = P * (dP - (P * dP).sum(-1, keepdims=True)) * scale

    def summed(x: np.ndarray) -> np.ndarray:
        parts: np.ndarray = x.reshape(x.shape[0], k.shape[1], group, *x.shape[2:]).sum(2)
        return parts

    exact = dS @ K, summed(dS.swapaxes(2, 3) @ Q), summed(P.swapaxes(2, 3) @ G)
    spread = (
        P
        * (
            abs(dP)
            + (P * abs(dP)).sum(-1, keepdims=True)
            + (abs(G) @ (P @ abs(V)).swapaxes(2, 3)).max(-1, keepdims=True, initial=0)
        )
        * scale
    )
    sizes = (spread @ abs(K), summed(spread.swapaxes(2, 3) @ abs(Q)),
             summed(P.swapaxes(2, 3) @ abs(G)))  # fmt: skip
    for name, one, want, size in zip(("dq", "dk", "dv"), found, exact, sizes, strict=True):
        near(name, case.host(one), want, 12 * ROUNDING[q.dtype.name] * size + 1e-5)


def quantize(case: Case) -> None:
    """Codes times scales are the operands, but for half a step."""
    q, k, v = operands(case)
    config = ca.QuantConfig(granularity_q="token", granularity_k="token", smooth_k=False)
    z = api.quantize(*map(case.sent, (q, k, v)), quant=config, **case.options())
    for x, codes, scale in ((q, z.q_codes, z.q_scale), (k, z.k_codes, z.k_scale)):
        step = case.host(scale)[..., None]
        if x.size:
            near("x", case.host(codes) * step, f64(x), 0.501 * step)
            near("scale", step[..., 0], abs(f64(x)).max(-1) / 127, 1e-5 * step[..., 0])


def _spread(x: np.ndarray, shape: tuple[int, ...], *, across: bool) -> np.ndarray:
    x = x.repeat(128, axis=1)[:, : shape[1]]
    return x.repeat(128, axis=0)[: shape[0]] if across else x


def act_quant(case: Case) -> None:
    """Rows of activations in blocks of 128."""
    x = case.normal(case.pick(1, 3, 17), case.pick(1, 100, 128, 300), dtype=case.pick(*DTYPES))
    codes, scales = api.act_quant(case.sent(x), **case.options())
    step = _spread(case.host(scales), x.shape, across=False)
    near("x", case.host(codes) * step, f64(x), 0.501 * step)
    near("largest code", abs(case.host(codes)).max(), np.array(127.0), 0)


def weight_quant(case: Case) -> None:
    """A weight in blocks of 128 by 128, there and back."""
    w = case.normal(case.pick(1, 130, 200), case.pick(1, 100, 300), dtype=case.pick(*DTYPES))
    codes, scales = api.weight_quant(case.sent(w), **case.options())
    step = _spread(case.host(scales), w.shape, across=True)
    near("w", case.host(codes) * step, f64(w), 0.501 * step)
    again = case.host(api.weight_dequant(codes, scales, **case.options()))
    near("dequantised", again, case.host(codes) * step, 2.0**-23 * 128 * step)


def int8_gemm(case: Case) -> None:
    """The product of codes."""
    rows, n, depth = case.pick(1, 5, 33), case.pick(1, 40, 130), case.pick(1, 100, 300)
    a, b = (case.rng.integers(-127, 128, (r, depth)).astype(np.int8) for r in (rows, n))
    blocks = -(-depth // 128)
    scales = [abs(case.normal(*s, dtype="float32")) + 0.01
              for s in ((rows, blocks), (-(-n // 128), blocks))]  # fmt: skip
    kind = case.pick(*DTYPES)
    c = api.int8_gemm(*map(case.sent, (a, scales[0], b, scales[1])), kind,
                     **case.options())  # fmt: skip
    A = f64(a) * _spread(f64(scales[0]), a.shape, across=False)
    B = f64(b) * _spread(f64(scales[1]), b.shape, across=True)
    size, exact = abs(A) @ abs(B).T, A @ B.T
    with np.errstate(over="ignore"):
        exact = np.where(abs(exact) > 65000, exact.astype(DTYPES[kind]).astype(np.float64), exact)
    near("c", case.host(c), exact, 2.0**-20 * size + ROUNDING[kind] * 2 * size)


def int8_linear(case: Case) -> None:
    """A layer, beside the steps of its codes."""
    depth, kind = case.pick(100, 128, 300), case.pick(*DTYPES)
    w, x = case.normal(40, depth, dtype=kind), case.normal(case.pick(1, 7), depth, dtype=kind)
    layer = ca.Int8Linear.from_weight(case.sent(w))
    W, X = f64(w), f64(x)
    step_w, step_x = abs(W).max() / 254, abs(X).max() / 254
    limit = step_w * abs(X).sum(-1)[:, None] + step_x * abs(W).sum(-1) + depth * step_w * step_x
    exact = X @ W.T
    near("y", case.host(layer(case.sent(x), **case.options())), exact,
         1.01 * limit + 4 * ROUNDING[kind] * (abs(exact) + limit))  # fmt: skip


def importance(case: Case) -> None:
    """The mean share of every key, from all rows."""
    q, k, _ = operands(case, ("float32",))
    if not q.size or not k.size:
        return
    found = case.host(key_importance(case.sent(q), case.sent(k), rows=1000))
    S = np.einsum("bhqd,bhkd->bhqk", f64(q), np.repeat(f64(k), q.shape[1] // k.shape[1], 1))
    P = softmax(S / np.sqrt(q.shape[3]))[0].mean(2)
    near("importance", found, P.reshape(k.shape[0], k.shape[1], -1, k.shape[2]).mean(2), 1e-4)


def steps(case: Case) -> None:
    """The three steps of unfused attention."""
    q, k, v = operands(case)
    S = unfused.scores(case.sent(q), case.sent(k))
    heads = [np.repeat(f64(x), q.shape[1] // k.shape[1], axis=1) for x in (k, v)]
    exact = f64(q) @ heads[0].swapaxes(2, 3) / np.sqrt(q.shape[3])
    size = abs(f64(q)) @ abs(heads[0]).swapaxes(2, 3)
    near("S", case.host(S), exact, 2.0**-18 * size + 1e-6)
    P = unfused.softmax(S)
    near("P", case.host(P), softmax(exact)[0], 1e-3)
    o = unfused.weighted_sum(P, case.sent(v))
    want = case.host(P) @ heads[1]
    most = abs(heads[1]).max(initial=0)
    near("o", case.host(o), want, 4 * ROUNDING[q.dtype.name] * most + 1e-6)


FUNCTIONS: dict[str, Callable[[Case], None]] = {
    "attention": attention, "attention_varlen": varlen, "attention_backward": backward,
    "quantize": quantize, "act_quant": act_quant, "weight_quant": weight_quant,
    "int8_gemm": int8_gemm, "Int8Linear": int8_linear, "key_importance": importance,
    "unfused": steps,
}  # fmt: skip


def run_case(name: str, number: int, seed: int, backend: str) -> tuple[str, str]:
    """Run one case; return "right", "refused" or "failed", and what was said."""
    rng = np.random.default_rng([seed, list(FUNCTIONS).index(name), number])
    case = Case(rng, backend)
    try:
        with np.errstate(all="ignore"):
            FUNCTIONS[name](case)
        case.check_inputs()
    except Wrong as error:
        return "failed", f"wrong: {error}"
    except REFUSALS as error:
        tail = traceback.extract_tb(error.__traceback__)[-1].filename
        said, ours = str(error), "cupyattn" in Path(tail).parts and "experiments" not in tail
        try:
            case.check_inputs()
        except Wrong as wrong:
            return "failed", str(wrong)
        good = ours and said and "\n" not in said
        return ("refused" if good else "failed"), f"{type(error).__name__}: {said}"
    except Exception as error:  # noqa: BLE001 - any other kind is what this looks for
        return "failed", f"{type(error).__name__}: {error}"
    return "right", ""


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="mirror", choices=("mirror", "interpret", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=10000, help="of attention")
    parser.add_argument("--others", type=int, default=2000, help="of each other function")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="FUNCTION:NUMBER, to run again")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.case:
        name, _, number = args.case.partition(":")
        outcome, said = run_case(name, int(number), args.seed, args.backend)
        print(f"{args.case}: {outcome} {said}")
        return int(outcome == "failed")
    began, counts, failed = time.time(), {}, []
    for name in FUNCTIONS:
        count, found = args.calls if name == "attention" else args.others, Counter[str]()
        for number in range(args.start, args.start + count):
            outcome, said = run_case(name, number, args.seed, args.backend)
            found[outcome] += 1
            if outcome == "failed":
                failed.append({"case": f"{name}:{number}", "said": said})
                print(f"{name}:{number}: {said}"[:300], flush=True)
            if (number + 1) % 1000 == 0:
                print(f"{name}: {number + 1} of {count}, {time.time() - began:.0f} s", flush=True)
        counts[name] = dict(found)
        print(name, dict(found), flush=True)
    if args.json:
        record = {"experiment": "fuzz", "backend": args.backend, "seed": args.seed,
                  "start": args.start, "environment": device.environment(), "counts": counts,
                  "failed": failed}  # fmt: skip
        output.write_json(args.json, record)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
