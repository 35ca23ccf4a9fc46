"""Step caches of diffusers, hooks on blocks and attention, in models whose layers are INT8."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import cupyattn as ca
from cupyattn.interop import restore

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
from tests.interop import diffusers_cases as cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
of_torch = importlib.import_module("cupyattn.interop.torch")
of_diffusers = importlib.import_module("cupyattn.interop.diffusers")

STEPS = 4
#: Configurations under which the small models leave out some of their blocks or attention.
CACHES: dict[str, Callable[[Any], Any]] = {
    "first block": lambda _: diffusers.FirstBlockCacheConfig(threshold=10.0),
    "pyramid": lambda _: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, cross_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        cross_attention_timestep_skip_range=(-1, 1001), current_timestep_callback=lambda: 500,
    ),
    "faster": lambda pipe: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 990),
        current_timestep_callback=lambda: float(pipe._current_timestep), is_guidance_distilled=True,
    ),
    "taylor": lambda _: diffusers.TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=1, max_order=1
    ),
    "magnitude": lambda _: diffusers.MagCacheConfig(
        num_inference_steps=STEPS, mag_ratios=torch.ones(2 * STEPS), threshold=1.0
    ),
}  # fmt: skip


def flux() -> Any:
    """Return a pipeline with a pass a step."""
    return cases.make("flux")


def generate(pipe: Any) -> Any:
    call = {n: x for n, x in cases.CASES["flux"].call().items() if "negative" not in n}
    call |= {"true_cfg_scale": 1.0, "height": 64, "width": 64, "output_type": "latent"}
    random = torch.Generator().manual_seed(0)
    return pipe(**call, num_inference_steps=STEPS, generator=random, return_dict=False)[0]


def replace(pipe: Any, *, attention: bool) -> None:
    config = ca.Int8Config(min_elements_for_int8=0)
    of_torch.replace_linear_with_int8(pipe.transformer, config=config, backend="mirror")
    if attention:
        of_diffusers.replace_attention_with_int8(pipe, min_length=1, policy="balanced")


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_leaves_out_what_it_leaves_out_without_int8(cache: str, attention: bool) -> None:
    pipe = flux()
    native = generate(pipe)
    pipe.transformer.enable_cache(CACHES[cache](pipe))
    cached = generate(pipe)
    pipe.transformer.disable_cache()
    replace(pipe, attention=attention)
    found = generate(pipe)
    pipe.transformer.enable_cache(CACHES[cache](pipe))
    int8 = generate(pipe)
    assert not torch.equal(int8, found) and not torch.equal(int8, cached)
    assert (int8 - cached).norm() / cached.norm() < 0.02
    restore(pipe)
    assert torch.equal(generate(pipe), cached)
    replace(pipe, attention=attention)  # the cache was there before
    assert torch.equal(generate(pipe), int8)
    pipe.transformer.disable_cache()
    assert torch.equal(generate(pipe), found)
    restore(pipe)
    assert torch.equal(generate(pipe), native)
