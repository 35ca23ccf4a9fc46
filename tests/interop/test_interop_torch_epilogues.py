"""Operations that become part of INT8 products in Inductor's graphs, and operations that do not.

Graphs run as Inductor's passes leave them, without its code, so that what differs from eager calls
is what the pass moved: results have the bits of the kernel's epilogue. One test has Inductor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
epilogues = importlib.import_module("cupyattn.interop.torch.epilogues")
activation_nodes = importlib.import_module("cupyattn.interop.torch.activation_nodes")
linear_parts = importlib.import_module("cupyattn.interop.torch.linear_parts")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")

functional = torch.nn.functional
WIDTH, ROWS = 128, (2, 5)
ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
TYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """One thread, no code that another test compiled, and no pass that it registered."""
    from torch._inductor import config

    before = torch.get_num_threads(), config.post_grad_custom_post_pass
    torch.set_num_threads(1)
    torch._dynamo.reset()
    config.post_grad_custom_post_pass, epilogues._registered = None, False
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before[0])
    config.post_grad_custom_post_pass, epilogues._registered = before[1], False


class Graphs(list[Any]):
    """A backend that runs Inductor's graphs after its passes, and keeps them."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        compile_with: Any = aot_autograd(
            fw_compiler=self._forward, bw_compiler=lambda made, _: made.forward,
            inference_compiler=self._forward, decompositions=select_decomp_table,
        )  # fmt: skip
        return compile_with(graph, inputs)

    def _forward(self, made: Any, inputs: Any) -> Any:
        from torch._dynamo.utils import detect_fake_mode
        from torch._inductor.decomposition import decompositions
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
        from torch._inductor.lowering import lowerings
        from torch._inductor.virtualized import V
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        joint_graph_passes(made)
        view_to_reshape(made)
        # Inductor runs its passes outside of the mode.
        with V.set_fake_mode(detect_fake_mode(inputs)), unset_fake_temporarily():
            post_grad_passes(made, is_inference=True)
        called = {n.target for n in made.graph.nodes if n.op == "call_function"}
        assert not called & (decompositions.keys() - lowerings.keys())  # Inductor refuses them
        values = (n.meta.get("val") for n in made.graph.nodes)
        assert all(isinstance(x, FakeTensor) for x in values if isinstance(x, torch.Tensor))
        made.recompile()
        self.append(made)
        return made.forward

    def names(self) -> list[str]:
        """The functions of the last graph, in order, but for what takes a result apart."""
        found = [n.target for n in self[-1].graph.nodes if n.op == "call_function"]
        return [str(target) for target in found if "getitem" not in str(target)]

    def products(self) -> list[dict[str, Any]]:
        """The arguments of layers, of one or of several, by name."""
        ours = linear_parts.layer, linear_parts.layers
        nodes = [n for n in self[-1].graph.nodes if n.target in ours]
        names = [[one.name for one in n.target._schema.arguments] for n in nodes]
        return [dict(zip(own, n.args, strict=True)) for own, n in zip(names, nodes, strict=True)]


def layer(dtype: Any = torch.float16, strategy: str = "block", out: int = WIDTH) -> Any:
    own = torch.nn.Linear(WIDTH, out, dtype=dtype).requires_grad_(False)
    return interop.Int8Linear.from_linear(own, strategy=strategy, backend="mirror")


def rows(dtype: Any = torch.float16, *shape: int) -> Any:
    return torch.randn(*(shape or (*ROWS, WIDTH))).to(dtype)


def run(function: Any, *given: Any, **options: Any) -> tuple[Any, Graphs]:
    graphs = Graphs()
    with torch.no_grad():
        found = torch.compile(function, backend=graphs, fullgraph=True, **options)(*given)
    return found, graphs


