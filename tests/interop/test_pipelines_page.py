"""docs/PIPELINES.md: each row of its table is a test, on a small pipeline of diffusers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
hf_accelerate = pytest.importorskip("accelerate")

from diffusers.hooks import HookRegistry  # noqa: E402

from cupyattn.errors import UnsupportedError  # noqa: E402
from cupyattn.interop.diffusers import accelerate  # noqa: E402 - imports diffusers
from cupyattn.interop.torch import Int8Linear  # noqa: E402
from tests.docs.test_docs_blocks import check_page  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.support.marks import slow_unless  # noqa: E402
from tests.support.torch_ranks import on_threads  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

PAGE = Path(__file__).parents[2] / "docs" / "PIPELINES.md"
CPU = torch.device("cpu")
LAYER = "transformer_blocks.0.ff.net.2"
Row = Callable[[Any], None]
ROWS: dict[str, Row] = {}


def row(name: str) -> Callable[[Row], Row]:
    """Register a function of an accelerated pipeline's maker as a row of the page."""

    def register(function: Row) -> Row:
        ROWS[name] = function
        return function

    return register


def made() -> Any:
    return cases.make("flux")


#: The rows' default way of compiling.
HOW: dict[str, Any] = {"compile": False}


def fast(pipe: Any, **options: Any) -> Any:
    return accelerate(pipe, "balanced", **{**HOW, "log": None, **options})


