"""Metadata is in setup.cfg. This file packs docs/, and explains that there is no extension."""

import sys

if "build_ext" in sys.argv[1:]:
    sys.exit(
        "setup.py: there is no extension to build, as kernels are compiled when they are first "
        "called: run pip install -e '.[cuda13,cli]', or '.[cuda12,cli]'"
    )

from setuptools import setup
from setuptools.command.build_py import build_py


class PackedPages(build_py):
    """Packs pages and examples as cupyattn.docs, without the modules that write the pages."""

    def find_package_modules(self, package, package_dir):
        """Return the modules of a package: none of cupyattn.docs, whose examples are data."""
        found = super().find_package_modules(package, package_dir)
        return [] if package.startswith("cupyattn.docs") else found


setup(cmdclass={"build_py": PackedPages})
