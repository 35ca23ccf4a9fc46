"""Small faults in CUDA source or PTX: barriers removed, operands swapped, edges and scales wrong.

>>> source = "for (int i = 0; i < n; ++i) sum += x[i];"
>>> [one.after.strip() for one in mutants(source) if one.kind == "edge"][0]
'for (int i = 0; i <= n; ++i) sum += x[i];'
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: Kinds of faults, and the change that each makes.
KINDS = {
    "barrier": "a barrier, fence or wait is removed",
    "operand": "two operands or arguments are swapped, or a sign is",
    "edge": "a comparison, a bound or an end of a range is off by one or the wrong way round",
    "scale": "a factor, a sum, a constant or an exponential is wrong",
}
#: A name, a member, an element or a call: operands that can be swapped without brackets.
_OPERAND = (
    r"(?:[A-Za-z_]\w*(?:(?:\.|->|::)\w+|\[[^\[\]]*\]|\([^()]*\))*|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?f?)"
)
_SYNCHRONISES = r"\w*(?:sync|barrier|fence|wait|commit|arrive)\w*"
#: PTX instructions in a string that order memory accesses or threads.
_ORDERS = (
    r"(?:bar\.|barrier|fence|membar|mbarrier|cp\.async\.(?:wait|commit|bulk\.(?:wait|commit))|"
    r"wgmma\.(?:fence|wait|commit))"
)
_OTHER = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "&&": "||", "||": "&&", "min": "max", "max": "min",
    "fminf": "fmaxf", "fmaxf": "fminf", "exp2f": "expf", "expf": "exp2f", "__expf": "exp2f",
    "==": "!=", "!=": "==", "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A source with one fault.

    Parameters
    ----------
    name : str
        Kind, line and column: unique in its source.
    kind : str
        One of `KINDS`.
    line : int
        Line of the fault.
    before, after : str
        Its lines in the source, and in the mutant.
    text : str
        The whole mutant.
    """

    name: str
    kind: str
    line: int
    before: str
    after: str
    text: str


@dataclass(frozen=True)
class _Operator:
    """A kind of fault: the pattern that it replaces, and the replacement."""

    kind: str
    pattern: re.Pattern[str]
    replace: Callable[[re.Match[str]], str]
    of_strings: bool = False


def _swapped(match: re.Match[str]) -> str:
    return f"{match['b']}{match['between']}{match['a']}"


def _doubled(match: re.Match[str]) -> str:
    value = float(match["number"])
    return f"{2.0 * value if value else 1.0!r}f"


def _operator(
    kind: str, pattern: str, replace: str | Callable[[re.Match[str]], str], **more: bool
) -> _Operator:
    by = replace if callable(replace) else (lambda match: match.expand(replace))
    return _Operator(kind, re.compile(pattern), by, **more)


_STATEMENT = r"(?:(?<=[;{})])|(?<=[;{})]\s)|(?<=\n))(?P<indent>\s*)"
_OPERATORS = (
    _operator("barrier", rf"{_STATEMENT}(?:[\w:]+(?:\.|->|::))*{_SYNCHRONISES}"
              r"(?:<[^;<>]*>)?\([^;{}]*\);", r"\g<indent>;"),
    _operator("barrier", rf"{_STATEMENT}asm(?:\s+volatile)?\s*\([^;]*?\"[^;]*?{_ORDERS}"
              r"(?:[^;]|;(?=[^\n]*\"))*?\)\s*;", r"\g<indent>;", of_strings=True),
    _operator("operand", rf"(?<![\w.)\]])(?P<a>{_OPERAND})(?P<between> [-/%] )(?P<b>{_OPERAND})",
              _swapped),
    _operator("operand", rf"(?<=\w\()(?P<a>{_OPERAND})(?P<between>, )(?P<b>{_OPERAND})(?=[,)])",
              _swapped),
    _operator("operand", r"(?<=[\w)\]] )\+(?= [\w(])", "-"),
    _operator("edge", r"(?<= )(?:<=?|>=?|&&|\|\||==|!=)(?= )", lambda m: _OTHER[m[0]]),
    _operator("edge", r"\b(?:fminf|fmaxf|min|max)(?=\()", lambda m: _OTHER[m[0]]),
    _operator("edge", r"(?<=[\w)\]]) [-+] 1(?![\w.])", ""),
    _operator("edge", r"(?<=\bfor \()(?P<start>[^;]*= )0(?=;)", r"\g<start>1"),
    _operator("edge", rf"(?<= < ){_OPERAND}(?=;)", lambda m: f"{m[0]} - 1"),
    _operator("scale", rf"(?P<a>{_OPERAND}) \* {_OPERAND}", r"\g<a>"),
    _operator("scale", rf"(?<=[\w)\]] )\*= {_OPERAND}(?=;)", "*= 1"),
    _operator("scale", r"(?<=[\w)\]] )\+=(?= )", "="),
    _operator("scale", r"(?<![\w.])(?P<number>\d+\.\d*(?:[eE][-+]?\d+)?)f(?!\w)", _doubled),
    _operator("scale", r"-INFINITY\b", "0.0f"),
    _operator("scale", r"\b(?:exp2f|__expf|expf)(?=\()", lambda m: _OTHER[m[0]]),
)  # fmt: skip


