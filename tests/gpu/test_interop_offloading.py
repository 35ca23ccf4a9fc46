"""Offloaded models with INT8 layers on the device: streams, files, and pipelines with adapters.

tests/interop/test_interop_offloading.py has the tests without a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
accelerate = pytest.importorskip("accelerate")
pytest.importorskip("peft")
if not torch.cuda.is_available():
    pytest.skip("torch has no CUDA here", allow_module_level=True)

from experiments._harness import small_transformers as small  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402

interop = importlib.import_module("cupyattn.interop.torch")
SMALL = ca.Int8Config(min_elements_for_int8=0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


pytestmark = pytest.mark.usefixtures("exact_products")


def in_groups(
    kind: str, *, on_disk: bool = False, **options: Any
) -> Callable[[Any, Path], None]:
    def offload(model: Any, folder: Path) -> None:
        path = str(folder / "groups") if on_disk else None
        model.enable_group_offload(CUDA, CPU, kind, 1, offload_to_disk_path=path, **options)

    return offload


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "layers": lambda model, _: accelerate.cpu_offload(model, CUDA),
    "layers and buffers": lambda model, _: accelerate.cpu_offload(
        model, CUDA, offload_buffers=True
    ),
    "model": lambda model, _: accelerate.cpu_offload_with_hook(model, CUDA),
    "blocks": in_groups("block_level"),
    "leaves": in_groups("leaf_level"),
    "blocks, stream": in_groups("block_level", use_stream=True),
    "leaves, stream": in_groups("leaf_level", use_stream=True),
    "leaves, recorded stream": in_groups("leaf_level", use_stream=True, record_stream=True),
    "leaves, stream, little memory": in_groups(
        "leaf_level", use_stream=True, low_cpu_mem_usage=True
    ),
    "blocks on disk": in_groups("block_level", on_disk=True),
    "leaves on disk, stream": in_groups("leaf_level", on_disk=True, use_stream=True),
}  # fmt: skip


@pytest.mark.parametrize("family", small.FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_an_offloaded_model_computes_as_one_on_the_device(
    way: str, family: str, tmp_path: Path
) -> None:
    call = small.caller(family, where="cuda")
    own, model = (small.transformer(family) for _ in range(2))
    for one in (own, model):
        interop.replace_linear_with_int8(one, config=SMALL)
    expected = call(own.to(CUDA))
    WAYS[way](model, tmp_path)
    for _ in range(4):  # the first call of a stream finds the order, later ones fetch ahead
        found = call(model).to(CUDA)
        torch.cuda.synchronize()
        assert (found - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("way", ["sequential", "model", "groups", "groups, stream"])
def test_an_offloaded_pipeline_loads_adapters(way: str) -> None:
    """It takes its hooks away, loads, and offloads again."""
    torch.manual_seed(0)
    own, pipe = cases.make("sd3"), cases.make("sd3")
    state = cases.adapter(
        own.transformer, "transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.0.proj"
    )
    for one in (own, pipe):
        interop.replace_linear_with_int8(one.transformer, config=SMALL)
    own.to(CUDA)
    if way == "sequential":
        pipe.enable_sequential_cpu_offload()
    elif way == "model":
        pipe.enable_model_cpu_offload()
    else:
        pipe.enable_group_offload(CUDA, CPU, "leaf_level", use_stream="stream" in way)
    for loaded in (False, True):
        if loaded:
            for one in (own, pipe):
                one.load_lora_weights(state)
        expected = cases.generate(own, "sd3", 2)
        for _ in range(2):
            found = cases.generate(pipe, "sd3", 2).to(CUDA)
            assert (found - expected).norm() / expected.norm() < 1e-3
