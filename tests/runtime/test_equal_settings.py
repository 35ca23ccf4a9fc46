"""Settings that are equal in Python but of other types: earlier calls do not change the result."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cupyattn import act_quant, attention, attention_backward, quantize
from cupyattn.problem.settings import Settings, accept, interned
from cupyattn.quant import QuantConfig, weight_dequant, weight_quant
from cupyattn.runtime.recent import CALLS
from tests.runtime.test_host_calls import SHAPES, Driver, array, driver  # noqa: F401

cupy = pytest.importorskip("cupy")

#: For each setting a value, and an equal value that is refused.
REFUSED: dict[str, tuple[Any, Any]] = {
    "causal": (True, 1), "return_lse": (False, 0), "check_finite": (False, 0.0),
    "rope_interleaved": (False, 0), "window": ((3, 1), (3.0, 1.0)), "scale": (1.0, 1 + 0j),
    "softcap": (2.0, 2 + 0j), "rope_offset_q": (0, 0.0),
}  # fmt: skip
#: The same of values that are taken.
TAKEN: dict[str, tuple[Any, Any]] = {
    "causal": (True, np.True_), "window": ((3, 1), (np.int64(3), True)),
    "scale": (0.5, np.half(0.5)),
    "softcap": (1.0, True), "rope_offset_q": (0, np.int8(0)), "qk_norm_eps": (1.0, 1),
}  # fmt: skip
PAIRS = [*REFUSED.items(), *TAKEN.items()]


def inputs() -> list[Any]:
    return [array(shape) for shape in SHAPES]


def gradients(**options: Any) -> Any:
    q, k, v = inputs()
    options = {"arch": "sm_90", **options}
    return attention_backward(q, q, k, v, q, array(SHAPES[0][:3], "float32"), **options)


CALLS_BY_NAME: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, Any]]]] = {
    "attention": (lambda **o: attention(*inputs(), variant="fa", arch="sm_90", **o), REFUSED),
    "attention, taken": (lambda **o: attention(*inputs(), variant="fa", arch="sm_90", **o), TAKEN),
    "attention_backward": (
        gradients,
        {name: REFUSED[name] for name in ("causal", "window", "scale", "softcap")}
        | {"deterministic": (True, 1)},
    ),
    "quantize": (
        lambda **o: quantize(*inputs(), arch="sm_90", **o),
        {name: REFUSED[name] for name in ("rope_interleaved", "rope_offset_q")},
    ),
    "act_quant": (
        lambda **o: act_quant(array((3, 256)), **o), {"block_size": (128, 128.0)},
    ),
    "weight_quant": (
        lambda **o: weight_quant(array((128, 256)), **o), {"block_size": (128, 128.0)},
    ),
    "weight_dequant": (
        lambda **o: weight_dequant(array((128, 256), "int8"), array((1, 2), "float32"), **o),
        {"block_size": (128, 128.0)},
    ),
}  # fmt: skip


def outcome(call: Callable[..., Any], **options: Any) -> str:
    """Return the exception of a call, or the number of its results."""
    try:
        found = call(**options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{len(found)} arrays" if isinstance(found, tuple) else "one array"


@pytest.fixture
def device(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The stand-in for a driver, which reads no parameters."""
    driver.sizes = defaultdict(list)
    for module in ("quantize",):
        found = importlib.import_module(f"cupyattn.ops.{module}")
        monkeypatch.setattr(found, "on_device_of", lambda _: contextlib.nullcontext())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", CALLS_BY_NAME)
def test_an_outcome_does_not_depend_on_the_call_before(name: str) -> None:
    call, pairs = CALLS_BY_NAME[name]
    for setting, values in pairs.items():
        alone = []
        for value in values:
            CALLS.clear()
            alone.append(outcome(call, **{setting: value}))
        assert "Error" not in alone[0], setting
        assert ("Error" in alone[1]) == (pairs is not TAKEN), (setting, alone[1])
        for order in ((0, 1), (1, 0)):
            CALLS.clear()
            for turn in (*order, *order):
                again = outcome(call, **{setting: values[turn]})
                assert again == alone[turn], (setting, values[turn])


@pytest.mark.parametrize(("name", "values"), PAIRS, ids=[name for name, _ in PAIRS])
def test_equal_settings_of_other_types_are_told_apart(name: str, values: tuple[Any, Any]) -> None:
    usual, other = (Settings(**{name: value}) for value in values)
    assert usual == other and usual.types != other.types
    one, odd = accepted(*usual), accepted(*other)
    assert one is interned(*usual) and (hash(one), one.types) != (hash(odd), odd.types)