LAYER, LAYERS = "cupyattn.int8_layer.default", "cupyattn.int8_layers.default"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_layers_of_one_input_are_one_call(strategy: str, dynamic: bool) -> None:
    """As to_q, to_k, to_v and an MLP beside attention; to the bit what each layer makes."""
    torch.manual_seed(0)
    layers = [layer(strategy=strategy, out=out) for out in (128, 128, 64, 256)]
    layers[1].bias = None
    x = rows()

    def function(x: Any) -> Any:
        q, k, v, up = [one(x) for one in layers]
        return q, k, v, functional.gelu(up)

    found, graphs = run(function, x, dynamic=dynamic)
    assert graphs.names() == [LAYERS]
    assert graphs.products()[0]["activations"] == ["", "", "", "gelu"]
    layers[3].activation = "gelu"
    assert all(torch.equal(y, one(x)) for y, one in zip(found, layers, strict=True))


def test_layers_of_two_streams_in_turns_are_two_calls() -> None:
    """As of Flux's double blocks, in the order that Inductor gives them."""
    torch.manual_seed(0)
    image, text = [layer() for _ in "qkv"], [layer() for _ in "qkv"]
    x, y = rows(), rows()

    def function(x: Any, y: Any) -> Any:
        pairs = [(one(x), other(y)) for one, other in zip(image, text, strict=True)]
        return [result for pair in pairs for result in pair]

    found, graphs = run(function, x, y)
    assert graphs.names() == [LAYERS] * 2
    assert all(torch.equal(a, b) for a, b in zip(found, function(x, y), strict=True))


def test_layers_far_apart_are_no_group() -> None:
    """As of a prompt that every block reads: results are not made blocks before they are read."""
    torch.manual_seed(0)
    blocks = [[layer() for _ in range(5)] for _ in range(3)]
    x, prompt = rows(), rows(torch.float16, 1, 3, WIDTH)

    def function(x: Any, prompt: Any) -> Any:
        for k, v, *others in blocks:
            x = x + (k(prompt) * v(prompt)).sum(1, keepdim=True)
            for one in others:
                x = functional.relu(one(x))
        return x

    found, graphs = run(function, x, prompt)
    assert graphs.names().count(LAYERS) == 3 and graphs.names().count(LAYER) == 9
    assert torch.allclose(found, function(x, prompt), rtol=2e-2, atol=2e-2)


def test_a_layer_whose_weight_is_computed_is_a_call_of_its_own() -> None:
    """It cannot run where the first layer of the same input does."""
    torch.manual_seed(0)
    first, second, third, x = layer(), layer(), layer(), rows()

    def function(x: Any) -> Any:
        y = first(x)
        bias = y[0, 0] * 2
        given = second.weight_codes, second.weight_scale, bias, "", None, "mirror"
        return y, torch.ops.cupyattn.int8_linear(x, *given), third(x)

    found, graphs = run(function, x)
    assert sorted(n for n in graphs.names() if "int8" in n) == [LAYER, LAYERS]
    assert all(torch.equal(a, b) for a, b in zip(found, function(x), strict=True))


def test_layers_of_other_inputs_and_strategies_have_codes_of_their_own() -> None:
    one, two = layer(), layer(strategy="channel")
    x, y = rows(), rows()
    _, graphs = run(lambda x, y: (one(x), one(y), two(x)), x, y)
    assert graphs.names() == [LAYER] * 3


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_part_of_the_layer(name: str, dtype: str) -> None:
    """It has the bits of a layer with that activation: the sum is not rounded before it."""
    torch.manual_seed(0)
    own, x = layer(TYPES[dtype]), rows(TYPES[dtype])
    found, graphs = run(lambda x: ACTIVATIONS[name](own(x)), x)
    assert graphs.names() == [LAYER]
    plain = ACTIVATIONS[name](own(x))
    own.activation = name
    assert torch.equal(found, own(x))
    # Rounded twice, the first time before a function that is at most 1.13 times as steep.
    unit = torch.finfo(TYPES[dtype]).eps
    own.activation = None
    allowed = unit * (1.13 * own(x).double().abs() + plain.double().abs()) + 1e-6
    assert ((found.double() - plain.double()).abs() <= allowed).all()


def test_a_pattern_is_found_whatever_is_under_way() -> None:
    """The first layer that is traced may be below a gradient."""
    own, x = layer(torch.float32), rows(torch.float32)
    activation_nodes.pattern.cache_clear()
    torch.func.grad(lambda x: (activation_nodes.pattern("gelu", torch.float32), x.sum())[1])(x)
    found, graphs = run(lambda x: functional.gelu(own(x)), x)
    assert graphs.names() == [LAYER] and graphs.products()[0]["activation"] == "gelu"


