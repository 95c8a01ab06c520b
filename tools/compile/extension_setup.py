"""The setup.py of a compiled build: an extension module for every C file of Cython.

source_tree.py copies this file into the source tree. It also writes small_packages.txt, a list of
packages and modules that are compiled for small size instead of speed. For those, the compiler gets
the flags in SMALL_CFLAGS in addition to CFLAGS.

The folder kvtransfer/ is left out, because it is a project with its own setup. Wheels contain no
Python sources of compiled modules, because Python would never import them.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

small = Path("small_packages.txt").read_text().splitlines()
small_flags = os.environ.get("SMALL_CFLAGS", "").split()


def is_small(source):
    """Return whether a C file belongs to a module or package that is compiled for small size."""
    return not {source.with_suffix(".py").as_posix(), source.parent.as_posix()}.isdisjoint(small)


class UncompiledModules(build_py):
    """The part of setup.py that selects the uncompiled Python modules for a wheel."""

    def find_package_modules(self, package, package_dir):
        """Return (package, module, path) of each module in a package's folder that is not
        compiled.
        """
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if not Path(module[2]).with_suffix(".c").exists()]


setup(
    cmdclass={"build_py": UncompiledModules},
    ext_modules=[
        Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            include_dirs=["."],
            extra_compile_args=small_flags if is_small(source) else [],
        )
        for source in sorted(Path().glob("[a-z]*/**/*.c"))
        if source.parts[0] not in ("build", "kvtransfer")
    ],
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
