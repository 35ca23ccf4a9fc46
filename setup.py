"""Metadata is in setup.cfg. This file answers those who build CUDA extensions by habit."""

import sys

if "build_ext" in sys.argv[1:]:
    sys.exit(
        "setup.py: there is no extension to build, as kernels are compiled when they are first "
        "called: run pip install -e '.[cuda13,cli]', or '.[cuda12,cli]'"
    )

from setuptools import setup

setup()
