"""Inductor's code for our operators, on a CPU: its text, the bits of results, observed operators,
and the contents of caches.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytree = importlib.import_module("torch.utils._pytree")
interop = importlib.import_module("cupyattn.interop.torch")
epilogues = importlib.import_module("cupyattn.interop.torch.epilogues")
inductor_calls = importlib.import_module("cupyattn.interop.torch.inductor_calls")
places = importlib.import_module("cupyattn.interop.torch.places")

WIDTH = 128
PLACE = "cupyattn_place("


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, no code that another test compiled or kept, and an empty table."""
    from torch._inductor import config
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN

    for name in [name for name in CUSTOM_EXTERN_KERNEL_CODEGEN if "cupyattn" in name]:
        monkeypatch.delitem(CUSTOM_EXTERN_KERNEL_CODEGEN, name)
    monkeypatch.setattr(epilogues, "_registered", False)
    monkeypatch.setattr(inductor_calls, "obstacle", "")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True, post_grad_custom_post_pass=None):
        yield
    torch._dynamo.reset()
    for name in [name for name in CUSTOM_EXTERN_KERNEL_CODEGEN if "cupyattn" in name]:
        del CUSTOM_EXTERN_KERNEL_CODEGEN[name]
    torch.set_num_threads(threads)


class Block(torch.nn.Module):  # type: ignore[misc]
    """Layers of one input, and one that adds: no code but calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.q(x), self.k(x), self.o(x)


def block() -> Any:
    torch.manual_seed(0)
    model = Block().half().eval().requires_grad_(False)
    interop.replace_linear_with_int8(model, backend="mirror")
    return model


def rows(*shape: int) -> Any:
    return torch.randn(*(shape or (2, 5)), WIDTH, generator=torch.manual_seed(1)).half()


def code_of(function: Any, *given: Any) -> tuple[Any, str]:
    """The results of a compiled function's first call, and Inductor's code."""
    from torch._inductor.utils import run_and_get_code

    with torch.no_grad():
        found, code = run_and_get_code(function, *given)
    return found, "\n".join(code)


def same(found: Any, expected: Any) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_layers_are_called_at_their_place() -> None:
    model, x = block(), rows()
    found, code = code_of(torch.compile(model, fullgraph=True), x)
    assert code.count("cupyattn_buf0 = cupyattn_place('int8_layers', ('cpu', 0), 10, []") == 1
    assert code.count("buf0 = cupyattn_buf0(arg") == 1
    assert "torch.ops.cupyattn.int8_layers.default(" not in code
    assert same(found, model(x))


def test_lengths_that_are_symbols_are_passed() -> None:
    model = block()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    found, code = code_of(compiled, rows(2, 5))
    assert PLACE in code and "[y0, y1, y2]" in code
    assert same(found, model(rows(2, 5)))
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((3, 4), (2, 7)):
            assert same(compiled(rows(*shape)), model(rows(*shape)))


def test_two_tensors_side_by_side_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    own = torch.nn.Linear(2 * WIDTH, WIDTH).half().requires_grad_(False)
    layer = interop.Int8Linear.from_linear(own, strategy="channel", backend="mirror")

    def function(x: Any, wide: Any) -> Any:
        return layer(torch.cat([x, wide.unflatten(-1, (2, WIDTH))[..., 1, :]], -1))

    given = rows(), torch.cat([rows(), rows()], -1)
    found, code = code_of(torch.compile(function, fullgraph=True), *given)
    assert code.count("cupyattn_place('int8_layer', ('cpu', 0), 5, []") == 1
    assert "cpp_fused" not in code
    assert torch.equal(found, function(*given))


def attend(q: Any, k: Any, v: Any) -> Any:
    return interop.attention(q, k, v, causal=True, backend="mirror"), q.shape[2]


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_is_called_at_its_place(dynamic: bool) -> None:
    q, k, v = (rows(2, 2, n) for n in (5, 7, 7))
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    (found, _), code = code_of(compiled, q, k, v)
    assert code.count("cupyattn_place('attention_qkv', ('cpu', 0), 3, ") == 1
    assert torch.equal(found, attend(q, k, v)[0])
    longer = [rows(2, 2, n) for n in (6, 8, 8)]
    with torch.no_grad():
        assert torch.equal(compiled(*longer)[0], attend(*longer)[0])


def test_attention_of_models_is_called_at_its_place() -> None:
    """The result lies as the queries do; a mask is an operand, a bias that is missing none."""
    operator = importlib.import_module("cupyattn.interop.diffusers.operator")
    given = {name: rows(2, n, 2).transpose(1, 2) for name, n in (("q", 5), ("k", 7), ("v", 7))}
    mask = torch.ones(5, 7, dtype=torch.bool).tril()

    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        tensors = {"q": q, "k": k, "v": v, "mask": mask}
        return operator.attend(tensors, None, "backend='mirror'"), q.shape[1]

    operands = *given.values(), mask
    (found, _), code = code_of(torch.compile(function, fullgraph=True), *operands)
    assert "cupyattn_place('diffusers_attention', ('cpu', 0), 4, [], " in code
    assert f"(t0, t1, t2, t3, {'None, ' * 6}0, False, " in code
    assert torch.equal(found, function(*operands)[0])
    assert found.stride() == given["q"].stride()


def test_one_tensor_that_comes_twice_is_one_parameter() -> None:
    model = block()

    def function(x: Any) -> Any:
        return model.q(x, residual=x)

    found, code = code_of(torch.compile(function, fullgraph=True), rows())
    assert "cupyattn_place('int8_layer', ('cpu', 0), 4, [], " in code
    assert '"(t0, t1, t2, t3, t0, None, ' in code
    assert torch.equal(found, function(rows()))


class Mirror:
    """Stands in for a ready call: it launches the operator's mirror on given addresses."""

    receiver, results, scratch_bytes, is_launched_alone = None, (), 64, True

    def __init__(self, kernel: Any, tensors: Any, made: Any, arguments: Any) -> None:
        self.kernel, self.arguments = kernel, arguments
        self.tensors, self.made = tensors, made

    def launch(self, addresses: dict[str, int], scratch: int, stream: int) -> Any:
        def at(name: str, like: Any) -> Any:
            nbytes = like.untyped_storage().nbytes() - like.storage_offset() * like.itemsize
            lies = (ctypes.c_char * nbytes).from_address(addresses[name])
            own = torch.frombuffer(lies, dtype=like.dtype)
            return own.as_strided(like.shape, like.stride())

        def replay() -> None:
            given = {id(x): at(f"t{n}", x) for n, x in enumerate(self.tensors)}
            operands = pytree.tree_map(lambda x: given.get(id(x), x), tuple(self.arguments))
            made = self.kernel(*operands)
            for n, y in enumerate(pytree.tree_leaves(made)):
                if y.numel():
                    at(f"y{n}", y).copy_(y)

        replay()
        return SimpleNamespace(handle=replay, last_call=0)


