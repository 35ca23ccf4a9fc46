"""Norms and modulation that become part of the pass in front of layers of INT8 codes.

Graphs run as Inductor's passes leave them, as in `test_interop_torch_epilogues`. The pass rounds
nothing between the norm and the codes, so results are those of `norm_quant` and `int8_gemm`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
pytree = importlib.import_module("torch.utils._pytree")
epilogues = importlib.import_module("tests.interop.test_interop_torch_epilogues")
interop = importlib.import_module("cupyattn.interop.torch")
linear_parts = importlib.import_module("cupyattn.interop.torch.linear_parts")

fresh, run, Graphs = epilogues.fresh, epilogues.run, epilogues.Graphs  # `fresh` runs by itself
WIDTH, OUT = 128, 48
NORMED = "cupyattn.int8_normed_layers.default"
HALF = torch.float16


def layer(out: int = OUT, dtype: Any = HALF, **options: Any) -> Any:
    own = torch.nn.Linear(WIDTH, out, dtype=dtype).requires_grad_(False)
    options = {"strategy": "channel", "backend": "mirror", **options}
    return interop.Int8Linear.from_linear(own, **options)


def tensors(*shape: int, dtype: Any = HALF, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(made).to(dtype)


class Fp32Norm(torch.nn.LayerNorm):
    """A norm in float32, as diffusers has it."""

    def forward(self, x: Any) -> Any:
        parameters = (None if p is None else p.float() for p in (self.weight, self.bias))
        own = torch.nn.functional.layer_norm(
            x.float(), self.normalized_shape, *parameters, self.eps
        )
        return own.to(x.dtype)


def norm(kind: Any, affine: bool = False, dtype: Any = HALF) -> Any:
    made = kind(WIDTH, eps=1e-6, elementwise_affine=affine, dtype=dtype).requires_grad_(False)
    for number, parameter in enumerate(made.parameters()):
        parameter.data = tensors(WIDTH, dtype=dtype, seed=7 + number)
    return made


def modulated(y: Any, scale: Any, shift: Any) -> Any:
    return y * (1 + scale) + shift


#: How models normalise and modulate x: the function of norm, x, scale and shift, the shape of the
#: last two, their type, the norm, and the arguments of `norm_quant`.
FORMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any, Any, dict[str, Any]]] = {
    "Flux": (
        lambda n, x, s, t: modulated(n(x), s[:, None], t[:, None]), (2, WIDTH), HALF,
        norm(torch.nn.LayerNorm), {"norm": "layer"},
    ),
    "Wan": (
        lambda n, x, s, t: modulated(n(x.float()), s, t).type_as(x), (2, 1, WIDTH), torch.float32,
        norm(Fp32Norm), {"norm": "layer"},
    ),
    "one scale for all": (
        lambda n, x, s, t: modulated(n(x), s, t), (WIDTH,), HALF, norm(torch.nn.LayerNorm),
        {"norm": "layer"},
    ),
    "of each token": (
        lambda n, x, s, t: modulated(n(x), s, t), (2, 5, WIDTH), HALF, norm(torch.nn.LayerNorm),
        {"norm": "layer"},
    ),
    "weight, bias, modulation": (
        lambda n, x, s, t: modulated(n(x), s[:, None], t[:, None]), (2, WIDTH), HALF,
        norm(torch.nn.LayerNorm, affine=True), {"norm": "layer"},
    ),
    "weight and bias": (
        lambda n, x, *_: n(x), (), HALF, norm(Fp32Norm, affine=True), {"norm": "layer"},
    ),
    "RMS": (lambda n, x, *_: n(x), (), HALF, norm(torch.nn.RMSNorm, affine=True), {"norm": "rms"}),
    "RMS, scale alone": (
        lambda n, x, s, t: n(x) * (s + 1), (2, 1, WIDTH), HALF, norm(torch.nn.RMSNorm),
        {"norm": "rms"},
    ),
}  # fmt: skip


def expected(own: Any, given: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """Return the product of the codes that `norm_quant` makes."""
    found = {name: x.numpy() for name, x in arrays.items() if x is not None}
    codes, scales = ca.norm_quant(**found, eps=1e-6, rotate=own.rotate, **given)
    y = ca.int8_gemm(
        codes, scales, own.weight_codes.numpy(), own.weight_scale.numpy(), bias=own.bias.numpy()
    )
    return torch.from_numpy(y)


@pytest.mark.parametrize("rotate", [None, "hadamard"])
@pytest.mark.parametrize("name", FORMS)
def test_norm_and_modulation_are_part_of_the_pass(name: str, rotate: str | None) -> None:
    form, shape, dtype, own_norm, given = FORMS[name]
    torch.manual_seed(0)
    own, x = layer(rotate=rotate), tensors(2, 5, WIDTH)
    scale, shift = (tensors(*shape, dtype=dtype, seed=n) for n in (1, 2)) if shape else (x, x)

    def function(x: Any, s: Any, t: Any) -> Any:
        return own(form(own_norm, x, s, t))

    found, graphs = run(function, x, scale, shift)
    names = graphs.names()
    assert names[-1] == NORMED and set(names[:-1]) <= {"aten.unsqueeze.default"}
    vectors = dict(zip(("weight", "bias"), own_norm.parameters(), strict=False))
    arrays = {"x": x, **vectors}
    if shape:
        arrays |= {"scale": scale, "shift": None if "alone" in name else shift}
        if len(shape) == 2:
            arrays |= {n: arrays[n][:, None] for n in ("scale", "shift")}
    assert torch.equal(found, expected(own, given, arrays))
    # What was eager rounds to 16 bits in between, which changes some codes by one.
    eager = function(x, scale, shift)
    assert (found - eager).double().norm() < 0.01 * eager.double().norm()


def test_a_modulation_may_leave_out_leading_axes() -> None:
    torch.manual_seed(0)
    own, own_norm, x, s = layer(), norm(torch.nn.LayerNorm), tensors(2, 3, 4, WIDTH), tensors(WIDTH)

    def function(x: Any, s: Any) -> Any:
        return own(modulated(own_norm(x), s, s))

    found, graphs = run(function, x, s[None, None])
    assert graphs.names() == [NORMED]
    assert torch.equal(found, run(function, x, s)[0])


def test_layers_of_one_norm_share_its_pass() -> None:
    """Examples are to_q, to_k and to_v, and a layer with an activation."""
    torch.manual_seed(0)
    layers, own = [layer(out) for out in (48, 48, 16, 64)], norm(torch.nn.LayerNorm)
    x, s, t = (tensors(2, n, WIDTH, seed=n) for n in (5, 1, 1))

    def function(x: Any, s: Any, t: Any) -> Any:
        y = modulated(own(x), s, t)
        q, k, v, up = [one(y) for one in layers]
        return q, k, v, torch.nn.functional.gelu(up)

    found, graphs = run(function, x, s, t)
    assert graphs.names() == [NORMED]
    for y, one in zip(found[:3], layers, strict=False):
        assert torch.equal(y, expected(one, {"norm": "layer"}, {"x": x, "scale": s, "shift": t}))


def test_lengths_may_be_dynamic() -> None:
    torch.manual_seed(0)
    form, _, _, own_norm, given = FORMS["Flux"]
    own, x = layer(), tensors(2, 7, WIDTH)
    s, t = (tensors(2, WIDTH, seed=n) for n in (1, 2))
    found, graphs = run(lambda x, s, t: own(form(own_norm, x, s, t)), x, s, t, dynamic=True)
    assert graphs.names()[-1] == NORMED
    arrays = {"x": x, "scale": s[:, None], "shift": t[:, None]}
    assert torch.equal(found, expected(own, given, arrays))


def test_a_residual_stays_part_of_the_product() -> None:
    torch.manual_seed(0)
    own, x, gate = layer(WIDTH), tensors(2, 5, WIDTH), tensors(2, 1, WIDTH, seed=1)
    rms = norm(torch.nn.RMSNorm, affine=True)
    found, graphs = run(lambda x, gate: x + gate * own(rms(x)), x, gate)
    assert graphs.names() == [NORMED]
    product = expected(own, {"norm": "rms"}, {"x": x, "weight": rms.weight}).double()
    exact = x.double() + gate.double() * product
    assert (found.double() - exact).norm() < 2e-3 * exact.norm()


functional = torch.nn.functional


def halves_of(gate: Callable[[Any], Any], first: int = 0) -> Callable[..., Any]:
    """Return a gated linear unit, whose gate is the first or the second half."""

    def function(n: Any, x: Any) -> Any:
        halves = x.chunk(2, -1)
        return gate(halves[first]) * halves[1 - first]

    return function


#: How models activate x in front of a layer: the function of a norm and x, and the arguments of
#: `norm_quant`.
ACTIVATED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "GELU": (lambda n, x: functional.gelu(x), {"activation": "gelu"}),
    "GELU by tanh in float32": (
        lambda n, x: functional.gelu(x.float(), approximate="tanh").half(),
        {"activation": "gelu_tanh"},
    ),
    "SiLU of a norm": (
        lambda n, x: functional.silu(n(x)), {"norm": "layer", "activation": "silu"}
    ),
    "GELU of a norm in float32": (
        lambda n, x: functional.gelu(Fp32Norm.forward(n, x.float())).half(),
        {"norm": "layer", "activation": "gelu"},
    ),
    "SwiGLU": (halves_of(functional.silu), {"activation": "swiglu"}),
    "GEGLU, gate last": (halves_of(functional.gelu, 1), {"activation": "geglu_gate_last"}),
}  # fmt: skip


@pytest.mark.parametrize("rotate", [None, "hadamard"])
@pytest.mark.parametrize("name", ACTIVATED)
def test_an_activation_is_part_of_the_pass(name: str, rotate: str | None) -> None:
    form, given = ACTIVATED[name]
    torch.manual_seed(0)
    own, x = layer(rotate=rotate), tensors(2, 5, WIDTH * (1 + ("GLU" in name)))
    own_norm = norm(torch.nn.LayerNorm)
    found, graphs = run(lambda x: own(form(own_norm, x)), x)
    assert graphs.names()[-1] == NORMED
    assert not any("erf" in one or "tanh" in one or "exp" in one for one in graphs.names())
    assert torch.equal(found, expected(own, given, {"x": x}))
    eager = own(form(own_norm, x))
    assert (found - eager).double().norm() < 0.01 * eager.double().norm()


def test_an_activation_of_what_something_else_reads() -> None:
    """Its input may have other readers, unless a norm in front would be computed twice."""
    torch.manual_seed(0)
    own, x, rms = layer(), tensors(2, 5, WIDTH), norm(torch.nn.RMSNorm)

    def of_the_norm(x: Any) -> Any:
        y = rms(x)
        return own(functional.silu(y)), y

    (found, y), graphs = run(of_the_norm, x)
    assert graphs.names()[-1] == NORMED and "aten.rsqrt.default" in graphs.names()
    assert torch.equal(found, expected(own, {"activation": "silu"}, {"x": y}))


@pytest.mark.parametrize("add", [False, True])
def test_an_activation_behind_a_layer_belongs_to_its_product(add: bool) -> None:
    torch.manual_seed(0)
    up, down, x = layer(WIDTH), layer(WIDTH), tensors(2, 5, WIDTH)

    def function(x: Any) -> Any:
        y = down(functional.gelu(up(x)))
        return x + y if add else y

    _, graphs = run(function, x)
    assert graphs.names() == ["cupyattn.int8_layer.default"] * 2
    assert [one["activation"] for one in graphs.products()] == ["gelu", ""]


@pytest.mark.parametrize("name", FORMS)
def test_factors_of_channels_are_part_of_the_pass(name: str) -> None:
    """They multiply its vectors, which is exact."""
    form, shape, dtype, own_norm, _ = FORMS[name]
    torch.manual_seed(0)
    factors = 2.0 ** torch.randint(-3, 3, (WIDTH,))
    own, x = layer(rotate="hadamard", smooth=factors), tensors(2, 5, WIDTH)
    scale, shift = (tensors(*shape, dtype=dtype, seed=n) for n in (1, 2)) if shape else (x, x)

    def function(x: Any, s: Any, t: Any) -> Any:
        return own(form(own_norm, x, s, t))

    found, graphs = run(function, x, scale, shift)
    assert graphs.names()[-1] == NORMED
    # Nothing is rounded to 16 bits in between, as if rows were float32.
    wide = norm(type(own_norm), affine=bool([*own_norm.parameters()]), dtype=torch.float32)
    wide.load_state_dict(own_norm.state_dict())
    exact = own(form(wide, x.float(), scale.float(), shift.float()))
    assert (found - exact).double().norm() < 3e-3 * exact.double().norm()


def test_layers_of_one_input_with_the_same_factors_are_one_call() -> None:
    torch.manual_seed(0)
    factors, x = 2.0 ** torch.randint(-3, 3, (WIDTH,)), tensors(2, 5, WIDTH)
    alike = [layer(smooth=factors), layer(16, smooth=factors)]
    _, graphs = run(lambda x: [own(x) for own in alike], x)
    assert graphs.names() == ["cupyattn.int8_layers.default"]
    apart = [layer(smooth=factors), layer(16)]
    found, graphs = run(lambda x: [own(x) for own in apart], x)
    assert graphs.names() == ["cupyattn.int8_layer.default"] * 2
    assert all(torch.equal(y, own(x)) for y, own in zip(found, apart, strict=True))


def test_factors_behind_an_activation_stay_in_front_of_the_codes() -> None:
    torch.manual_seed(0)
    own, x = layer(smooth=2.0 ** torch.randint(-3, 3, (WIDTH,))), tensors(2, 5, WIDTH)
    found, graphs = run(lambda x: own(functional.silu(x)), x)
    assert graphs.names()[-1] == "cupyattn.int8_layer.default"
    assert torch.equal(found, own(functional.silu(x)))


def reads_the_norm(own: Any, x: Any, s: Any) -> Any:
    y = norm(torch.nn.LayerNorm)(x)
    return own(y * (1 + s)), y


def reads_the_modulated_rows(own: Any, x: Any, s: Any) -> Any:
    y = norm(torch.nn.LayerNorm)(x) * (1 + s)
    return own(y), y.sum()


#: Calls of a layer on a norm that stay as they are.
OTHERS: dict[str, Callable[..., Any]] = {
    "the norm has another reader": reads_the_norm,
    "the rows have another reader": reads_the_modulated_rows,
    "a factor is not 1 + s": lambda own, x, s: own(norm(torch.nn.LayerNorm)(x) * s),
    "a norm of two axes": lambda own, x, s: own(
        torch.nn.functional.layer_norm(x, x.shape[1:], None, None, 1e-6)
    ),
    "a modulation on both sides": lambda own, x, s: own(
        norm(torch.nn.LayerNorm)(x) * (1 + s) * (1 + s)
    ),
    "an odd function between": lambda own, x, s: own(norm(torch.nn.LayerNorm)(x).sin()),
    "rows of another type": lambda own, x, s: own(norm(Fp32Norm)(x.float()).half()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_norm_in_front_stays(name: str) -> None:
    torch.manual_seed(0)
    own, x, s = layer(), tensors(2, 5, WIDTH), tensors(2, 1, WIDTH, seed=1)
    if name == "rows of another type":
        x = x.float()
    found, graphs = run(lambda x, s: OTHERS[name](own, x, s), x, s)
    assert NORMED not in graphs.names() and "cupyattn.int8_layer.default" in graphs.names()
    y = found[0] if isinstance(found, tuple) else found
    eager = OTHERS[name](own, x, s)
    eager = eager[0] if isinstance(eager, tuple) else eager
    assert (y - eager).double().norm() < 0.01 * eager.double().norm()


def test_layers_by_block_keep_their_own_codes() -> None:
    own, x, rms = layer(strategy="block"), tensors(2, 5, WIDTH), norm(torch.nn.RMSNorm)
    _, graphs = run(lambda x: own(rms(x)), x)
    assert NORMED not in graphs.names()


def test_the_operator_keeps_the_rules_of_operators() -> None:
    one, two, x = layer(), layer(64), tensors(2, 5, WIDTH)
    s = tensors(2, 1, WIDTH, seed=1)
    given = linear_parts.NormedLayers(
        x, None, None, s, s, "layer", 1e-6, "silu", None, [one.weight_codes, two.weight_codes],
        [one.weight_scale, two.weight_scale], [None, two.bias], None, None, ["", "silu"], None,
        "mirror",
    )  # fmt: skip
    torch.library.opcheck(linear_parts.normed_layers, tuple(given))
    made = linear_parts.normed_layers(*given._replace(x=x[:0], scale=None, shift=None))
    assert [y.shape for y in made] == [(0, 5, OUT), (0, 5, 64)]


def two_layers() -> Any:
    one = layer()
    return linear_parts.NormedLayers(
        tensors(5, WIDTH), None, None, None, None, "rms", 1e-6, "", None, [one.weight_codes] * 2,
        [one.weight_scale] * 2, [one.bias] * 2, None, None, ["", "silu"], None, "mirror",
    )  # fmt: skip


#: What is wrong with a call of two layers, and the sentence that says so.
MISCALLED: dict[str, tuple[dict[str, Any], str]] = {
    "an activation for one": ({"activations": [""]}, "one entry for each layer, got 2, 2, 2, 1"),
    "a bias for one": ({"biases": [None]}, "one entry for each layer, got 2, 2, 1, 2"),
    "no layers": (
        {"weights": [], "weight_scales": [], "biases": [], "activations": []},
        "one entry for each layer, got 0, 0, 0, 0",
    ),
    "a residual of both": ({"residual": tensors(5, OUT)}, "residual goes with one layer, got 2"),
    "a gate alone": ({"gate": tensors(OUT)}, "gate goes with residual"),
}


@pytest.mark.parametrize("name", MISCALLED)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_wrong_call_of_the_operator_says_so(name: str, place: str) -> None:
    changed, sentence = MISCALLED[name]
    given = tuple(two_layers()._replace(**changed))
    given = pytree.tree_map_only(torch.Tensor, lambda x: x.to(place), given)
    with pytest.raises(ValueError, match=sentence):
        linear_parts.normed_layers(*given)


@pytest.mark.parametrize("name", ["x", "norm_weight", "biases"])
def test_gradients_of_several_layers_are_refused(name: str) -> None:
    """Without a derivative of its own, torch would return zeros or nothing."""
    given = two_layers()
    wanted = tensors(5, WIDTH) if name == "x" else tensors(WIDTH if name != "biases" else OUT)
    wanted.requires_grad_(True)
    own = given._replace(**{name: [None, wanted] if name == "biases" else wanted})
    with pytest.raises(ca.UnsupportedError, match="several layers in one call"):
        linear_parts.normed_layers(*own)
    with torch.no_grad():
        assert len(linear_parts.normed_layers(*own)) == 2
    if name != "norm_weight":
        lists = own.weights, own.weight_scales, own.biases, own.activations
        with pytest.raises(ca.UnsupportedError, match="several layers in one call"):
            linear_parts.layers(own.x, *lists, None, "mirror")


# ---- blocks of diffusers -------------------------------------------------------------------------


def flux() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers import transformer_flux as own

    block = own.FluxTransformerBlock(dim=WIDTH, num_attention_heads=2, attention_head_dim=64)
    return block, {
        "hidden_states": tensors(1, 6, WIDTH), "encoder_hidden_states": tensors(1, 3, WIDTH),
        "temb": tensors(1, WIDTH),
    }  # fmt: skip


def flux_single() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers import transformer_flux as own

    block = own.FluxSingleTransformerBlock(WIDTH, 2, 64)
    return block, flux()[1]


def wan() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers import transformer_wan as own

    block = own.WanTransformerBlock(WIDTH, 256, 2, cross_attn_norm=True)
    return block, {
        "hidden_states": tensors(1, 6, WIDTH), "encoder_hidden_states": tensors(1, 3, WIDTH),
        "temb": tensors(1, 6, WIDTH), "rotary_emb": None,
    }  # fmt: skip


def kandinsky() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers import transformer_kandinsky as own

    block = own.Kandinsky5TransformerDecoderBlock(WIDTH, 32, 256, 32)
    return block, {
        "visual_embed": tensors(1, 6, WIDTH), "text_embed": tensors(1, 3, WIDTH),
        "time_embed": tensors(1, 32), "rope": None, "sparse_params": None,
    }  # fmt: skip


#: Blocks, and how many calls of layers have their norm in the pass: of Flux q, k and v of both
#: streams and the first layer of both feed-forwards; of Wan and Kandinsky q, k and v, q of
#: cross-attention, and the first layer of the feed-forward.
BLOCKS = {
    "Flux": (flux, 4), "Flux, single": (flux_single, 1), "Wan": (wan, 3),
    "Kandinsky": (kandinsky, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_diffusers_have_their_norms_in_the_pass(name: str) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    made, normed = BLOCKS[name]
    block, given = made()
    block = block.to(HALF).requires_grad_(False)
    config = ca.Int8Config(strategy="channel", min_elements_for_int8=1024, max_outlier_ratio=1.0)
    interop.replace_linear_with_int8(block, config=config, backend="mirror")
    with torch.no_grad():
        eager = block(**given)
        graphs = Graphs()
        found = torch.compile(block, backend=graphs)(**given)
    into = NORMED.replace("layers", "layers_into")  # q, k or v that both streams share
    assert sum(name in (NORMED, into) for name in graphs.names()) == normed
    for y, z in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, eager)), strict=True):
        assert (y - z).double().norm() < 0.01 * z.double().norm()
