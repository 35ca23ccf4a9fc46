"""Layout of the members of a kernel's shared memory, by name, as the compiler reports it.

The names are read from the text of ``struct SharedStorage``. The source up to the end of the
struct is then compiled with an array of constants for each member. The constants are offsets,
element types and extents.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.interpret.memory import SHARED_BASE
from cupyattn.interpret.ptx import parse
from cupyattn.interpret.variables import plain_name

if TYPE_CHECKING:
    from cupyattn.interpret.observer import Started
    from cupyattn.interpret.program import Program

#: NumPy names of element types; all other types count as uint64 or as bytes.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
}
_MAX_RANK = 6

_STORAGE = re.compile(r"^\s*(?:struct|union)\s+(?:alignas\([^)]*\)\s*)?SharedStorage\s*\{", re.M)
_COMMENT_OR_BRACE = re.compile(r"//[^\n]*|/\*.*?\*/|[{}]", re.S)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_OPEN_CLOSE_DECLARE = re.compile(
    r"(?P<open>\b(?:struct|union)\b[^;{}]*\{)|\}(?P<close>[^;{}]*);|(?P<declare>[^;{}]+);"
)
_DECLARATOR = re.compile(r"(\w+)\s*(?:\[\]\s*)*(?:,|$)")
_TRAITS = f"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace shared_members {{
template <typename T>
struct Shape {{
  using element = T;
  static constexpr int rank = 0;
  __device__ static constexpr long long extent(int) {{ return 0; }}
}};
template <typename T, int N>
struct Shape<T[N]> {{
  using element = typename Shape<T>::element;
  static constexpr int rank = Shape<T>::rank + 1;
  static_assert(rank <= {_MAX_RANK}, "an array of more axes than are read back");
  __device__ static constexpr long long extent(int axis) {{
    return axis == 0 ? N : Shape<T>::extent(axis - 1);
  }}
}};
template <typename T> constexpr int code = -1;
{"".join(f"template <> constexpr int code<{t}> = {i};" for i, t in enumerate(_DTYPES))}
}}  // namespace shared_members
"""