class Pool(dict[Any, list[Any]]):
    """Stands in for a device's allocator: memory that nothing has any more is taken again."""

    def __call__(self, *form: Any) -> Any:
        shape, strides, _ = form
        kept = self.setdefault(form, [])
        for base, alone in kept:
            if self.users(base) == alone:
                return base.as_strided(shape, strides)
        base = torch._C._dynamo.guards._empty_strided_cpu(*form)
        kept.append((base, self.users(base)))
        return base.as_strided(shape, strides)

    def users(self, base: Any) -> int:
        return int(torch._C._storage_Use_Count(base.untyped_storage()._cdata))


@pytest.mark.parametrize("dynamic", [False, True])
def test_calls_from_their_place_have_the_bits_of_the_operators(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for a device, launches get only addresses."""
    pytest.importorskip("cupy")
    guards = torch._C._dynamo.guards
    ready: dict[Any, Mirror] = {}
    run, kinds, found = places.Place.run, places.place, []

    def noted(self: Any, tensors: Any, arguments: Any) -> Any:
        made = run(self, tensors, arguments)
        form = id(self), *(tuple(x.shape) for x in tensors)
        own = ready.setdefault(form, Mirror(self._kernel, tensors, made, arguments))
        by_name = {f"t{n}": x for n, x in enumerate(tensors)}
        by_name |= {f"y{n}": y for n, y in enumerate(pytree.tree_leaves(made))}
        places.bridge._per_thread.launched.append(places.bridge.Launched(own, by_name))
        return made

    def on_device(operator: str, device: Any, *given: Any) -> Any:
        call = kinds(operator, ("cuda", 0), *given)
        own = call.__globals__["found"]
        call.__globals__.update(
            capturing=lambda _: False, launch=lambda replay, _: (direct.append(1), replay()),
            found=lambda *all_of: (found.append(1), own(*all_of))[1],
        )  # fmt: skip
        return call

    direct: list[int] = []
    monkeypatch.setattr(places.Place, "run", noted)
    monkeypatch.setattr(places, "place", on_device)
    monkeypatch.setattr(guards, "_empty_strided_cuda", Pool())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    model = block()

    def function(x: Any) -> Any:
        heads = [one(x).unflatten(-1, (2, -1)).transpose(1, 2) for one in (model.q, model.k)]
        y = interop.attention(heads[0], heads[1], heads[1], backend="mirror").transpose(1, 2)
        return model.o(y.flatten(2), residual=x)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    inputs = [rows(2, n) for n in ((5, 9) if dynamic else (5,))]
    expected = [function(x) for x in inputs]
    with torch.no_grad():
        for _ in range(6):
            assert all(torch.equal(compiled(x), y) for x, y in zip(inputs, expected, strict=True))
        direct.clear()
        found.clear()
        for x in inputs:
            x.copy_(torch.randn_like(x))
            assert torch.equal(compiled(x), function(x))
    assert not found and len(direct) == 3 * len(inputs)


def test_modes_and_profilers_see_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(f"{function}")
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    model, x = block(), rows()
    compiled = torch.compile(model, fullgraph=True)
    _, code = code_of(compiled, x)
    assert PLACE in code
    run = places.place(
        "int8_layer", ("cpu", -1), 3, (), (), "(t0, t1, t2, None, None, None, '', None, 'mirror')",
        "y0",
    )  # fmt: skip
    given = x, model.q.weight_codes, model.q.weight_scale
    expected = run(*given)
    assert not names
    with Seen():
        found = run(*given)
    assert torch.equal(found, expected) and names == ["cupyattn.int8_layer.default"]
    with torch.no_grad(), torch.profiler.profile() as profile:
        compiled(x)
    seen = [event.name for event in profile.events()]
    assert seen.count("cupyattn::int8_layers") == 1


def test_views_that_negate_are_resolved() -> None:
    model = block()
    run = places.place(
        "int8_layer", ("cpu", -1), 3, (), (), "(t0, t1, t2, None, None, None, '', None, 'mirror')",
        "y0",
    )  # fmt: skip
    x = torch._neg_view(rows())
    given = model.q.weight_codes, model.q.weight_scale
    assert torch.equal(run(x, *given), run(x.resolve_neg(), *given))


def missing(_: Any) -> Any:
    raise AttributeError("no such method")


@pytest.mark.parametrize("lacks", ["the table", "its signature", "what a node says"])
def test_another_torch_calls_operators_by_the_dispatcher_and_says_so(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.codegen import custom_extern_kernel_codegen as generators

    if lacks == "the table":
        monkeypatch.delattr(generators, "CUSTOM_EXTERN_KERNEL_CODEGEN")
    elif lacks == "its signature":
        monkeypatch.setattr(generators, "CustomCodegen", lambda: None)
    else:
        monkeypatch.setattr(inductor_calls, "_symbols", missing)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)).half().requires_grad_(False)
    with interop.replace_linear_with_int8(model, backend="mirror") as handle:
        assert "dispatcher" not in handle.report()
        found, code = code_of(torch.compile(handle.target, fullgraph=True), rows())
        assert PLACE not in code and "torch.ops.cupyattn.int8_layer.default(" in code
        said = handle.report().splitlines()[-1]
        start = f"compiled: layers are called by torch's dispatcher, torch {torch.__version__} has"
        assert said.startswith(f"{start} another table of generators (")
        assert torch.equal(found, handle.target(rows()))


def test_what_is_written_is_part_of_the_key_of_inductors_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that another version of these modules wrote is not read."""
    before, own = epilogues._uuid.__wrapped__(), Path.read_bytes
    for name in ("places.py", "inductor_calls.py"):
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, name=name: own(path) + b" " * (path.name == name)
        )
        assert epilogues._uuid.__wrapped__() != before


@pytest.mark.slow
def test_another_process_loads_the_code_from_the_cache(tmp_path: Path) -> None:
    program = (
        "import importlib, torch\n"
        "t = importlib.import_module('tests.interop.test_interop_torch_inductor_calls')\n"
        "model, x = t.block(), t.rows()\n"
        "with torch.no_grad():\n"
        "    found = torch.compile(model, fullgraph=True)(x)\n"
        "assert t.same(found, model(x))\n"
        "made = torch._dynamo.utils.counters['inductor']\n"
        "print(made['fxgraph_cache_hit'], made['fxgraph_cache_miss'])\n"
    )
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True,
            check=True, timeout=300,
        ).stdout.strip()
        for _ in range(2)
    ]  # fmt: skip
    assert found == ["0 1", "1 0"]
    assert any(PLACE in path.read_text() for path in tmp_path.rglob("*.py"))
