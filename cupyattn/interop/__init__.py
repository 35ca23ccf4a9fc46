"""Other libraries' arrays, modules and models on these kernels.

`restore` takes back what was replaced in a model. Nothing is imported here:
`cupyattn.interop.torch` needs torch, and so on, each when it is asked for.
"""

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.interop.restoring import restore

__all__ = ["restore"]

__getattr__, __dir__ = lazy_face(__name__, {"interop.restoring": ("restore",)})