@dataclass(frozen=True)
class Member:
    """A member of a kernel's shared memory.

    Parameters
    ----------
    name : str
        ``"K"``; ``"scores.K"`` inside a nested struct.
    dtype : str
        NumPy's name. A struct of 8 bytes, an mbarrier for example, is a uint64; one of another
        size is uint8, with its bytes as the last axis.
    shape : tuple of int
        Extents of the array, ``()`` for a single element.
    offset : int
        Bytes from the start of the struct.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the member."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def element_at(members: tuple[Member, ...], offset: int) -> str:
    """Return the member's element that contains a byte; several elements in a union.

    Examples
    --------
    >>> element_at((Member("K", "float32", (8, 4), 0), Member("l", "float32", (), 128)), 20)
    'K[1, 1]'
    """
    found = []
    for m in members:
        if m.offset <= offset < m.offset + m.nbytes and m.offset < 0:  # its type is not known
            found.append(f"byte {offset - m.offset} of {m.name}")
        elif m.offset <= offset < m.offset + m.nbytes:
            element = (offset - m.offset) // np.dtype(m.dtype).itemsize
            index = ", ".join(str(i) for i in np.unravel_index(element, m.shape))
            found.append(f"{m.name}[{index}]" if index else m.name)
    return " or ".join(found)


def members_of(one: Started, program: Program, arch: str) -> tuple[Member, ...]:
    """Return the members of a launch's shared memory, by name.

    Parameters
    ----------
    one : Started
        The launch.
    program : Program
        Its kernel.
    arch : str
        Architecture, for example ``"sm_80"``.

    Returns
    -------
    tuple of Member
        The members of ``SharedStorage``. Without that struct, the variables of fixed size, as
        bytes: PTX does not keep their types. Their offsets are negative, because offset 0 is the
        first byte of dynamic shared memory.
    """
    members = () if one.module is None else shared_members(one.module, arch)
    if members or not program.shared:
        return members
    end = SHARED_BASE + program.shared_bytes
    placed = sorted(program.shared.items(), key=lambda item: item[1])
    stops = [*(address for _, address in placed[1:]), end]
    return tuple(
        Member(plain_name(name), "uint8", (stop - address,), address - end)
        for (name, address), stop in zip(placed, stops, strict=True)
        if address < stop
    )


def shared_members(spec: ModuleSpec, arch: str) -> tuple[Member, ...]:
    """Return the members of the kernel's ``SharedStorage``, in order of declaration.

    Parameters
    ----------
    spec : ModuleSpec
        Source and macros.
    arch : str
        Architecture, for example ``"sm_80"``.

    Returns
    -------
    tuple of Member
        Empty for a source that has no ``SharedStorage``. The members of a union overlap.

    Raises
    ------
    KernelCompileError
        If the source does not compile.
    UnsupportedError
        If there is no NVRTC, or it does not know the architecture.
    """
    return _members(spec, arch, compiler.read_source(spec))


@lru_cache(maxsize=256)
def _members(spec: ModuleSpec, arch: str, source: str) -> tuple[Member, ...]:
    storage = _STORAGE.search(source)
    if storage is None:
        return ()
    end = _closing_brace(source, storage.end())
    names = member_names(source[storage.end() : end])
    text = f"{source[:end]}}};\n{_TRAITS}"
    text += "".join(_constants(index, name) for index, name in enumerate(names))
    variables = parse(compiler.translate(spec, arch, text).ptx).variables
    found = []
    for index, name in enumerate(names):
        values = variables[_constant_name(index)].values or b""
        offset, size, code, rank, *extents = struct.unpack(f"<{4 + _MAX_RANK}q", values)
        shape = tuple(extents[:rank])
        if code >= 0:
            dtype = list(_DTYPES.values())[code]
        elif size == 8:
            dtype = "uint64"
        else:
            dtype, shape = "uint8", (*shape, size)
        found.append(Member(name, dtype, shape, offset))
    return tuple(found)


def _closing_brace(source: str, start: int) -> int:
    """Return the offset of the brace that closes the one before `start`."""
    depth = 1
    for match in _COMMENT_OR_BRACE.finditer(source, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return len(source)


def member_names(body: str) -> list[str]:
    """Return the names that the body of a struct declares, with dots for nested structs.

    An array of structs is one member.

    Examples
    --------
    >>> member_names("alignas(16) float Q[8], K[2][LD + 1]; struct { int tile; } ring;")
    ['Q', 'K', 'ring.tile']
    """
    scopes: list[list[str]] = [[]]
    for match in _OPEN_CLOSE_DECLARE.finditer(_COMMENT.sub("", body)):
        if match["open"]:
            scopes.append([])
            continue
        # Commas inside of brackets separate no members.
        declared = re.sub(r"\([^()]*\)|<[^<>]*>", "", match["close"] or match["declare"] or "")
        names = _DECLARATOR.findall(re.sub(r"\[[^\]]*\]", "[]", declared).strip())
        inner = scopes.pop() if match["declare"] is None else []
        if inner and not names:
            names = inner
        elif inner and declared.strip() == names[0]:
            names = [f"{names[0]}.{name}" for name in inner]
        scopes[-1] += names
    return scopes[0]


def _constant_name(index: int) -> str:
    return f"shared_member_{index}"


def _constants(index: int, name: str) -> str:
    """Return the declaration of a member's offset, element size, type, rank and extents."""
    # NOTE: NVRTC has no offsetof; this difference is a constant to it as well.
    storage = "static_cast<SharedStorage*>(nullptr)"
    offset = f"reinterpret_cast<char*>(&{storage}->{name}) - static_cast<char*>(nullptr)"
    shape = f"shared_members::Shape<decltype({storage}->{name})>"
    extents = ", ".join(f"{shape}::extent({axis})" for axis in range(_MAX_RANK))
    return (
        f'extern "C" __device__ long long {_constant_name(index)}[] = {{{offset},\n'
        f"  sizeof({shape}::element), shared_members::code<{shape}::element>,\n"
        f"  {shape}::rank, {extents}}};\n"
    )