def gated(form: str, kind: Any, y: Any) -> Any:
    """A gated linear unit of both halves of a layer's columns, as models write it."""
    width = y.shape[-1] // 2
    if form == "chunk, gate last":  # GEGLU and SwiGLU of diffusers
        other, gate = y.chunk(2, dim=-1)
        return other * kind(gate)
    if form == "split, gate first":
        gate, other = y.split([width, width], dim=-1)
        return kind(gate) * other
    if form == "slices, gate first":  # Flux 2
        return kind(y[..., :width]) * y[..., width:]
    assert form == "slices, gate last"
    return kind(y[..., width:]) * y[..., :width]


FORMS = ("chunk, gate last", "split, gate first", "slices, gate first", "slices, gate last")
NAMES = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}


@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        pytest.param(form, name, dtype, marks=[pytest.mark.slow] if (i + j + k) % 3 else [])
        for i, form in enumerate(FORMS)
        for j, name in enumerate(ACTIVATIONS)
        for k, dtype in enumerate(TYPES)
    ],
)
def test_a_gated_linear_unit_is_part_of_the_layer(form: str, name: str, dtype: str) -> None:
    """It has the bits of a layer with that activation, within the bound of the plain one."""
    torch.manual_seed(0)
    own, x = layer(TYPES[dtype], out=2 * 72), rows(TYPES[dtype])
    kind = ACTIVATIONS[name]
    found, graphs = run(lambda x: gated(form, kind, own(x)), x, dynamic=dtype == "float16")
    assert graphs.names() == [LAYER]
    plain, y = gated(form, kind, own(x)), own(x).double()
    own.activation = NAMES[name] + "_gate_last" * form.endswith("last")
    assert graphs.products()[0]["activation"] == own.activation
    assert torch.equal(found, own(x)) and found.is_contiguous()
    # Both halves and the activation are rounded, too, before the product is.
    gate, other = y.chunk(2, dim=-1)[:: -1 if form.endswith("last") else 1]
    unit = torch.finfo(TYPES[dtype]).eps
    allowed = 3 * unit * 1.13 * (gate * other).abs() + 1e-6
    assert ((found.double() - plain.double()).abs() <= allowed).all()


@pytest.mark.parametrize("beside", ["a residual", "a layer of the same input"])
def test_a_gated_linear_unit_beside_others(beside: str) -> None:
    torch.manual_seed(0)
    own, other, x = layer(out=2 * WIDTH), layer(out=64), rows()

    def function(x: Any) -> Any:
        y = gated(FORMS[0], functional.silu, own(x))
        return (x + y,) if beside == "a residual" else (other(x), y)

    found, graphs = run(function, x)
    assert graphs.names() == [LAYER if beside == "a residual" else LAYERS]
    own.activation = "swiglu_gate_last"
    if beside == "a residual":
        assert torch.equal(found[0], product_of(own, x, x, None, own.activation))
    else:
        assert torch.equal(found[0], other(x)) and torch.equal(found[1], own(x))


#: Functions of a layer's result that are no gated linear unit of its product.
UNGATED = {
    "a half is read twice": lambda y: gated(FORMS[0], functional.silu, y) + y.chunk(2, -1)[0],
    "all is read": lambda y: gated(FORMS[2], functional.silu, y) + y.sum(),
    "halves overlap": lambda y: functional.silu(y[..., :WIDTH]) * y[..., 64 : 64 + WIDTH],
    "every other column": lambda y: functional.silu(y[..., ::2]) * y[..., 1::2],
    "halves of rows": lambda y: functional.silu(y[:1]) * y[1:],
    "the same half": lambda y: functional.silu(y[..., :WIDTH]) * y[..., :WIDTH],
    "both activated": lambda y: functional.silu(y[..., :WIDTH]) * functional.silu(y[..., WIDTH:]),
    "a sum of the halves": lambda y: functional.silu(y[..., :WIDTH]) + y[..., WIDTH:],
    "another activation": lambda y: gated(FORMS[0], functional.relu, y),
    "a third": lambda y: gated(FORMS[0], functional.silu, y[..., : 2 * WIDTH - 2]),
}


