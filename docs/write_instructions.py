"""Write docs/INSTRUCTIONS.md: which forms of which PTX instructions the interpreter models.

    python -m docs.write_instructions

The forms stand in docs/instructions.txt; whether each is modelled is asked of the interpreter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cupyattn.errors import UnsupportedError
from cupyattn.files import replacing
from cupyattn.interpret import alu, semantics
from cupyattn.interpret.operation import DTYPES
from cupyattn.interpret.program import is_modelled
from cupyattn.interpret.ptx import Instruction, parse
from cupyattn.interpret.special import SPECIAL_REGISTERS

FORMS = Path(__file__).with_name("instructions.txt")
PAGE = Path(__file__).with_name("INSTRUCTIONS.md")
HEAD = """<!-- Written by python -m docs.write_instructions: change instructions.txt, run it. -->
# Instructions that are modelled

The [interpreter](INTERPRETER.md) knows these forms of PTX instructions. It also knows variants with
other types, roundings and cache hints if the same function covers them. If a kernel reaches an
instruction that is not modelled, `UnsupportedError` names it with its line. A kernel that only
contains one, and does not reach it, runs.
"""
#: Modifiers in front of the type of an arithmetic instruction that are tried one after the other.
PREFIXES = ("", "rn", "rn.ftz", "ftz", "sat", "approx", "approx.ftz", "full", "lo", "hi", "wide")
#: PTX around every instruction form, so that it can be parsed.
KERNEL = """.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry k() {{
  .reg .pred %p<9>; .reg .b8 %b<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
  .reg .f32 %f<9>; .reg .f64 %fd<9>;
  {form}
done:
}}
"""


def forms() -> Iterator[tuple[str, str]]:
    """Yield section and text of each form."""
    section = ""
    for line in FORMS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            yield section, line


def instruction(form: str) -> Instruction | None:
    """Return a form as an instruction, None where the parser already refuses it."""
    try:
        (found,) = parse(KERNEL.format(form=form)).kernels["k"].instructions
    except UnsupportedError:
        return None
    return found


def modelled(form: str) -> bool:
    """Return whether the interpreter knows a form."""
    found = instruction(form)
    if found is None or not is_modelled(found):
        return False
    return not any(
        isinstance(x, semantics.Special) and x.name not in SPECIAL_REGISTERS
        for x in found.operands
    )


def arithmetic(name: str) -> Iterator[str]:
    """Yield the plain forms of an arithmetic instruction that the interpreter knows."""
    for prefix in PREFIXES:
        for kind in DTYPES:
            modifiers = (*filter(None, prefix.split(".")), kind)
            if alu.lookup(name, modifiers) is not None:
                yield ".".join((name, *modifiers))


def opcode(form: str) -> str:
    """Return the first word of a form."""
    return form.partition(" ")[0].partition(".")[0].rstrip(";")


def unlisted() -> set[str]:
    """Return opcodes that the interpreter knows and the list has no form of."""
    return {*semantics.BUILDERS, *alu.OPCODES} - {opcode(form) for _, form in forms()}


def page() -> str:
    """Return the text of the page."""
    sections: dict[str, dict[str, tuple[list[str], list[str]]]] = defaultdict(dict)
    for section, form in forms():
        first = opcode(form)
        if first not in sections[section]:
            plain = [] if first == "mov" else [f"`{name}`" for name in arithmetic(first)]
            sections[section][first] = (plain, [])
        known, unknown = sections[section][first]
        name = f"`{form.partition(' ')[0].rstrip(';')}`"
        whole = first == "mov" or (name in known and not modelled(form))  # operands differ
        (known if modelled(form) else unknown).append(f"`{form.rstrip(';')}`" if whole else name)
    parts = [HEAD]
    for section, opcodes in sections.items():
        parts.append(f"\n## {section}\n\n| | modelled | not modelled |\n|---|---|---|\n")
        for name, found in sorted(opcodes.items()):
            known, unknown = (", ".join(dict.fromkeys(each)) for each in found)
            parts.append(f"| `{name}` | {known} | {unknown} |\n")
    names = ", ".join(f"`{name}`" for name in sorted(SPECIAL_REGISTERS))
    parts.append(f"\n## Special registers\n\n| modelled |\n|---|\n| {names} |\n")
    return "".join(parts)


if __name__ == "__main__":
    with replacing(PAGE) as file:
        file.write(page().encode("utf-8"))
