"""Names of the C and C++ standard headers, which nvcc provides to a CUDA source and NVRTC does not.

NVRTC has neither a C library nor its headers, and knows functions such as ``expf`` without them.
"""

from __future__ import annotations

import re

#: Headers whose device functions NVRTC knows without them.
HEADERS = frozenset(
    f"{c}{name}{h}"
    for name in ("math", "stdint", "float", "limits", "stdio", "stdlib", "stddef", "string",
                 "assert")
    for c, h in (("", ".h"), ("c", ""))
)  # fmt: skip
#: Names in these headers, with their device definitions.
NAMES = {
    "INFINITY": "#define INFINITY __int_as_float(0x7f800000)",
    "NAN": "#define NAN __int_as_float(0x7fffffff)",
    "FLT_MAX": "#define FLT_MAX 3.402823466e+38f",
    "FLT_MIN": "#define FLT_MIN 1.175494351e-38f",
    "FLT_EPSILON": "#define FLT_EPSILON 1.192092896e-7f",
    "INT_MAX": "#define INT_MAX 2147483647",
    "INT_MIN": "#define INT_MIN (-2147483647 - 1)",
    "UINT_MAX": "#define UINT_MAX 4294967295u",
    "M_PI": "#define M_PI 3.14159265358979323846",
    "M_LOG2E": "#define M_LOG2E 1.44269504088896340736",
    "M_LN2": "#define M_LN2 0.693147180559945309417",
    "int8_t": "using int8_t = signed char;",
    "int16_t": "using int16_t = short;",
    "int32_t": "using int32_t = int;",
    "int64_t": "using int64_t = long long;",
    "uint8_t": "using uint8_t = unsigned char;",
    "uint16_t": "using uint16_t = unsigned short;",
    "uint32_t": "using uint32_t = unsigned int;",
    "uint64_t": "using uint64_t = unsigned long long;",
    "uintptr_t": "using uintptr_t = unsigned long long;",
    "assert": "#define assert(x) ((x) ? (void)0 : __trap())",
}
_INCLUDE = re.compile(r"^([ \t]*)#([ \t]*)include[ \t]*<([\w.]+)>", re.MULTILINE)


def with_names(text: str) -> str:
    """Return a CUDA source that NVRTC compiles, in which each line keeps its number.

    Examples
    --------
    >>> print(with_names("#include <math.h>\\n__device__ float x = INFINITY;"))
    #define INFINITY __int_as_float(0x7f800000)
    #line 1
    // <math.h>
    __device__ float x = INFINITY;
    >>> with_names("__device__ int x;")
    '__device__ int x;'
    """
    found = [match[3] for match in _INCLUDE.finditer(text)]

    def left_out(match: re.Match[str]) -> str:
        return f"// <{match[3]}>" if match[3] in HEADERS else match[0]

    text = _INCLUDE.sub(left_out, text)
    if '#include "prims/' in text:  # which have the same names
        return text
    used = set(re.findall(r"\w+", text)) - set(re.findall(r"#\s*define\s+(\w+)", text))
    types = any(header in found for header in ("stdint.h", "cstdint"))
    lines = [
        line for name, line in NAMES.items()
        if name in used and (types or not line.startswith("using"))
    ]  # fmt: skip
    if not lines:
        return text
    return "\n".join([*lines, "#line 1", text])
