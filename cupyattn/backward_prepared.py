"""A call of `attention_backward` on a device: planned, compiled and loaded once, then run again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn import backends
from cupyattn.executor import ReadyCall
from cupyattn.gradients import Gradients
from cupyattn.plans import Plan
from cupyattn.rounding import array_namespace
from cupyattn.scratch import saying_what_is_needed


class PreparedBackward:
    """The kernels of one call, ready to run on arrays of the same form.

    It keeps no array alive; every run takes its scratch memory from CuPy's pool.

    Parameters
    ----------
    plan : Plan
        Of `cupyattn.backward_plan.plan_backward`.
    operands : mapping of str to cupy.ndarray
        q, k and v, layout BHSD, on the current device.
    arch : str or None
        Architecture to compile for; the device's own when None.
    """

    def __init__(self, plan: Plan, operands: Mapping[str, Any], arch: str | None) -> None:
        self._ready = ReadyCall.of(plan, arch)
        of = {name: operands[name[1:]] for name in Gradients._fields}
        self._forms = {name: (x.shape, x.dtype) for name, x in of.items()}
        self._needed = needed_bytes(operands, plan)

    def __call__(self, operands: Mapping[str, Any]) -> Gradients:
        """Return the gradients, contiguous, of operands by the names that the plan has for them."""
        xp = array_namespace(operands["q"])
        told = saying_what_is_needed("attention_backward", self._needed, on_device=True)
        with backends.on_device_of(operands["q"]), told:
            found = {name: xp.empty(*form) for name, form in self._forms.items()}
            self.launch({**operands, **found})
        return Gradients(**found)

    def launch(self, buffers: Mapping[str, Any]) -> None:
        """Run on operands and results on the current device and stream."""
        cupy = array_namespace(buffers["q"])
        scratch = cupy.empty(self._ready.scratch_bytes, "uint8")
        addresses = {name: array.data.ptr for name, array in buffers.items()}
        stream = cupy.cuda.get_current_stream().ptr
        self._ready.launch(addresses, scratch.data.ptr, stream)


def needed_bytes(operands: Mapping[str, Any], plan: Plan | None = None) -> dict[str, int]:
    """Return what gradients of q, k and v take, and what a plan of them takes, by name."""
    results = {name: int(operands[name[1:]].nbytes) for name in Gradients._fields}
    return results | {work.name: work.nbytes for work in (plan.workspace if plan else ())}
