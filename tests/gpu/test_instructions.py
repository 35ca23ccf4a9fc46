"""The interpreter's arithmetic, instruction by instruction, against the device.

Each form of an instruction becomes a kernel of its own in PTX, which the driver compiles. Results
must agree in every bit, but for NaN that carry something, for approximations, which must keep to
what the PTX ISA says of them, and for sums of tensor cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from cupyattn.interpret.alu import APPROXIMATION_ERROR, DTYPES, Operation, lookup
from cupyattn.interpret.exact import FORMATS
from cupyattn.interpret.tensor_core import accumulation_error, elements, find_mma
from tests.support.exact_floats import BINARY

cupy = pytest.importorskip("cupy")

LANES, BLOCK = 1 << 14, 256
INT, BITS = "u16|u32|u64|s16|s32|s64", "b16|b32|b64"
OCTETS = f"u8|s8|{INT}"
ROUND, WHOLE = "rn|rz|rm|rp", "rni|rzi|rmi|rpi"
ORDER = "eq|ne|lt|le|gt|ge"
FLOAT_ORDER = f"{ORDER}|equ|neu|ltu|leu|gtu|geu|num|nan"

#: Modifiers between spaces; alternatives between bars, an empty one may be absent.
FORMS = [
    f"add {INT}", f"sub {INT}", f"mul lo|hi {INT}", "mul wide u16|u32|s16|s32",
    f"mad lo|hi {INT}", "mad wide u16|u32|s16|s32", "mad hi sat s32", "add|sub sat s32",
    f"div|rem|min|max|sad {INT}", "add|min|max u16x2|s16x2", "min|max relu s32|s16x2",
    "abs|neg s16|s32|s64", "dp4a u32|s32 u32|s32", "dp2a lo|hi u32|s32 u32|s32",
    f"and|or|xor|not {BITS}|pred", f"cnot|shl {BITS}", f"shr {BITS}|{INT}",
    "shf l|r wrap|clamp b32", "bfe u32|u64|s32|s64", "bfi b32|b64",
    "prmt b32 |f4e|b4e|rc8|ecl|ecr|rc16", "popc|clz|brev b32|b64",
    "bfind |shiftamt u32|u64|s32|s64", f"add|sub|mul |{ROUND} |ftz |sat f32",
    f"add|sub|mul |{ROUND} f64", "add|sub|mul |rn |ftz |sat f16|f16x2",
    "add|sub|mul |rn bf16|bf16x2", f"fma|mad {ROUND} |ftz |sat f32", f"fma|mad {ROUND} f64",
    "fma rn |ftz |sat|relu f16|f16x2", "fma rn |relu bf16|bf16x2",
    f"div|rcp|sqrt {ROUND} |ftz f32", f"div|rcp|sqrt {ROUND} f64",
    "min|max |ftz |NaN f32|f16|f16x2", "min|max f64", "min|max |NaN bf16|bf16x2",
    "neg|abs |ftz f32|f16|f16x2", "neg|abs f64|bf16|bf16x2", "copysign f32|f64",
    "testp finite|infinite|number|notanumber|normal|subnormal f32|f64",
    f"setp {ORDER} |and|or|xor {INT}", f"setp eq|ne {BITS}", "setp lo|ls|hi|hs u16|u32|u64",
    f"setp {FLOAT_ORDER} |and |ftz f32|f16", f"setp {FLOAT_ORDER} f64|bf16",
    f"set {ORDER} u32|s32|f32 s32|u64", f"set {FLOAT_ORDER} u32|f32 f32|f64",
    f"selp {BITS}|{INT}|f32|f64", "slct |ftz u32|b64|f32 f32", "slct u32|b64 s32",
    f"mov {BITS}|{INT}|f32|f64", f"cvt {OCTETS} {OCTETS}", "cvt sat u8|s8|u16 u32|s32|s64",
    f"cvt {WHOLE} {INT} f16|bf16|f32|f64", f"cvt {WHOLE} ftz {OCTETS} f32",
    f"cvt {ROUND} f16|f32|f64 {OCTETS}", f"cvt {ROUND} bf16 {INT}",
    f"cvt {ROUND} f16|bf16 f32|f64", f"cvt {ROUND} |ftz |sat f32 f64",
    f"cvt {ROUND} sat f16 f32|f64", f"cvt {ROUND} f16 bf16", f"cvt {ROUND} bf16 f16",
    "cvt f32|f64 f16|bf16", "cvt f64 f32", f"cvt {WHOLE} |sat f16 f16",
    f"cvt {WHOLE} |ftz |sat f32 f32", f"cvt {WHOLE} |sat f64 f64",
    "cvt rn|rz |relu |satfinite f16|bf16|f16x2|bf16x2 f32", "cvt rn|rz |relu tf32 f32",
    "cvt rn satfinite |relu e4m3x2|e5m2x2 f32|f16x2", "cvt rn |relu f16x2 e4m3x2|e5m2x2",
    "cvt pack sat u16|s16 s32", "cvt pack sat u8|s8|u4|s4|u2|s2 s32 b32",
]  # fmt: skip
APPROXIMATE = [
    "div approx|full |ftz f32", "rcp|sqrt|rsqrt|ex2|lg2|sin|cos approx |ftz f32",
    "rcp|rsqrt approx ftz f64", "rsqrt approx f64", "tanh approx f32|f16|bf16",
    "ex2 approx f16", "ex2 approx ftz bf16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def only_hopper() -> Iterator[None]:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("forms and results are those of compute capability 9.0")
    with np.errstate(all="ignore"):
        yield


def names(form: str) -> list[tuple[str, ...]]:
    parts = itertools.product(*(part.split("|") for part in form.split()))
    return [tuple(filter(None, name)) for name in parts]


# ---- kernels -------------------------------------------------------------------------------------


def register(kind: str) -> str:
    if kind in ("f32", "f64"):
        return kind
    return f"b{max(16, DTYPES[kind].itemsize * 8)}" if kind not in ("u8", "s8") else "b32"


def access(kind: str) -> str:
    if kind in ("f32", "f64", "u8", "s8"):
        return kind
    return f"b{DTYPES[kind].itemsize * 8}"


def ptx(text: str, sources: tuple[str, ...], results: tuple[str, ...]) -> str:
    """A kernel whose every thread loads its sources, runs `text`, and stores the results."""
    lines, operands = [], []
    for i, kind in enumerate((*results, *sources)):
        size = DTYPES[kind].itemsize
        lines.append(f"ld.param.u64 %p{i}, [p{i}]; mad.lo.s64 %p{i}, %i, {size}, %p{i};")
        lines.append(f".reg .{'pred' if kind == 'pred' else register(kind)} %x{i};")
        operands.append(f"%x{i}")
        if i < len(results):
            continue
        if kind == "pred":
            lines.append(f"ld.global.u8 %b, [%p{i}]; setp.ne.u32 %x{i}, %b, 0;")
        else:
            lines.append(f"ld.global.{access(kind)} %x{i}, [%p{i}];")
    target = "|".join(operands[: len(results)])
    lines.append(f"{text} {target}, {', '.join(operands[len(results) :])};")
    for i, kind in enumerate(results):
        if kind == "pred":
            lines.append(f"selp.u32 %b, 1, 0, %x{i}; st.global.u8 [%p{i}], %b;")
        else:
            lines.append(f"st.global.{access(kind)} [%p{i}], %x{i};")
    return module(len(sources) + len(results), lines)


def module(parameters: int, lines: list[str]) -> str:
    """A kernel of `parameters` pointers, %p0 ..; %i is the number of the thread."""
    names = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    body = "\n".join(lines)
    return f""".version 8.4
