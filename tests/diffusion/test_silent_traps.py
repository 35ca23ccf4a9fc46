"""Options that would be ignored or misread: warned of or refused, and results that unpack."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import Array
from cupyattn.diffusion import SigmaPolicy
from cupyattn.quant import QuantConfig

STEPS = 50
STATIC = QuantConfig("tensor", "tensor", scales=(0.05, 0.05))
FACTORS = np.linspace(2.0, 0.5, STEPS, dtype=np.float32)
WHERE = ["mirror", "interpret"]


def layer(**options: Any) -> ca.Int8Attention:
    return ca.Int8Attention(2, 16, STEPS, **options)


def operands(batch: int = 2, length: int = 40) -> list[Array]:
    rng = np.random.default_rng(1)
    return list(rng.standard_normal((3, batch, 2, length, 16)).astype(np.float16))


def calibration(num_bins: int = 1, percentile: Any = 99.0) -> ca.Calibration:
    q, k, _ = operands()
    batches = [(q, k, t) for t in (0, 25, 49)]
    return ca.calibrate_quantization_scales(
        batches, percentile, sigmas=ca.compute_sigma_schedule(STEPS), num_bins=num_bins
    )


# ---- percentiles are in per cent -----------------------------------------------------------------

UNIT = "percentile is in per cent, above 1 and at most 100, got "


@pytest.mark.parametrize(
    ("percentile", "error", "message"),
    [
        (0.99, ValueError, UNIT + "0.99: give 99 for that"),
        (0.999, ValueError, UNIT + "0.999: give 99.9 for that"),
        (1, ValueError, UNIT + "1: give 100 for that"),
        (np.float32(0.5), ValueError, UNIT + f"{np.float32(0.5)!r}: give 50 for that"),
        (0.001, ValueError, UNIT + "0.001: 99 is the default"),
        (0.0, ValueError, UNIT + "0.0: 99 is the default"),
        (-5, ValueError, UNIT + "-5: 99 is the default"),
        (100.1, ValueError, UNIT + "100.1: 99 is the default"),
        (float("nan"), ValueError, UNIT + "nan: 99 is the default"),
        ("99", TypeError, "percentile must be a number of per cent, got '99'"),
        (True, TypeError, "percentile must be a number of per cent, got True"),
        (None, TypeError, "percentile must be a number of per cent, got None"),
    ],
)
def test_percentiles_that_are_no_per_cent(percentile, error, message) -> None:
    with pytest.raises(error) as caught:
        calibration(percentile=percentile)
    assert str(caught.value) == message


def test_the_percentile_of_a_record_or_a_file_is_held_to_the_same(tmp_path) -> None:
    found = calibration()
    with pytest.raises(ValueError, match="got 0.99: give 99 for that"):
        ca.Calibration(**{**vars(found), "percentile": 0.99})
    wrong = calibration()
    object.__setattr__(wrong, "percentile", 0.99)
    wrong.save(tmp_path / "scales.safetensors")
    with pytest.raises(ValueError, match="no usable calibration: .*got 0.99: give 99 for that"):
        layer(timestep_scales=tmp_path / "scales.safetensors")


# ---- options without effect ----------------------------------------------------------------------

DYNAMIC = (
    "no effect while scales are dynamic: give timestep_scales=Calibration.load(path) or "
    "quant=QuantConfig(scales=...), or leave "
)
PRUNING = (
    " has no effect while enable_pruning is False: give enable_pruning=True, for the layer or for "
    "a call, or leave it out"
)
BLOCKS = (
    "block_size has no effect without attention_type='block_sparse' and window_size: give both, "
    "or leave it out"
)
ALL_PRECISE = (
    " has no effect in steps of mode 'precision', which precision_policy takes throughout: choose "
    "another policy, or leave it out"
)
EIGHT = QuantConfig(pv="int8")
FUSED = QuantConfig(smooth_k=False, fused=True)
WITHOUT_EFFECT: list[tuple[dict[str, Any], list[str]]] = [
    ({"timestep_scales": FACTORS}, [f"timestep_scales has {DYNAMIC}it out"]),
    ({"use_adaptive_scaling": True}, [f"use_adaptive_scaling has {DYNAMIC}it out"]),
    ({"use_adaptive_scaling": False}, [f"use_adaptive_scaling has {DYNAMIC}it out"]),
    (
        {"timestep_scales": FACTORS, "use_adaptive_scaling": True},
        [f"timestep_scales and use_adaptive_scaling have {DYNAMIC}them out"],
    ),
    (
        {"timestep_scales": FACTORS, "use_adaptive_scaling": False, "quant": STATIC},
        ["timestep_scales has no effect with use_adaptive_scaling=False: leave one of them out"],
    ),
    (
        {"timestep_scales": calibration(), "use_adaptive_scaling": True},
        [
            "use_adaptive_scaling has no effect with a calibration of one bin, which serves all "
            "steps: calibrate with num_bins=, or leave it out"
        ],
    ),
    ({"pruning_ratio": 0.5}, ["pruning_ratio" + PRUNING]),
    (
        {"pruning_threshold": 0.5, "pruning_rows": 8},
        ["pruning_threshold" + PRUNING, "pruning_rows" + PRUNING],
    ),
    (
        {"enable_pruning": True, "pruning_threshold": 0.5, "pruning_ratio": 0.5},
        ["pruning_ratio has no effect beside pruning_threshold: leave one of them out"],
    ),
    ({"block_size": 128}, [BLOCKS]),
    ({"block_size": 128, "attention_type": "local", "window_size": 8}, [BLOCKS]),
    (
        {
            "block_size": 128, "attention_type": "block_sparse",
            "block_mask": ca.BlockMask.from_window(40, 40, (8, 8)),
        },
        [BLOCKS],
    ),
    (
        {"qk_norm_eps": 1e-3},
        ["qk_norm_eps has no effect without qk_norm: give qk_norm, or leave it out"],
    ),
    ({"precision_policy": "precision", "quant": EIGHT}, ["quant" + ALL_PRECISE]),
    (
        {"precision_policy": ["precision"] * STEPS, "timestep_scales": calibration()},
        ["timestep_scales" + ALL_PRECISE],
    ),
    (
        {"precision_policy": "balanced", "quant": EIGHT},
        [
            "quant.pv='int8' has no effect, since it is for mode 'aggressive', which "
            "precision_policy never takes: choose a policy that does, or leave pv out of quant"
        ],
    ),
    (
        {"precision_policy": "aggressive", "quant": FUSED},
        [
            "quant.fused=True has no effect, since it is for mode 'balanced', which "
            "precision_policy never takes: choose a policy that does, or leave fused out of quant"
        ],
    ),
    (
        {"precision_policy": SigmaPolicy(late_steps=STEPS)},
        [
            f"SigmaPolicy(late_steps={STEPS}) makes all {STEPS} steps 'precision': give fewer, or "
            "precision_policy='precision'"
        ],
    ),
    (
        {"precision_policy": SigmaPolicy(late_steps=0)},
        [
            "SigmaPolicy(late_steps=0) has no effect: give the number of last steps that run in "
            "16 bits, or leave late_steps out"
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "messages"), WITHOUT_EFFECT)
def test_options_without_effect_are_warned_of_once_where_they_stand(options, messages) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        attend = ca.Int8Attention(2, 16, STEPS, **options)
        attend(*operands(), 25)
    assert [str(w.message) for w in seen] == messages
    assert {(w.category, w.filename) for w in seen} == {(UserWarning, __file__)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quant": STATIC, "use_adaptive_scaling": True},
        {"quant": STATIC, "use_adaptive_scaling": False},
        {"quant": STATIC, "timestep_scales": FACTORS, "use_adaptive_scaling": True},
        {"timestep_scales": calibration(), "quant": EIGHT},
        {"timestep_scales": calibration(3), "use_adaptive_scaling": False},
        {"enable_pruning": True, "pruning_ratio": 0.5, "pruning_rows": 8},
        {"enable_pruning": True, "pruning_threshold": 0.5},
        {"attention_type": "block_sparse", "window_size": 8, "block_size": 128},
        {"precision_policy": "aggressive", "quant": EIGHT},
        {"precision_policy": "balanced", "quant": FUSED},
        {"precision_policy": SigmaPolicy(late_steps=STEPS - 1), "quant": EIGHT},
        {"qk_norm": (np.ones(16, np.float32),) * 2, "qk_norm_eps": 1e-3},
    ],
)
def test_options_with_an_effect_are_not_warned_of(options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend = ca.Int8Attention(2, 16, STEPS, **options)
        attend(*operands(), 25)


@pytest.mark.parametrize(
    ("options", "overrides", "messages"),
    [
        ({}, {"pruning_ratio": 0.5}, ["pruning_ratio" + PRUNING]),
        ({}, {"block_size": 128}, [BLOCKS]),
        (
            {"enable_pruning": True, "pruning_threshold": 0.5},
            {"pruning_ratio": 0.5},
            ["pruning_ratio has no effect beside pruning_threshold: leave one of them out"],
        ),
        (
            {"enable_pruning": True, "pruning_threshold": 0.5},
            {"pruning_ratio": 0.5, "enable_pruning": True},
            ["pruning_ratio has no effect beside pruning_threshold: leave one of them out"],
        ),
        ({}, {"block_size": 128, "attention_type": "dense"}, [BLOCKS]),
        ({}, {"pruning_ratio": 0.5, "enable_pruning": True}, []),
        ({}, {"pruning_ratio": 0.5, "enable_pruning": False}, []),
    ],
)
def test_the_same_holds_for_the_options_of_a_call(options, overrides, messages) -> None:
    attend = layer(**options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        attend(*operands(), 25, **overrides)
    assert [(str(w.message), w.filename) for w in seen] == [(m, __file__) for m in messages]


@pytest.mark.parametrize(
    ("kind", "option", "of"),
    [
        ("flow", {"sigma_min": 0.01}, "edm"),
        ("ddpm", {"rho": 3.0}, "edm"),
        ("edm", {"shift": 3.0}, "flow"),
        ("flow", {"train_timesteps": 500}, "ddpm"),
        ("edm", {"beta_schedule": "scaled_linear"}, "ddpm"),
    ],
)
def test_arguments_of_another_kind_of_schedule(kind, option, of) -> None:
    message = f"{next(iter(option))} has no effect with kind={kind!r}: it is for kind={of!r}"
    with pytest.warns(UserWarning) as seen:
        found = ca.compute_sigma_schedule(STEPS, kind, **option)
    assert [str(w.message) for w in seen] == [message + ", so leave it out"]
    assert np.array_equal(found, ca.compute_sigma_schedule(STEPS, kind))


@pytest.mark.parametrize(
    ("late", "error", "message"),
    [
        (-1, ValueError, "late_steps must be 0 or more, got -1"),
        (2.5, TypeError, "late_steps must be a whole number, got 2.5"),
    ],
)
def test_late_steps_that_mean_nothing(late, error, message) -> None:
    with pytest.raises(error) as caught:
        SigmaPolicy(late_steps=late)
    assert str(caught.value) == message


def test_late_steps_are_the_last_of_the_schedule() -> None:
    policy = SigmaPolicy(aggressive_above=np.inf, precision_below=0, late_steps=10)
    attend = ca.Int8Attention(2, 16, 50, precision_policy=policy)
    modes = [attend.mode(timestep) for timestep in range(50)]
    assert modes == ["balanced"] * 40 + ["precision"] * 10
    shorter = ca.Int8Attention(2, 16, 20, precision_policy=policy)
    assert (shorter.mode(9), shorter.mode(10)) == ("balanced", "precision")
    with pytest.raises(ValueError, match=r"^late_steps=10 counts from the end of a schedule: .*"):
        policy.mode(45, 1.0)


# ---- pruning for one call ------------------------------------------------------------------------


@pytest.mark.parametrize("backend", WHERE)
@pytest.mark.parametrize("timestep", [10, 25, 49])
def test_pruning_asked_for_in_a_call_returns_the_kept_keys(backend, timestep) -> None:
    """A batch of 2 must not be unpacked into two outputs."""
    q, k, v = operands(2)
    attend = layer(backend=backend)
    o, kept = attend(q, k, v, timestep, enable_pruning=True, pruning_ratio=0.25)
    assert o.shape == q.shape and o.dtype == q.dtype
    assert kept.shape == (2, 2, 40) and kept.dtype == np.bool_
    assert (kept.sum(axis=2) == 30).all()
    # The kept keys alone, by exact attention in float64: what pruning promises.
    scores = np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k.astype(np.float64)) / 4
    scores[~np.broadcast_to(kept[:, :, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    exact = weights / weights.sum(axis=3, keepdims=True) @ v.astype(np.float64)
    assert np.abs(o - exact).max() < 0.05
    alone = attend(q, k, v, timestep, enable_pruning=True, pruning_ratio=0.25, return_mask=False)
    assert isinstance(alone, np.ndarray) and np.array_equal(alone, o)


@pytest.mark.parametrize("backend", WHERE)
def test_pruning_set_at_construction_returns_o_alone(backend) -> None:
    q, k, v = operands(2)
    attend = layer(backend=backend, enable_pruning=True, pruning_ratio=0.25)
    o = attend(q, k, v, 25)
    assert isinstance(o, np.ndarray) and o.shape == q.shape
    o2, kept = attend(q, k, v, 25, return_mask=True)
    assert np.array_equal(o, o2) and (kept.sum(axis=2) == 30).all()
    again, same = attend(q, k, v, 25, enable_pruning=True)
    assert np.array_equal(o, again) and np.array_equal(kept, same)
    dense = attend(q, k, v, 25, enable_pruning=False)
    assert isinstance(dense, np.ndarray) and not np.array_equal(dense, o)


def test_a_call_is_found_again_in_the_same_form() -> None:
    """The second and third call of one form run what the first prepared."""
    attend = layer(backend="interpret")
    first, *others = (attend(*operands(2), 25, enable_pruning=True) for _ in range(3))
    for other in others:
        assert len(other) == 2 and all(map(np.array_equal, first, other))


def test_both_branches_of_guidance_return_the_kept_keys_too() -> None:
    q, k, v = operands(2)
    attend = layer()
    o_cond, o_uncond, kept = attend.fused_cfg(q, q[:, ::-1].copy(), k, v, 25, enable_pruning=True)
    assert o_cond.shape == o_uncond.shape == q.shape and kept.shape == (2, 2, 40)
    pair = attend.fused_cfg(q, q, k, v, 25, enable_pruning=True, return_mask=False)
    assert len(pair) == 2
    fused = layer(enable_cfg_fusion=True)
    o, kept = fused(np.concatenate([q, q]), k, v, 25, enable_pruning=True)
    assert o.shape[0] == kept.shape[0] == 4


def test_a_layer_has_no_return_lse_and_says_where_it_is() -> None:
    message = (
        "Int8Attention has no return_lse: cupyattn.attention(q, k, v, quant=..., return_lse=True) "
        "returns the log-sum-exp"
    )
    q, k, v = operands(2)
    for call in (layer().__call__, lambda *a, **o: layer().fused_cfg(q, *a, **o)):
        for pruned in ({}, {"enable_pruning": True}):
            with pytest.raises(TypeError) as caught:
                call(q, k, v, 25, return_lse=True, **pruned)
            assert str(caught.value) == message


@pytest.mark.frameworks
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_tensors_come_back_in_the_same_way() -> None:
    import torch

    from cupyattn.interop.torch import Int8Attention

    tensors = list(map(torch.from_numpy, operands(2)))
    module = Int8Attention(2, 16, STEPS, backend="mirror")
    o, kept = module(*tensors, 25, enable_pruning=True)
    want, want_kept = layer()(*operands(2), 25, enable_pruning=True)
    assert np.array_equal(o.numpy(), want) and np.array_equal(kept.numpy(), want_kept)
    assert isinstance(module(*tensors, 25, enable_pruning=True, return_mask=False), torch.Tensor)
    o, kept = layer()(*tensors, 25, enable_pruning=True)
    assert isinstance(o, torch.Tensor) and isinstance(kept, torch.Tensor)
    with pytest.warns(UserWarning, match="use_adaptive_scaling has no effect") as seen:
        Int8Attention(2, 16, STEPS, use_adaptive_scaling=True)
    assert [w.filename for w in seen] == [str(Path(__file__))]
