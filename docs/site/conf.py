"""Sphinx settings of the documentation site, which `python -m docs.build_site` builds."""

from __future__ import annotations

import cupyattn

project = "cupyattn"
author = "the cupyattn authors"
version = release = cupyattn.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",  # MathJax comes with the site: a reader needs no network
]
templates_path = ["_templates"]

# ---- pages ---------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# ---- reference -----------------------------------------------------------------------------------

default_role = "py:obj"  # `name` in a docstring is a link where the name has a page
autosummary_generate = True
autosummary_imported_members = True
autodoc_typehints = "none"  # the docstrings say the types
numpydoc_show_class_members = False
toc_object_entries = False

# ---- look ----------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "cupyattn"
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