@pytest.mark.parametrize("name", UNGATED)
def test_what_is_no_gated_linear_unit_stays(name: str) -> None:
    torch.manual_seed(0)
    own, x = layer(out=2 * WIDTH), rows()
    found, graphs = run(lambda x: UNGATED[name](own(x)), x)
    assert graphs.products()[0]["activation"] == ""
    assert torch.allclose(found, UNGATED[name](own(x)), rtol=2e-3, atol=2e-3)


def wide(gate: Any) -> Any:
    """A gate with digits that 16 bits do not have."""
    return gate.float() * (1 + 2.0**-11)


def sums(y: Any, r: Any, g: Any) -> dict[str, Any]:
    """Sums as models write them, of a residual, a gate and what a layer makes."""
    return {
        "gate first": lambda y, r, g: r + g * y,
        "gate last": lambda y, r, g: y * g + r,
        "no gate": lambda y, r, g: r + y,
        "in float32": lambda y, r, g: (r.float() + g.float() * y.float()).type_as(r),
        "in float32, no gate": lambda y, r, g: (y.float() + r.float()).type_as(r),
        "a gate of more digits": lambda y, r, g: (r.float() + y * wide(g)).type_as(r),
        "all in more digits": lambda y, r, g: (y.float() * wide(g) + r.float()).type_as(r),
        "a gate of more digits alone": lambda y, r, g: (r + y * wide(g)).type_as(r),
        "after an activation": lambda y, r, g: r + g * functional.silu(y),
    }  # fmt: skip


GATES = {"of a sample": (2, 1, WIDTH), "of all": (WIDTH,), "of rows": (*ROWS, WIDTH)}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, dtype, marks=[pytest.mark.slow] if (i + j) % 3 else [])
        for i, form in enumerate(sums(0, 0, 0))
        for j, dtype in enumerate(TYPES)
    ],
)
def test_a_sum_is_part_of_the_layer(form: str, dtype: str) -> None:
    """It has the bits of `cupyattn.int8_gemm` with that residual and gate."""
    torch.manual_seed(0)
    own, x, r = layer(TYPES[dtype]), rows(TYPES[dtype]), rows(TYPES[dtype])
    # A modulation's part, as models cut it: rows that lie apart.
    g = rows(TYPES[dtype], 2, 3 * WIDTH).chunk(3, dim=-1)[1].unsqueeze(1)
    function = sums(0, 0, 0)[form]
    found, graphs = run(lambda x, r, g: function(own(x), r, g), x, r, g)
    assert graphs.names()[-1] == LAYER and sum("add" in name for name in graphs.names()) == 0
    gate = wide(g[:, 0]) if "more digits" in form else g[:, 0]
    assert torch.equal(found, product_of(own, x, r, None if "no" in form else gate,
                                         "silu" if "activation" in form else None))  # fmt: skip
    plain = function(own(x), r, g)
    unit = torch.finfo(TYPES[dtype]).eps
    size = plain.double().abs() + 2.2 * (own(x).double() * (1 if "no" in form else g)).abs()
    assert ((found.double() - plain.double()).abs() <= unit * size + 1e-6).all()


def product_of(own: Any, x: Any, r: Any, g: Any, activation: str | None = None) -> Any:
    own_tensors = own.weight_codes, own.weight_scale, own.bias
    weight, scales, bias = map(bridge.as_array, own_tensors)
    codes, x_scales = ca.act_quant(bridge.as_array(x))
    given = {"residual": r, "gate": g}
    c = ca.int8_gemm(
        codes, x_scales, weight, scales, str(x.dtype).removeprefix("torch."), bias=bias,
        activation=activation, **{n: bridge.as_array(y) for n, y in given.items() if y is not None},
    )  # fmt: skip
    return bridge.as_tensor(c)


