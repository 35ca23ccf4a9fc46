"""docs/INSTRUCTIONS.md describes the interpreter's treatment of each form."""

from __future__ import annotations

import pytest

from cupyattn import interpret
from cupyattn.errors import UnsupportedError
from cupyattn.interpret import special
from docs import write_instructions


def test_the_page_is_current() -> None:
    assert write_instructions.PAGE.read_text(encoding="utf-8") == write_instructions.page()


def test_every_opcode_has_a_form_that_is_modelled() -> None:
    assert write_instructions.unlisted() == set()


def kernel(form: str) -> str:
    return write_instructions.KERNEL.format(form=form)


@pytest.mark.parametrize("form", ["brkpt;", "ldu.global.f32 %f1, [%rd1];", "mov.u32 %r1, %smid;"])
def test_what_the_page_calls_not_modelled_stops_a_kernel(form: str) -> None:
    assert not write_instructions.modelled(form)
    with pytest.raises(UnsupportedError, match="does not know"):
        interpret.launch(kernel(form), "k", 1, 32, [])


def test_the_special_registers_are_those_of_the_machine() -> None:
    class Seen(interpret.Observer):
        names: set[str] = set()

        def after(self, machine, lanes) -> None:  # type: ignore[no-untyped-def]
            self.names |= set(special.special_registers(machine))

    seen = Seen()
    with interpret.observe(seen):
        interpret.launch(kernel("mov.u32 %r1, %tid.x;"), "k", (2, 3), (8, 2, 2), [])
    assert seen.names == special.SPECIAL_REGISTERS
