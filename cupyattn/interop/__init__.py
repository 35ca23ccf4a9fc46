"""Other libraries' arrays, modules and models on these kernels.

`restore` undoes replacements in a model. This face imports no library: `cupyattn.interop.torch`
imports torch at first use, and so on.
"""

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.interop.restoring import restore

__all__ = ["restore"]

__getattr__, __dir__ = lazy_face(__name__, {"interop.restoring": ("restore",)})