def in_fast_code(patch: pytest.MonkeyPatch) -> list[Any]:
    """Let torch.compile trace without generating code, and return a list of its graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    own = torch.compile
    patch.setattr(torch, "compile", lambda code, **how: own(code, **{**how, "backend": backend}))
    torch._dynamo.reset()
    return graphs


def image(pipe: Any, steps: int = 1, **other: Any) -> Any:
    """Return latents of a pass a step, the same every time."""
    call = {n: x for n, x in cases.CASES["flux"].call().items() if "negative" not in n}
    call |= {"true_cfg_scale": 1.0, "height": 192, "width": 192, "output_type": "latent", **other}
    random = torch.Generator().manual_seed(0)
    return pipe(**call, num_inference_steps=steps, generator=random, return_dict=False)[0]


def off(x: Any, own: Any) -> float:
    return float((x - own).norm() / own.norm())


def load_lora(pipe: Any, seed: int, **options: Any) -> None:
    torch.manual_seed(seed)
    pipe.load_lora_weights(cases.adapter(pipe.transformer, LAYER), adapter_name="a", **options)


def comes_and_goes(pipe: Any, add: Callable[[Any], Any], remove: Callable[[Any], Any]) -> None:
    """Add something after and before accelerating, and take all of it away again."""
    native = image(pipe, 2)
    with fast(pipe) as handle:
        int8 = image(handle, 2)
        add(pipe)
        beside = image(handle, 2)
        remove(pipe)
        assert torch.equal(image(handle, 2), int8)
    add(pipe)
    alone = image(pipe, 2)
    assert off(beside, alone) < 0.02
    with fast(pipe) as handle:
        assert torch.equal(image(handle, 2), beside)
        remove(pipe)
    assert torch.equal(image(pipe, 2), native)


# ---- adapters ------------------------------------------------------------------------------------


@row("LoRA")
def lora(pipe: Any) -> None:
    comes_and_goes(pipe, lambda p: load_lora(p, 1), lambda p: p.unload_lora_weights())


@row("LoRA, swapped")
def swapped(pipe: Any) -> None:
    plain = copy.deepcopy(pipe)
    fast(pipe)
    for one in (pipe, plain):
        one.enable_lora_hotswap(target_rank=4)
        load_lora(one, 1)
    first = image(pipe)
    for one in (pipe, plain):
        load_lora(one, 2, hotswap=True)
    assert off(image(pipe), first) > 1e-3 and off(image(pipe), image(plain)) < 0.02


@row("LoRA, fused")
def fused(pipe: Any) -> None:
    load_lora(pipe, 1)
    with fast(pipe), pytest.raises(UnsupportedError, match="cannot take in an adapter: call rest"):
        pipe.fuse_lora()
    pipe.fuse_lora()
    with fast(pipe) as handle:
        assert "merged" in handle.report().layers[f"transformer.{LAYER}"]
        assert image(handle).isfinite().all()


# ---- offloading and types ------------------------------------------------------------------------


def offloaded(pipe: Any, add: Callable[[Any], Any], remove: Callable[[Any], Any]) -> None:
    model = pipe.transformer
    native = image(pipe)
    handle = fast(pipe)
    int8 = image(handle)
    add(model)
    assert torch.equal(image(handle), int8)
    with pytest.raises(RuntimeError, match="remove the offloading hooks first"):
        handle.restore()
    remove(model)
    handle.restore()
    assert torch.equal(image(pipe), native)
    add(model)
    with pytest.raises(ValueError, match="replace first, then offload"):
        fast(pipe)
    assert torch.equal(image(pipe), native)


@row("model offloading")
def model_offloading(pipe: Any) -> None:
    """Offload as `enable_model_cpu_offload` does, which requires a device."""
    hooks = []

    def add(pipe: Any) -> None:
        hooks.append(hf_accelerate.cpu_offload_with_hook(pipe.transformer, CPU)[1])

    comes_and_goes(pipe, add, lambda _: hooks.pop().remove())
    add(pipe)
    with fast(pipe) as handle, pytest.raises(ValueError, match="is moved to the device in each c"):
        handle.compare(prompt="")


@row("group offloading")
def group_offloading(pipe: Any) -> None:
    offloaded(
        pipe, lambda m: m.enable_group_offload(CPU, CPU, "block_level", 1),
        lambda m: HookRegistry.check_if_exists_or_initialize(m).remove_hook(
            "group_offloading", recurse=True),
    )  # fmt: skip


@row("sequential offloading")
def sequential_offloading(pipe: Any) -> None:
    """Offload as `enable_sequential_cpu_offload` does, which requires a device."""
    offloaded(
        pipe, lambda m: hf_accelerate.cpu_offload(m, CPU),
        lambda m: hf_accelerate.hooks.remove_hook_from_module(m, recurse=True),
    )  # fmt: skip


@row("layerwise casting")
def layerwise_casting(pipe: Any) -> None:
    other, options = copy.deepcopy(pipe), (torch.float8_e4m3fn, torch.float32)
    with fast(pipe) as handle:
        pipe.transformer.enable_layerwise_casting(*options)
        int8 = image(handle)
    other.transformer.enable_layerwise_casting(*options)
    assert off(int8, image(other)) < 0.2
    with pytest.raises(ValueError, match="rounded"):
        fast(other)


# ---- what diffusers changes ----------------------------------------------------------------------


@row("fused QKV")
def fused_projections(pipe: Any) -> None:
    comes_and_goes(
        pipe, lambda p: p.transformer.fuse_qkv_projections(),
        lambda p: p.transformer.unfuse_qkv_projections(),
    )  # fmt: skip


@row("VAE tiling")
def tiling(pipe: Any) -> None:
    torch.manual_seed(0)
    pipe.vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, sample_size=16,
    ).eval()  # fmt: skip
    pipe.vae.enable_tiling()
    x = torch.randn(1, 4, 24, 24)
    with torch.no_grad(), fast(pipe) as handle:
        inside = handle.vae.decode(x).sample
        assert not any(isinstance(m, Int8Linear) for m in pipe.vae.modules())
        handle.vae.disable_tiling()
        whole = handle.vae.decode(x).sample
        handle.vae.enable_tiling()
        assert torch.equal(pipe.vae.decode(x).sample, inside) and not torch.equal(inside, whole)


@row("first-block cache")
def first_block_cache(pipe: Any) -> None:
    config = diffusers.FirstBlockCacheConfig(threshold=10.0)
    comes_and_goes(
        pipe, lambda p: p.transformer.enable_cache(config), lambda p: p.transformer.disable_cache()
    )


@row("other step caches")
def other_caches(pipe: Any) -> None:
    from tests.interop.test_interop_step_caches import CACHES

    assert {"pyramid", "faster", "taylor", "magnitude"} == CACHES.keys() - {"first block"}
    make = CACHES["taylor"]  # the others are run there
    comes_and_goes(
        pipe, lambda p: p.transformer.enable_cache(make(p)), lambda p: p.transformer.disable_cache()
    )


# ---- compilers -----------------------------------------------------------------------------------


@row("the caller's `torch.compile`")
def own_compile(pipe: Any) -> None:
    with fast(pipe):
        expected = image(pipe)
    for mode in ("default", "reduce-overhead", "max-autotune"):
        pipe.transformer.compile(mode=mode, fullgraph=True)
        with fast(pipe, compile="blocks") as handle:
            assert "compiled by the caller" in handle.report().lines[0]
            with pytest.raises(ValueError, match="was compiled by the caller"):
                handle.compare()
            with torch.compiler.set_stance("force_eager"):
                assert torch.equal(image(handle), expected)
        assert pipe.transformer._compiled_call_impl is not None
        pipe.transformer._compiled_call_impl = None


@row("other resolutions")
def resolutions(pipe: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        graphs = in_fast_code(patch)
        handle = fast(pipe, compile="blocks")

    def prompt(batch: int, length: int) -> dict[str, Any]:
        return {"prompt_embeds": torch.randn(batch, length, 32),
                "pooled_prompt_embeds": torch.randn(batch, 32)}  # fmt: skip

    counts = []
    for other in (
        {}, {"height": 256}, {"height": 320, "width": 256}, {"width": 224}, prompt(1, 9),
        prompt(1, 12), prompt(2, 9), prompt(3, 9), {"height": 256, **prompt(2, 20)}, {},
    ):  # fmt: skip
        assert image(handle, **other).isfinite().all()
        counts.append(len(graphs))
    # A kind of block: at most one more graph for each of pixels, prompt and batch as symbols.
    assert counts == [2, 4, 4, 4, 6, 6, 8, 8, 8, 8]


@row("guidance in one batch")
def one_batch(_: Any) -> None:
    pipe = cases.make("sd3")
    with fast(pipe) as handle:
        assert cases.generate(handle, "sd3", 2).isfinite().all()
        assert handle.report().attention.modes == {"balanced": 2 * 2}


@row("guidance in two passes")
def two_passes(pipe: Any) -> None:
    with fast(pipe) as handle:
        assert cases.generate(handle, "flux", 2).isfinite().all()
        assert handle.report().attention.modes == {"balanced": 2 * 2 * 2}


@row("`torch.export`")
def export(_: Any) -> None:
    from tests.interop.test_accelerate import run, transformer

    model = transformer()
    given = {
        "hidden_states": cases.noise(1, 4, 12, 12), "encoder_hidden_states": cases.noise(1, 8, 32),
        "pooled_projections": cases.noise(1, 32), "timestep": torch.tensor([500.0]),
        "return_dict": False,
    }  # fmt: skip
    with fast(model), torch.no_grad():
        expected = run(model)
        program = torch.export.export(model, (), given)
        names = {str(node.target) for node in program.graph.nodes if "cupyattn" in str(node.target)}
        assert len(names) >= 2 and any("attention" in name for name in names)
        assert torch.equal(program.module()(**given)[0], expected)


@row("context parallelism")
def context_parallelism(pipe: Any) -> None:
    """Ranks are threads here, each with the whole sequence: keys that come twice change nothing."""
    native, pipes = image(pipe), [made(), made()]

    def on_rank(group: Any) -> Any:
        mesh = SimpleNamespace(get_group=lambda: group.process_group, device_type="cpu")
        config = SimpleNamespace(
            ring_degree=2, ulysses_degree=1, convert_to_fp32=True, _flattened_mesh=mesh
        )
        own = pipes[group.rank]
        for module in own.transformer.modules():
            if hasattr(module, "processor"):
                module.processor._parallel_config = SimpleNamespace(context_parallel_config=config)
        handle = fast(own, include=r"attn$")
        return image(handle), handle.report()

    found, errors = on_threads(on_rank, 2)
    assert errors == [None, None]
    for latents, report in found:
        assert 0 < (latents - native).norm() < 0.02 * native.norm()
        assert report.attention.on_ranks == {"2 ring, codes": 2}
        assert "on several ranks: 1 2 ring, codes" in str(report)


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_unless(lambda _, name: name != "other resolutions", ROWS))
def test_a_row_of_the_page_is_true(name: str) -> None:
    ROWS[name](made())


#: Rows whose calls are counted, that name a way, or have a stand-in that cannot be traced.
NOT_COMPILED = (
    "other resolutions", "guidance in one batch", "guidance in two passes", "context parallelism",
    "the caller's `torch.compile`", "VAE tiling",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if name not in NOT_COMPILED])
def test_a_row_is_true_of_compiled_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate` compiles them by default; other libraries hook blocks afterwards."""
    monkeypatch.setitem(HOW, "compile", "blocks")
    in_fast_code(monkeypatch)
    ROWS[name](made())


def test_the_block_of_the_page_runs() -> None:
    assert check_page(PAGE) == 1


def test_the_page_has_a_row_for_each_test() -> None:
    table = PAGE.read_text(encoding="utf-8").split("|---|---|---|\n")[1].split("\n\n")[0]
    assert re.findall(r"^\| (.*?) \|", table, re.M) == list(ROWS)