@pytest.mark.parametrize("kind", GATES)
def test_gates_of_samples_of_all_rows_and_of_each(kind: str) -> None:
    torch.manual_seed(0)
    own, x, r, g = layer(), rows(), rows(), rows(torch.float16, *GATES[kind])
    found, graphs = run(lambda x, r, g: r + g * own(x), x, r, g, dynamic=True)
    assert graphs.names()[-1] == LAYER and graphs.products()[0]["gate"] is not None
    assert torch.equal(found, product_of(own, x, r, g.reshape(-1, WIDTH)))


def test_a_layer_that_adds_to_a_residual_is_a_call_of_its_own() -> None:
    """This holds for layers with one input, too: its residual may depend on the others' results."""
    torch.manual_seed(0)
    first, second, third, x = layer(), layer(), layer(), rows()
    found, graphs = run(lambda x: (x + second(x) * functional.silu(first(x)), third(x)), x)
    assert sorted(graphs.names()) == [LAYER, LAYERS]
    assert {one.get("activation", "of several") for one in graphs.products()} == {"", "of several"}
    first.activation = "silu"
    assert torch.equal(found[0], product_of(second, x, x, first(x).reshape(-1, WIDTH)))
    assert torch.equal(found[1], third(x))


def kept(x: Any, own: Any, r: Any, g: Any) -> dict[str, Any]:
    """Functions of which a product computes nothing: others read it, or its epilogue cannot."""
    other, row, few = r.bfloat16(), r[:1], r[..., :1]
    return {
        "read by two": lambda x: (r + g * (y := own(x)), y.sin()),
        "product read by two": lambda x: (r + (y := g * own(x)), y.sin()),
        "a gate of other 16 bits": lambda x: (r + g.bfloat16() * own(x)).half(),
        "a product rounded before the sum": lambda x: (r.float() + (g * own(x)).float()).half(),
        "a sum of more digits": lambda x: r.float() + own(x),
        "a residual of another type": lambda x: (other.float() + own(x).float()).half(),
        "a residual that broadcasts": lambda x: row + own(x),
        "a gate of other rows": lambda x: r + row * own(x),
        "a gate of other columns": lambda x: r + few * own(x),
        "a factor": lambda x: torch.add(r, own(x), alpha=2),
        "twice itself": lambda x: (y := own(x)) + y,
        "another activation": lambda x: functional.relu(own(x)),
        "an activation that is read by two": lambda x: functional.silu(y := own(x)) + y.sin(),
    }


@pytest.mark.parametrize("name", kept(*[torch.ones(1, 1)] * 4))
def test_what_has_another_reader_or_another_type_stays(name: str) -> None:
    torch.manual_seed(0)
    x = rows()
    function = kept(x, layer(), rows(), rows(torch.float16, 2, 1, WIDTH))[name]
    found, graphs = run(function, x)
    (product,) = graphs.products()
    assert product["residual"] is product["gate"] is None and product["activation"] == ""
    pairs = zip(leaves(found), leaves(function(x)), strict=True)
    assert all(torch.allclose(a, b, rtol=2e-3, atol=2e-3) for a, b in pairs)


def leaves(found: Any) -> Any:
    return found if isinstance(found, tuple) else (found,)


