"""Run the kernels on other libraries' arrays, modules and models.

`restore` undoes replacements in a model. This package imports no other library:
`cupyattn.interop.torch` imports torch at first use, and the others do the same.
"""

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.interop.restoring import restore

__all__ = ["restore"]

__getattr__, __dir__ = lazy_face(__name__, {"interop.restoring": ("restore",)})
