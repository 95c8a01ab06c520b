"""Builds the package penstock-kv, and compiles its C code for moving KV bytes (the pump).

If the pump cannot be compiled, or if PENSTOCK_KV_PUMP=off is set, it is left out. Python code then
moves the bytes (transports/iovec.py).
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
