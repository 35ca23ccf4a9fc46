"""Other libraries read the written files: compressed-tensors the codes, diffusers the models. Only
these tests need the libraries, so each test imports its library first or skips.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.checkpoints import convert, dequantize, open_checkpoint
from cupyattn.quant import weight_error
from tests.checkpoints.checkpoint_files import model, write

SMALL = ca.Int8Config(min_elements_for_int8=100)
CHANNEL = ca.Int8Config(min_elements_for_int8=100, strategy="channel")


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("limit", "config"), [(100_000, SMALL), (10**9, SMALL), (100_000, CHANNEL)], ids=str
)
def test_compressed_tensors_dequantises_to_the_same_numbers(
    tmp_path: Path, limit: int, config: ca.Int8Config
) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    path = write(tmp_path / "model" / "model.safetensors", model(width=200))
    convert(path.parent, tmp_path / "int8", config, max_shard_bytes=limit)
    dequantize(tmp_path / "int8", tmp_path / "mine", dtype="float32")
    files = sorted((tmp_path / "int8").glob("*.safetensors"))
    assert len(files) == (1 if limit == 10**9 else 6)
    tensors = {name: x for file in files for name, x in library.load_file(file).items()}
    reader = converters.CompressedTensorsDequantizer(tmp_path / "int8", dtype=torch.float32)
    theirs, mine = reader.validate(dict(tensors)), open_checkpoint(tmp_path / "mine")
    assert set(theirs) == set(mine.tensors) == set(model(width=200))
    quantised = [name for name, x in tensors.items() if x.dtype == torch.int8]
    assert len(quantised) == 4 and not any(name in quantised for name in ("patch.weight", "steps"))
    for name in quantised:
        np.testing.assert_array_equal(theirs[name].numpy(), mine.read(name))


@pytest.mark.frameworks
@pytest.mark.parametrize("config", [SMALL, CHANNEL], ids=["block", "channel"])
def test_compressed_tensors_takes_the_configuration(tmp_path: Path, config: ca.Int8Config) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    torch = pytest.importorskip("torch")
    write(tmp_path / "model.safetensors", model())
    convert(tmp_path / "model.safetensors", tmp_path / "int8", config)
    record = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    found = quantization.QuantizationConfig.model_validate(record)
    root = torch.nn.ModuleDict({"patch": torch.nn.Conv2d(3, 72, 5)})
    for name in (*record["config_groups"]["group_0"]["targets"], *record["ignore"]):
        inner = root
        *folders, last = name.split(".")
        for folder in folders:
            if folder not in inner:
                inner[folder] = torch.nn.ModuleDict()
            inner = inner[folder]
        inner[last] = torch.nn.Linear(200, 144)
    quantization.apply_quantization_config(root, found)
    schemes = {n for n, m in root.named_modules() if hasattr(m, "quantization_scheme")}
    assert schemes == set(record["config_groups"]["group_0"]["targets"])


@pytest.mark.frameworks
@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
@pytest.mark.parametrize("form", ["int8", "packed, 8 bits", "packed, 4 bits"])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_what_compressed_tensors_wrote_is_read_as_it_reads_it(
    tmp_path: Path, strategy: str, form: str, symmetric: bool
) -> None:
    """Codes, zero points and packed words made by the library; numbers as it dequantises them."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    library = pytest.importorskip("safetensors.torch")
    bits, packed = 4 if "4" in form else 8, "packed" in form
    name = "pack-quantized" if packed else "int-quantized"
    shape, block = (40, 96), {"group": (1, 32), "block": (16, 40)}.get(strategy)
    rows, columns = block or {"tensor": (40, 96), "channel": (1, 96)}[strategy]
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = 32
    if strategy == "block":
        weights["block_structure"] = [16, 40]
    group = {"targets": ["Linear"], "weights": weights, "format": name}
    scheme = quantization.QuantizationScheme(**group)
    generator = torch.Generator().manual_seed(0)
    of_scales = (1,) if strategy == "tensor" else (-(-40 // rows), -(-96 // columns))
    state = {
        "weight": torch.randn(shape, generator=generator),
        "weight_scale": 0.02 + 0.02 * torch.rand(of_scales, generator=generator),
        "weight_zero_point": torch.randint(-8, 8, of_scales, generator=generator).to(torch.int8),
    }
    if symmetric:
        state["weight_zero_point"].zero_()
    codec = compressors.BaseCompressor.get_value_from_registry(name)
    compressed = codec.compress(state, scheme)
    theirs = codec.decompress(dict(compressed), scheme)["weight"]
    (tmp_path / "x").mkdir()
    tensors = {f"fc.{key}": x.contiguous() for key, x in compressed.items()}
    library.save_file(tensors, tmp_path / "x" / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "compressed-tensors", "format": name, "config_groups": {"g": group}}
    (tmp_path / "x" / "config.json").write_text(json.dumps({"quantization_config": config}))
    dequantize(tmp_path / "x", tmp_path / "back", dtype="float32")
    mine = open_checkpoint(tmp_path / "back")
    assert set(mine.tensors) == {"fc.weight"}
    np.testing.assert_array_equal(mine.read("fc.weight"), theirs.numpy())


@pytest.mark.frameworks
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_what_compressed_tensors_wrote_runs_on_its_codes(tmp_path: Path, strategy: str) -> None:
    """W8A8 with dynamic activations per token, scales in BF16: the layers' weights are its own."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    library = pytest.importorskip("safetensors.torch")
    from cupyattn.interop.torch import load_int8
    from cupyattn.interop.torch.linear import dequantised

    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"], "format": "int-quantized", "weights": {**int8, "strategy": strategy},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }  # fmt: skip
    scheme = quantization.QuantizationScheme(**group)
    settings = scheme.model_dump(mode="json")  # as it is in files, every setting named
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40, dtype=torch.bfloat16)
    w = linear.weight.detach()
    largest = w.abs().amax(1, keepdim=True) if strategy == "channel" else w.abs().amax().reshape(1)
    state = {"weight": w, "weight_scale": largest / 127}
    codec = compressors.BaseCompressor.get_value_from_registry("int-quantized")
    compressed = codec.compress(dict(state), scheme)
    theirs = codec.decompress(dict(compressed), scheme)["weight"]
    (tmp_path / "x").mkdir()
    tensors = {f"fc.{key}": x.contiguous() for key, x in compressed.items()}
    library.save_file(tensors | {"fc.bias": linear.bias.detach()}, tmp_path / "x/model.safetensors")
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": settings}}
    (tmp_path / "x" / "config.json").write_text(json.dumps({"quantization_config": config}))
    module = torch.nn.ModuleDict({"fc": torch.nn.Linear(96, 40, dtype=torch.bfloat16)})
    layer = load_int8(module, tmp_path / "x", backend="mirror")["fc"]
    assert torch.equal(dequantised(layer.weight_codes, layer.weight_scale, torch.bfloat16), theirs)
    x = torch.randn(9, 96, dtype=torch.bfloat16)
    assert (layer(x) - linear(x)).norm() < 0.03 * linear(x).norm()


def models() -> dict[str, dict[str, Any]]:
    """Return small models of the true classes: arguments by class, and variant where there are two.

    Those of Kandinsky 5 have the heads, axes and proportions of Lite and Pro.
    """
    attention = {"attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 4}
    kandinsky = {
        "in_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 16, "out_visual_dim": 4,
        "num_visual_blocks": 2, "visual_cond": True,
    }  # fmt: skip
    return {
        "Kandinsky5Transformer3DModel, Lite": {
            **kandinsky, "model_dim": 128, "ff_dim": 512, "time_dim": 36, "num_text_blocks": 2,
            "axes_dims": (16, 24, 24),
        },
        "Kandinsky5Transformer3DModel, Pro": {
            **kandinsky, "model_dim": 256, "ff_dim": 1024, "time_dim": 64, "num_text_blocks": 4,
            "axes_dims": (32, 48, 48), "attention_type": "nabla", "attention_P": 0.9,
        },
        "FluxTransformer2DModel": {
            **attention, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 16,
            "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True,
        },
        "SD3Transformer2DModel": {
            **attention, "sample_size": 16, "num_layers": 2, "joint_attention_dim": 16,
            "caption_projection_dim": 64, "pooled_projection_dim": 16, "pos_embed_max_size": 8,
        },
        "WanTransformer3DModel": {
            **attention, "num_layers": 1, "out_channels": 4, "text_dim": 16, "freq_dim": 16,
            "ffn_dim": 128,
        },
        "PixArtTransformer2DModel": {
            **attention, "num_layers": 1, "out_channels": 8, "sample_size": 8,
            "cross_attention_dim": 64, "caption_channels": 16,
        },
    }  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_diffusers_loads_what_was_dequantised(tmp_path: Path, name: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")  # diffusers needs it for models with parts kept in float32
    torch.manual_seed(0)
    model = getattr(diffusers, name.partition(",")[0])
    given = model(**models()[name]).to(getattr(torch, dtype))
    given.save_pretrained(tmp_path / "model")
    done = convert(tmp_path / "model", tmp_path / "int8", SMALL, max_shard_bytes=200_000)
    assert done.analysis is not None
    verdicts = {t.name: t.verdict for t in done.analysis.tensors}
    blocks = [n for n in verdicts if n.endswith(".weight") and n.split(".")[1].isdigit()]
    layers = [n for n in blocks if "norm" not in n and "modulation" not in n]
    assert len(layers) >= 6 and {verdicts[n] for n in layers} == {"int8"}
    assert {verdicts[n] for n in verdicts if n not in layers} <= {"keep", "16bit"}
    dequantize(tmp_path / "int8", tmp_path / "back")
    found, report = model.from_pretrained(
        tmp_path / "back", torch_dtype=getattr(torch, dtype), output_loading_info=True,
    )  # fmt: skip
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = given.state_dict(), found.state_dict()
    for key, w in before.items():
        a, b = (x.to(torch.float32).numpy() for x in (w, after[key]))
        if verdicts.get(key) == "int8":
            scales = ca.weight_quant(a)[1]
            assert (np.abs(a - b) <= weight_error(a, scales, out_dtype=dtype)).all()
        else:
            np.testing.assert_array_equal(a, b)