def _doubled_bits(match: re.Match[str]) -> str:
    """Return twice a constant of PTX, the bits of a float32: its exponent is one more."""
    bits = int(match["bits"], 16)
    return f"0f{bits + (1 << 23) if bits & 0x7FFFFFFF else 0x3F800000:08X}"


_REGISTER = r"[%\w.+-]+"
_PTX_OPERATORS = (
    _operator("barrier", rf"(?<=\n)(?P<indent>[ \t]*)(?:@!?%\w+[ \t]+)?{_ORDERS}[^;\n]*;",
              r"\g<indent>"),
    _operator("operand", rf"(?P<first>\b(?:sub|div|rem)\.[\w.]+[ \t]+{_REGISTER}, )"
              rf"(?P<a>{_REGISTER})(?P<between>, )(?P<b>{_REGISTER})(?=;)",
              lambda m: m["first"] + _swapped(m)),
    _operator("operand", r"\badd(?=\.(?:rn\.|ftz\.)*(?:f32|s32)\b)", "sub"),
    _operator("edge", r"(?<=\bsetp\.)(?:lt|le|gt|ge|eq|ne)(?=\.)", lambda m: _OTHER[m[0]]),
    _operator("edge", r"\b(?:min|max)(?=\.)", lambda m: _OTHER[m[0]]),
    _operator("scale", rf"(?P<kept>\b(?:mul|fma)\.(?:rn\.|ftz\.)*f32[ \t]+{_REGISTER}, "
              rf"{_REGISTER}, ){_REGISTER}", r"\g<kept>0f3F800000"),
    _operator("scale", r"\b0f(?P<bits>[0-9A-Fa-f]{8})\b", _doubled_bits),
)  # fmt: skip

#: Text without code: comments, strings, and lines of the preprocessor.
_NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|^[ \t]*#(?:[^\n\\]|\\.)*|"
    r"\bstatic_assert\s*\([^;]*;",
    re.DOTALL | re.MULTILINE,
)


#: The two operands of PTX instructions that give the same, whichever of them is first.
_SYMMETRIC = re.compile(
    r"(?P<before>^\s*(?:@\S+\s+)?(?:(?:add|mul|fma|mad|min|max|and|or|xor)\.|setp\.(?:eq|ne)\.)"
    rf"[\w.]*\s+[%\w|]+, )(?P<a>{_REGISTER}), (?P<b>{_REGISTER})",
    re.MULTILINE,
)


#: A constant in global memory, which NVRTC writes for every one that a source names.
_CONSTANT = re.compile(r"^\.global \.align \d+ \.\w+ (?P<name>\w+) = .*\n", re.MULTILINE)


def machine_code(ptx: str) -> str:
    """Return PTX without names of files, lines, debug sections and the blocks wanted of an SM.

    Constants that no instruction reads are left out, too. Operands of a sum, a product or another
    symmetric instruction are sorted: codes that differ in their order alone do the same.
    """
    lines = ptx.partition(".section")[0].splitlines()
    left_out = re.compile(r"\s*(?:\.file|\.loc|//|\$L__|\.minnctapersm)")
    text = "\n".join(line for line in lines if not left_out.match(line))
    words = Counter(re.findall(r"\w+", text))
    text = _CONSTANT.sub(lambda m: m[0] if words[m["name"]] > 1 else "", text)
    return _SYMMETRIC.sub(lambda m: m["before"] + ", ".join(sorted((m["a"], m["b"]))), text)


def _blanked(source: str, *, strings: bool) -> str:
    """Return the source with blanks for comments and the preprocessor, and for strings if asked."""

    def blank(match: re.Match[str]) -> str:
        kept = match[0].startswith('"') and not strings
        return match[0] if kept else re.sub(r"[^\n]", " ", match[0])

    return _NO_CODE.sub(blank, source)


def mutants(source: str, *, ptx: bool = False) -> Iterator[Mutant]:
    """Yield all mutants of CUDA source or PTX, operator by operator.

    Some do not compile, and some compile to the same machine code.

    Parameters
    ----------
    source : str
    ptx : bool
        Whether it is PTX.

    Yields
    ------
    Mutant
    """
    code, with_strings = (_blanked(source, strings=strings) for strings in (True, False))
    code = code.partition(".section")[0] if ptx else code  # debug information
    names: set[str] = set()
    for operator in _PTX_OPERATORS if ptx else _OPERATORS:
        for match in operator.pattern.finditer(with_strings if operator.of_strings else code):
            made = operator.replace(match)
            if made == match[0]:
                continue
            start, end = match.span()
            text = source[:start] + made + source[end:]
            start += len(match[0]) - len(match[0].lstrip())
            line = source.count("\n", 0, start) + 1
            first = source.rfind("\n", 0, start) + 1
            name = f"{operator.kind}-{line}-{start - first + 1}"
            while name in names:
                name += "'"
            names.add(name)
            shift = len(text) - len(source)
            last = source.find("\n", end)
            last = len(source) if last < 0 else last
            yield Mutant(
                name, operator.kind, line, source[first:last], text[first : last + shift], text
            )
