"""Modules that are compiled while Inductor compiles are the modules of the call."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from cupyattn.arrays.kinds import STORAGE
from cupyattn.compiler import ahead
from cupyattn.ops.layers import LAYERS, LayersSettings
from cupyattn.ops.norm_quant import NormQuantSettings
from cupyattn.ops.operation import problem_of

torch = pytest.importorskip("torch")
precompile = importlib.import_module("cupyattn.interop.torch.precompile")
epilogues = importlib.import_module("cupyattn.interop.torch.epilogues")
interop = importlib.import_module("cupyattn.interop.torch")

ROWS, WIDTH, OUT = (2, 40), 256, 384
FORMS = {
    "b": ((OUT, WIDTH), "int8"), "b_scales": ((3, 2), "float32"), "bias": ((OUT,), "bfloat16"),
    "residual": ((*ROWS, OUT), "bfloat16"), "gate": ((2, 1, OUT), "float32"),
}  # fmt: skip


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the begun modules on a device of compute capability 9.0; nothing is compiled."""
    found: list[Any] = []
    monkeypatch.setattr(ahead, "begin", found.extend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    precompile._begin.cache_clear()
    return found


def launched(arch: str) -> set[str]:
    """The modules of a call of such a layer on arrays."""
    arrays = {f"{n}0": np.zeros(s, STORAGE.get(t, t)) for n, (s, t) in FORMS.items()}
    arrays["gate0"] = arrays["gate0"].reshape(2, OUT)
    x, c = (np.zeros((*ROWS, n), STORAGE["bfloat16"]) for n in (WIDTH, OUT))
    settings = LayersSettings("bfloat16", ("silu",), arch, "interpret")
    work = LAYERS.plan(problem_of(LAYERS, settings, {"x": x, "c0": c, **arrays}))
    return {str(one.module) for plan in work.plans for one in plan.launches}


def fake(shape: tuple[int, ...], dtype: str, device: str = "cuda") -> Any:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


@pytest.mark.parametrize("arch", [None, "sm_80", "sm_90a"])
def test_the_modules_of_the_call_are_begun_once(begun: list[Any], arch: str | None) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x, layer = fake((*ROWS, WIDTH), "bfloat16"), [fake(*form) for form in FORMS.values()]
        for _ in range(2):
            precompile.begin(x, [layer], ["silu"], arch, None)
    assert {one for _, one in begun} == {arch or "sm_90a"} and len(begun) == 2
    assert {str(spec) for spec, _ in begun} == launched(arch or "sm_90a")


def test_the_module_that_reads_two_tensors_is_begun(begun: list[Any]) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x, right = (fake((*ROWS, WIDTH // 2), "bfloat16") for _ in range(2))
        layer = [fake((OUT, WIDTH), "int8"), fake((OUT, 1), "float32")]
        precompile.begin(x, [layer], [""], None, None, None, None, right)
    assert ("CFG_PAIRED", 1) in begun[0][0].defines and len(begun) == 2


def test_the_modules_that_read_rows_of_two_tensors_are_begun(begun: list[Any]) -> None:
    before = NormQuantSettings("layer", None, None, 1e-6, "channel", None)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x, below = (fake((2, n, WIDTH), "bfloat16") for n in (16, 48))
        layer = [fake((WIDTH, WIDTH), "int8"), fake((WIDTH, 1), "float32"), None, x, None, below]
        precompile.begin(x, [layer], [""], None, None, below=below, before=before)
    assert [("CFG_JOINT_ROWS", 1) in one.defines for one, _ in begun] == [True, True]


def test_one_module_of_several_layers_is_begun(begun: list[Any]) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x, layer = fake((*ROWS, WIDTH), "bfloat16"), [fake((OUT, WIDTH), "int8")]
        layer.append(fake((OUT, 1), "float32"))
        precompile.begin(x, [layer] * 3, [""] * 3, None, None)
    assert ("CFG_LAYERS", 1) in begun[1][0].defines and len(begun) == 2


def test_nothing_is_begun_that_is_not_known_or_not_needed(begun: list[Any]) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        layer = [fake(form, dtype) for form, dtype in FORMS.values()][:3]
        few, many = (fake((n, WIDTH), "bfloat16") for n in (32, 33))
        precompile.begin(few, [layer], [""], None, None)
        precompile.begin(many, [layer], [""], None, "mirror")
        precompile.begin(fake((64, WIDTH), "bfloat16", "cpu"), [layer], [""], None, None)
        precompile.begin(fake((64, WIDTH), "float64"), [layer], [""], None, None)  # refused
        assert not begun
        precompile.begin(many, [layer], [""], None, None)
    assert begun


def test_the_pass_tells_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(precompile, "begin", lambda *call: told.append(call))
    own = torch.nn.Linear(WIDTH, OUT, dtype=torch.float16).requires_grad_(False)
    one, two, last = (interop.Int8Linear.from_linear(own, backend="mirror") for _ in range(3))
    x, r = (torch.randn(*ROWS, n).half() for n in (WIDTH, OUT))
    torch._dynamo.reset()
    with torch.no_grad():
        def function(x: Any, r: Any) -> Any:
            return one(x), torch.nn.functional.silu(two(x)), r + last(x)

        torch.compile(function, backend=graph_of, fullgraph=True)(x, r)
    forms = [
        (tuple(x.shape), [[None if t is None else tuple(t.shape) for t in one] for one in layers],
         list(activations), where)
        for x, layers, activations, *where in told
    ]  # fmt: skip
    weight = [(OUT, WIDTH), (3, 2), (OUT,)]
    assert forms == [
        ((*ROWS, WIDTH), [weight, weight], ["", "silu"], [None, "mirror", None, None, None]),
        (
            (*ROWS, WIDTH), [[*weight, (*ROWS, OUT), None, None]], [""],
            [None, "mirror", None, None, None],
        ),
    ]


def graph_of(graph: Any, inputs: Any) -> Any:
    """A backend that runs the pass alone."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def fused(made: Any, _: Any) -> Any:
        epilogues.fuse(made.graph)
        made.recompile()
        return made.forward

    compile_with = aot_autograd(
        fw_compiler=fused, inference_compiler=fused, decompositions=select_decomp_table
    )
    return compile_with(graph, inputs)