.target sm_90a
.address_size 64
.visible .entry k({names}) {{
.reg .b64 %p<{parameters}>, %i; .reg .b32 %t, %c, %n, %b;
mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x;
mad.lo.u32 %t, %c, %n, %t; cvt.u64.u32 %i, %t;
{body}
ret; }}
"""


def launch(
    code: str, results: list[np.ndarray], sources: list[np.ndarray], grid: int, block: int
) -> list[np.ndarray]:
    loaded = cupy.cuda.function.Module()
    loaded.load(code.encode() + b"\0")
    given = [cupy.asarray(np.ascontiguousarray(x).view(np.uint8)) for x in (*results, *sources)]
    loaded.get_function("k")((grid,), (block,), tuple(given))
    taken = (array.get() for array in given)
    return [x.view(old.dtype).reshape(old.shape) for old, x in zip(results, taken, strict=False)]


# ---- lanes ---------------------------------------------------------------------------------------


def floats(kind: str, draw: np.random.Generator) -> np.ndarray:
    """Any bits; short and long fractions; subnormal numbers and their neighbours; ends; normal."""
    form = BINARY[kind]
    bits, fraction = form.dtype.itemsize * 8, form.precision - 1
    every = draw.integers(0, 2**bits, LANES, np.uint64, endpoint=False).astype(form.bits)
    count = draw.integers(0, fraction + 1, LANES).astype(form.bits)
    sign = every & form.bits.type(1 << bits - 1)
    infinity = (1 << bits - 1) - (1 << fraction)
    points = np.array([0, 1, 1 << fraction, infinity - 1, infinity, infinity + 1], form.bits)
    kinds = [
        every,
        every >> count << count,
        every | (form.bits.type(1) << count) - form.bits.type(1),
        sign | every & form.bits.type((4 << fraction) - 1),
        sign | draw.choice(points, LANES),
        draw.standard_normal(LANES).astype(form.dtype).view(form.bits),
        (draw.integers(-2000, 2000, LANES) / 8).astype(form.dtype).view(form.bits),
    ]
    return np.choose(draw.integers(0, len(kinds), LANES), kinds).view(form.dtype)


def integers(kind: str, draw: np.random.Generator) -> np.ndarray:
    """Any bits, of any length; small numbers; ends."""
    dtype = DTYPES[kind]
    bits = dtype.itemsize * 8
    word = np.dtype(f"u{dtype.itemsize}")
    every = draw.integers(0, 2**bits - 1, LANES, np.uint64, endpoint=True).astype(word)
    ends = [0, 1, 2, 127, 128, 255, 2**bits - 1, 2**bits - 2, 2 ** (bits - 1), 2 ** (bits - 1) - 1]
    kinds = [
        every,
        every >> draw.integers(0, bits, LANES).astype(word),
        draw.integers(0, 80, LANES).astype(word),
        draw.choice(np.array([x % 2**bits for x in ends], word), LANES),
    ]
    return np.choose(draw.integers(0, len(kinds), LANES), kinds).view(dtype)


def lanes(opcode: str, operation: Operation, draw: np.random.Generator) -> list[np.ndarray]:
    sources = []
    for kind in operation.sources:
        if kind == "pred":
            sources.append(draw.integers(0, 2, LANES).astype(np.bool_))
        elif kind in ("f16x2", "bf16x2"):
            pair = np.stack([floats(kind[:-2], draw) for _ in "ab"], -1)
            sources.append(pair.view(np.uint32)[:, 0])
        else:
            sources.append((floats if kind in FORMATS else integers)(kind, draw))
    if opcode in ("bfe", "bfi"):  # positions and lengths past a byte are not defined
        sources[-2:] = [x % 256 for x in sources[-2:]]
    if opcode in ("div", "rem") and sources[1].dtype.kind in "iu":
        sources[1][sources[1] == 0] = 1
    if opcode in ("fma", "mad") and operation.sources[0] in FORMATS:  # sums that cancel
        sources[2][: LANES // 4] = -(sources[0] * sources[1])[: LANES // 4]
    if opcode in ("mul", "fma", "div") and operation.sources[0] in FORMATS:  # next to subnormal
        form, few = BINARY[operation.sources[0]], slice(LANES // 2, LANES // 2 + 2000)
        near = 2 - draw.integers(0, 9, (2, 2000)) * 2.0 ** (1 - form.precision)
        power = draw.integers(-8, 8, 2000) * 1.0
        other = power if opcode == "div" else -power
        sources[0][few] = (near[0] * 2.0 ** (power + form.smallest)).astype(form.dtype)
        sources[1][few] = (near[1] * 2.0 ** (other - (opcode != "div"))).astype(form.dtype)
        if opcode == "fma":
            sources[2][few] = 0
    return sources


# ---- comparisons ---------------------------------------------------------------------------------


def run(name: tuple[str, ...]) -> Iterator[tuple[str, list[np.ndarray], np.ndarray, np.ndarray]]:
    """Yield type, sources, and results of the model and of the device."""
    opcode, *modifiers = name
    operation = lookup(opcode, tuple(modifiers))
    assert operation is not None, name
    sources = lanes(opcode, operation, np.random.default_rng(len(".".join(name))))
    model = operation.evaluate(*sources)
    empty = [np.zeros(LANES, DTYPES[kind]) for kind in operation.results]
    code = ptx(".".join(name), operation.sources, operation.results)
    (device,) = launch(code, empty, sources, LANES // BLOCK, BLOCK)
    yield operation.results[0], sources, np.asarray(model), device


def numbers(kind: str, x: np.ndarray, tf32: bool) -> np.ndarray | None:
    """The floats in a result, None for integers."""
    if tf32:
        return x.view(np.float32)
    if kind in ("f16x2", "bf16x2"):
        return x.view(DTYPES[kind[:-2]])
    return x if kind in FORMATS else None


@pytest.mark.parametrize("form", FORMS)
def test_every_bit(form: str) -> None:
    for name in names(form):
        for kind, sources, model, device in run(name):
            bits = np.dtype(f"u{model.dtype.itemsize}")
            differs = model.view(bits) != device.view(bits)
            values = [numbers(kind, x, "tf32" in name) for x in (model, device)]
            if values[0] is not None and values[1] is not None:
                lost = [np.isnan(x.astype(np.float64)) for x in values]
                differs &= ~(lost[0] & lost[1]).reshape(LANES, -1).all(1)
            where = np.nonzero(differs)[0][:3]
            shown = [([x[i] for x in sources], model[i], device[i]) for i in where]
            assert not shown, f"{'.'.join(name)}: {differs.sum()} lanes, e.g. {shown}"


def stated_error(key: str, source: np.ndarray, exact: np.ndarray, place: np.ndarray) -> np.ndarray:
    kind, error = APPROXIMATION_ERROR[key]
    if kind == "ulp":
        return error * place
    if key == "lg2.approx.f32":
        outside = (source <= 0.5) | (source >= 2)
        return np.where(outside, error * np.abs(exact), error)
    return error * np.abs(exact) if kind == "rel" else np.full(len(exact), error)


@pytest.mark.parametrize("form", APPROXIMATE)
def test_approximations_keep_to_their_stated_error(form: str) -> None:
    for name in names(form):
        for kind, sources, model, device in run(name):
            form_of, tiny = BINARY[kind], float(BINARY[kind].tiny)
            exact, got = model.astype(np.float64), device.astype(np.float64)
            key = ".".join(name)
            key = key if key in APPROXIMATION_ERROR else key.replace(".ftz", "")
            place = np.maximum(np.abs(exact), tiny) * 2.0 ** (1 - form_of.precision)
            error = stated_error(key, sources[0].astype(np.float64), exact, place) + place
            used = np.ones(LANES, np.bool_)
            if name[0] in ("sin", "cos"):
                used = np.abs(sources[0]) <= 6.28
            if name[0] in ("sin", "cos") or "ftz" in name or kind == "f16":
                error = error + tiny  # subnormal numbers may be flushed
            if name[0] == "div":
                size = np.abs(sources[1].astype(np.float64))
                used = (size >= 2.0**-126) & (size <= 2.0**126)
            finite = np.isfinite(exact) & used
            assert (np.isnan(exact) == np.isnan(got))[used].all(), name
            edge = np.isfinite(got)
            assert (exact == got)[used & ~finite & ~np.isnan(exact)].all(), name
            assert (np.abs(got - exact) <= error)[finite & edge].all(), name
            assert (np.abs(exact) > 0.99 * np.finfo(np.float32).max)[finite & ~edge].all(), name


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
@pytest.mark.parametrize("spread", [0, 6])
def test_sums_of_tensor_cores_keep_to_their_stated_error(kind: str, spread: int) -> None:
    depth = {"tf32": 8, "e4m3": 32, "e5m2": 32}.get(kind, 16)
    modifiers = ("sync", "aligned", f"m16n8k{depth}", "row", "col", "f32", kind, kind, "f32")
    product = find_mma(modifiers)
    assert product is not None
    warps, draw = 256, np.random.default_rng(spread)
    numbers_of = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "bf16": "bfloat16"}
    dtype = getattr(ml_dtypes, numbers_of[kind]) if kind in numbers_of else DTYPES.get(kind, "f4")

    def drawn(count: int, dtype: object) -> np.ndarray:
        size = count * 4 // np.dtype(dtype).itemsize
        x = draw.standard_normal((warps, 32, size))
        x = x * 2.0 ** draw.integers(-spread, spread + 1, x.shape)
        return x.astype(np.float32).astype(dtype).view(np.uint32)

    a, b = (drawn(fragment.registers, dtype) for fragment in (product.a, product.b))
    c = drawn(4, np.float32)
    counts = {"d": 4, "a": a.shape[2], "b": b.shape[2], "c": 4}
    lines = []
    for i, (name, count) in enumerate(counts.items()):
        lines.append(f"ld.param.u64 %p{i}, [p{i}]; mad.lo.s64 %p{i}, %i, {4 * count}, %p{i};")
        lines.append(f".reg .{'f32' if name in 'cd' else 'b32'} %{name}<{count}>;")
        if name != "d":
            load = "f32" if name == "c" else "b32"
            lines += [f"ld.global.{load} %{name}{j}, [%p{i}+{4 * j}];" for j in range(count)]
    vectors = ("{" + ", ".join(f"%{n}{j}" for j in range(c)) + "}" for n, c in counts.items())
    lines.append(f"mma.{'.'.join(modifiers)} {', '.join(vectors)};")
    lines += [f"st.global.f32 [%p0+{4 * j}], %d{j};" for j in range(4)]
    (device,) = launch(module(4, lines), [np.zeros_like(c)], [a, b, c], warps, 32)
    model = product(a, b, c).view(np.float32).astype(np.float64)
    sizes = (
        np.abs(product.a.gather(elements(a, kind))),
        np.abs(product.b.gather(elements(b, kind))),
        np.abs(product.accumulator.c.gather(c.view(np.float32)).astype(np.float64)),
    )
    bound = product.accumulator.d.scatter(accumulation_error(depth, sizes[0] @ sizes[1] + sizes[2]))
    assert (np.abs(device.view(np.float32) - model) <= bound).all()
