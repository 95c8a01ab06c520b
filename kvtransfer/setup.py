"""Build script of penstock-kv: finds its packages in this folder and compiles the native pump.

Where the pump does not compile, and with PENSTOCK_KV_PUMP=off, it is left out: KV then moves by the
same functions in Python (transports/iovec.py).
"""

import os

from setuptools import Extension, find_packages, setup

ALIAS = "penstock_kv"
INSIDE = find_packages(exclude=[ALIAS, "build*"])
PUMP = Extension(
    "kvtransfer.transports._pump", ["transports/_pump.c"], optional=True, py_limited_api=True
)

setup(
    script_name="setup.py",  # which is not a module of the package in the same folder
    packages=[ALIAS, "kvtransfer", *(f"kvtransfer.{name}" for name in INSIDE)],
    package_dir={"kvtransfer": ".", ALIAS: ALIAS},
    include_package_data=False,  # C files are not data
    ext_modules=[] if os.environ.get("PENSTOCK_KV_PUMP") == "off" else [PUMP],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
