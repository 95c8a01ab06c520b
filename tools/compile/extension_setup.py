"""Build script that makes an extension module of every generated C file in a source tree.

source_tree.py copies it to that tree as setup.py. kvtransfer/ there is a project of its own.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(".".join(source.with_suffix("").parts), [str(source)])
        for source in sorted(Path().glob("[a-z]*/**/*.c"))
        if source.parts[0] not in ("build", "kvtransfer")
    ],
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
