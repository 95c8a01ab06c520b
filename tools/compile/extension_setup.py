"""Build script that makes an extension module of every generated C file in a source tree.

source_tree.py copies it into that tree as setup.py, and lists the packages and modules that are
optimized for size. SMALL_CFLAGS holds the compiler's flags for those, in addition to CFLAGS. The
folder kvtransfer/ is a project of its own. A wheel contains no sources of extension modules: they
would never be imported.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

small = Path("small_packages.txt").read_text().splitlines()
small_flags = os.environ.get("SMALL_CFLAGS", "").split()


def is_small(source):
    """Return whether a C file's Python source, or its package, is optimized for size."""
    return not {source.with_suffix(".py").as_posix(), source.parent.as_posix()}.isdisjoint(small)


class UncompiledModules(build_py):
    """The modules of a wheel that are Python sources: those without a C file."""

    def find_package_modules(self, package, package_dir):
        """Return (package, module, path) of the uncompiled modules in a package's folder."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if not Path(module[2]).with_suffix(".c").exists()]


setup(
    cmdclass={"build_py": UncompiledModules},
    ext_modules=[
        Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            extra_compile_args=small_flags if is_small(source) else [],
        )
        for source in sorted(Path().glob("[a-z]*/**/*.c"))
        if source.parts[0] not in ("build", "kvtransfer")
    ],
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
