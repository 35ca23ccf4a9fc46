"""`accelerate` on a device: compiled blocks, CUDA graphs, comparisons, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
if not torch.cuda.is_available():
    pytest.skip("torch without CUDA", allow_module_level=True)

from torch._inductor.utils import run_and_get_code  # noqa: E402

from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from experiments._harness import whole_families  # noqa: E402


def transformer() -> Any:
    """A model of a width that no record has, so that all of it is replaced."""
    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=64, num_attention_heads=8, joint_attention_dim=64,
        caption_projection_dim=512, pooled_projection_dim=64, pos_embed_max_size=32,
    )  # fmt: skip
    return model.to("cuda", torch.bfloat16).eval().requires_grad_(False)


def call(seed: int = 0) -> dict[str, Any]:
    random = torch.Generator("cuda").manual_seed(seed)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device="cuda").bfloat16()

    return {
        "hidden_states": noise(1, 4, 32, 32), "encoder_hidden_states": noise(1, 32, 64),
        "pooled_projections": noise(1, 64), "timestep": torch.full((1,), 500.0, device="cuda"),
        "return_dict": False,
    }  # fmt: skip


def run(model: Any, seed: int = 0) -> Any:
    with torch.no_grad():
        return model(**call(seed))[0].clone()


@pytest.mark.parametrize("how", ["blocks", "graphs"])
def test_accelerated_and_back_to_the_bit(how: str) -> None:
    model = transformer()
    native = run(model)
    with interop.accelerate(model, "balanced", compile=False, log=None):
        eager = run(model)
    handle = interop.accelerate(model, "balanced", compile=how, log=None)
    for seed in (0, 1, 2, 0, 0):
        found = run(handle, seed)
    assert (found.float() - eager.float()).norm() < 0.03 * eager.float().norm()
    assert handle.report().attention.layers[0].compiled == ("balanced",)
    if how == "graphs":
        (part,) = handle._handle_parts
        graph = part.compiled.code.graph
        assert len(graph._graphs) == 1 and not graph.reasons
        assert torch.equal(run(handle), found)  # replays read other arguments in between
        assert not torch.equal(run(handle, 1), found) and torch.equal(run(handle), found)
    handle.restore()
    assert torch.equal(run(model), native)


def test_a_comparison_has_memory_and_times_of_the_device(tmp_path: Path) -> None:
    model = transformer()
    with interop.accelerate(model, "balanced", compile=False, log=None) as handle:
        found = handle.compare(rounds=3, record=tmp_path / "r.json", log=None, **call())
    assert list(found.ways) == ["native", "linear layers", "attention", "accelerated"]
    for way in found.ways.values():
        assert way["peak"] > way["weights"] > 0 and all(0 < s < 60 for (s,) in way["rounds"])
    assert found.ways["accelerated"]["weights"] < found.ways["native"]["weights"]


def test_saved_codes_give_the_bits(tmp_path: Path) -> None:
    model = transformer()
    with interop.accelerate(model, compile=False, log=None) as handle:
        expected = run(model)
        handle.save(tmp_path / "int8")
    with interop.accelerate(model, compile=False, checkpoint=tmp_path / "int8", log=None):
        assert torch.equal(run(model), expected)


#: Arguments in Inductor's code of small models: q, k, v, no mask or bias, tables, norms' weights.
TABLES = "(t0, t1, t2, None, None, t3, t4"
NORMS = f"{TABLES}, t5, t6, "
RAW = {
    "Flux": NORMS, "Wan 2.1 14B": NORMS, "Kandinsky 5 Lite": NORMS, "Qwen-Image": TABLES,
    "Z-Image": NORMS,
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_attention_of_raw_rows_errs_less_than_eager_calls(name: str) -> None:
    """Errors are against the model in float32; a repeated call has the same bits."""
    family = whole_families.small(name)
    latents, make = whole_families.inputs(family, "cuda", 0)
    given = make(latents, torch.tensor([700.0], device="cuda"))

    def wide(x: Any) -> Any:
        if isinstance(x, list):
            return [wide(one) for one in x]
        return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    torch._dynamo.reset()
    with torch.no_grad():
        model = whole_families.make(family, "cuda", 0)
        exact = family.call(model.float(), {key: wide(x) for key, x in given.items()})
        model = whole_families.make(family, "cuda", 0)
        interop.replace_attention_with_int8(model, policy="balanced", min_length=16)
        eager = family.call(model, given)
        compiled = torch.compile(model)
        found, code = run_and_get_code(lambda: family.call(compiled, given))
        again = [family.call(compiled, given) for _ in range(4)]
    assert any(RAW[name] in one and "rope_interleaved=True" in one for one in code)
    assert all(torch.equal(y, found) for y in again)
    errors = [float((y.float() - exact).norm()) for y in (found, eager)]
    assert errors[0] < errors[1]  # compiled code rounds less