def test_a_block_of_a_model_and_no_second_graph() -> None:
    """Modulation, an MLP and a residual, with lengths that are symbols; other numbers and rows."""
    torch.manual_seed(0)
    up, down = layer(out=256), interop.Int8Linear.from_linear(
        torch.nn.Linear(256, WIDTH, dtype=torch.float16).requires_grad_(False), backend="mirror"
    )  # fmt: skip

    def block(x: Any, modulation: Any) -> Any:
        shift, scale, gate = modulation.unsqueeze(1).chunk(3, dim=-1)
        y = functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        return x + gate * down(functional.gelu(up(y), approximate="tanh"))

    graphs = Graphs()
    call = torch.compile(block, backend=graphs, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for turn, length in enumerate((5, 9, 12)):
            x, modulation = rows(torch.float16, 2, length, WIDTH), rows(torch.float16, 2, 3 * WIDTH)
            with torch._dynamo.config.patch(error_on_recompile=turn > 0):
                found = call(x, modulation)
            expected = block(x, modulation)
            assert (found - expected).norm() < 0.02 * (expected - x).norm()
    assert len(graphs) == 1 and graphs.names().count(LAYER) == 2
    first, second = graphs.products()
    assert first["activation"] == "gelu_tanh" and first["residual"] is None
    assert second["residual"] is not None and second["gate"] is not None


def test_a_graph_with_gradients_has_its_derivative() -> None:
    own, x, d_y = layer(), rows().requires_grad_(), rows()
    graphs = Graphs()
    function = torch.compile(lambda x: own(x) * 2, backend=graphs, fullgraph=True)
    function(x).backward(d_y)
    found, x.grad = x.grad, None
    (own(x) * 2).backward(d_y)
    assert LAYER in graphs.names() and torch.equal(found, x.grad)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_operators_are_what_they_say(dtype: str) -> None:
    own, x = layer(TYPES[dtype]), rows(TYPES[dtype])
    g = rows(TYPES[dtype], 2, 1, WIDTH)
    for sum_of in ((None, None), (x, None), (x, g)):
        given = (x, own.weight_codes, own.weight_scale, own.bias, *sum_of, "silu", None, "mirror")
        torch.library.opcheck(linear_parts.layer, given)
    for strategy in ("block", "channel"):
        several = [layer(TYPES[dtype], strategy, out) for out in (WIDTH, 64)]
        each = [(one.weight_codes, one.weight_scale, one.bias) for one in several]
        operands = zip(*each, strict=True)
        given = (x, *map(list, operands), ["", "silu"], None, "mirror")
        torch.library.opcheck(linear_parts.layers, given)
        found = linear_parts.layers(x[:0], *given[1:3], [None, None], *given[4:])
        assert [y.shape for y in found] == [(0, *ROWS[1:], WIDTH), (0, *ROWS[1:], 64)]


def test_the_pass_stands_beside_others_and_in_the_key_of_cached_code() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen: list[int] = []

    class Other(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            seen.append(len(graph.nodes))

        def uuid(self) -> str:
            return "other"

    other = config.post_grad_custom_post_pass = Other()
    own, x = layer(), rows()
    _, graphs = run(own, x)
    assert len(seen) == 1 and graphs.names() == [LAYER]
    first, second = config.post_grad_custom_post_pass
    assert first is other and second.uuid().startswith(f"cupyattn {ca.__version__} ")
    torch._dynamo.reset()
    run(own, x)
    assert config.post_grad_custom_post_pass == [first, second]


def test_a_torch_of_other_passes_is_said_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise AttributeError("no such pass")

    monkeypatch.setattr(epilogues, "pattern", missing)
    monkeypatch.setattr(epilogues, "obstacle", "")
    monkeypatch.setattr(epilogues.inductor_calls, "obstacle", "")
    model, x = torch.nn.Sequential(torch.nn.Linear(256, 256)), torch.randn(3, 256)
    with interop.replace_linear_with_int8(model, backend="mirror") as handle:
        assert "compiled" not in handle.report()
        _, graphs = run(handle.target, x)
        assert graphs.names() == ["cupyattn.int8_linear.default"]
        reason = f"torch {torch.__version__} has other passes (no such pass)"
        assert handle.report().splitlines()[-2:] == [
            f"compiled: nothing becomes part of products, {reason}",
            f"compiled: layers are called by torch's dispatcher, {reason}",
        ]


@pytest.mark.slow
def test_inductor_compiles_and_caches_it() -> None:
    torch.manual_seed(0)
    own, x, r, g = layer(), rows(), rows(), rows(torch.float16, 2, 1, WIDTH)
    others = [layer(), layer(out=64)]
    others[0].bias = None

    def function(x: Any, r: Any, g: Any) -> Any:
        x = x * 2
        return r + g * own(functional.silu(own(x))), *[one(x) for one in others]

    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        found = torch.compile(function, fullgraph=True)(x, r, g)
    assert not torch._dynamo.utils.counters["inductor"]["fxgraph_cache_bypass"]
    own.activation = "silu"
    hidden = own(x * 2)
    assert torch.equal(found[0], product_of(own, hidden, r, g[:, 0]))
    assert all(torch.equal(y, one(x * 2)) for y, one in zip(found[1:], others, strict=True))