def accepted(*values: Any) -> Settings:
    """Settings of a call that has passed."""
    accept(interned(*values))
    return interned(*values)


def test_interned_settings_are_settings() -> None:
    one = accepted(*Settings(causal=True, window=(3, 1)))
    assert pickle.loads(pickle.dumps(one)) is copy.deepcopy(one) is one
    assert one.types == () and tuple(one) == tuple(Settings(causal=True, window=(3, 1)))
    assert one.places == {"causal": True, "causal_align": "bottom-right", "window": (3, 1)}
    plain = one._replace(causal=False)
    assert type(plain) is Settings and plain == Settings(window=(3, 1))
    assert type(one.without_rung) is Settings
    for window in ([3, 1], np.array([3, 1]), {3: 1}):
        assert type(interned(*Settings(window=window))) is Settings  # type: ignore[arg-type]
    for odd in (None, (1,), 3, iter((3, 1))):
        assert interned(*Settings(window=odd)).window is odd  # type: ignore[arg-type]
    assert list(odd) == [3, 1]  # type: ignore[arg-type]


def test_threads_get_the_same_settings() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: accepted(*Settings(max_len_q=n % 7)), range(700)))
    assert {id(interned(*one)) for one in found} == {id(one) for one in found}
    assert len({id(one) for one in found}) == 7


class Odd:
    """An object that is no number, whose deletion can be observed."""


def is_dropped(make: Callable[[], Any], call: Callable[[Any], Any]) -> bool:
    """Whether nothing keeps what a call was given, once it was refused."""
    gc.disable()  # what the call makes stays young
    try:
        thing = make()
        seen = weakref.ref(thing)
        with pytest.raises((TypeError, ValueError)) as found:
            call(thing)
        del thing, found
        # NOTE: visiting all objects of a long test run takes seconds: only where something is left.
        for generation in (0, 2):
            gc.collect(generation)
            if seen() is None:
                return True
        return False
    finally:
        gc.enable()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["scale", "softcap", "causal", "rope_offset_q", "tiles"])
def test_a_refused_call_keeps_nothing(name: str) -> None:
    x = np.ones((1, 2, 8, 16), np.float16)
    assert is_dropped(Odd, lambda odd: attention(x, x, x, **{name: odd}))
    assert is_dropped(Odd, lambda odd: attention(*inputs(), arch="sm_90", **{name: odd}))
    if name != "tiles":
        assert is_dropped(QuantConfig, lambda quant: gradients(scale=quant))


def refused_for_its_layout(quant: QuantConfig) -> Any:
    return attention(*inputs(), variant="fa_int8", arch="sm_90", quant=quant, layout="none")


@pytest.mark.usefixtures("device")
def test_scales_of_a_refused_call_are_not_kept() -> None:
    scales = np.ones((1, 1, 1), np.float32)
    quant = functools.partial(QuantConfig, "tensor", "tensor", scales=(scales, scales))
    assert is_dropped(quant, refused_for_its_layout)


@pytest.mark.usefixtures("device")
def test_other_scales_of_the_same_forms_are_no_other_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers and arrays, of attention and of quantising; results keep the caller's scales."""
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", lambda *_: None)
    monkeypatch.setattr(cupy.ndarray, "__setitem__", lambda *_: None)
    CALLS.clear()
    for scale in (0.1, np.full((1, 1, 1), 0.2, np.float32), 0.3):
        quant = QuantConfig("tensor", "tensor", scales=(scale, 0.1))
        attention(*inputs(), variant="fa_int8", arch="sm_90", quant=quant)
        made = quantize(*inputs(), arch="sm_90", quant=quant)
        assert made.config is quant
    assert len(CALLS) == 2


@pytest.mark.usefixtures("device")
def test_as_many_settings_as_calls_are_known_again() -> None:
    CALLS.clear()
    for _ in range(2):
        for number in range(300):
            attention(*inputs(), variant="fa", arch="sm_90", softcap=float(number + 1))
        assert len(CALLS) == 300
    found = [accepted(*Settings(rope_offset_q=number)) for number in range(CALLS.most)]
    assert all(interned(*one) is one for one in found)


@pytest.mark.usefixtures("device")
def test_a_call_of_odd_types_is_remembered_too() -> None:
    CALLS.clear()
    for _ in range(3):
        attention(*inputs(), variant="fa", arch="sm_90", scale=np.half(0.5), causal=np.True_)
    assert len(CALLS) == 1
