"""Compiles the modules that serve requests to C extension modules, with Cython.

It runs in a checkout and is not part of the released packages.
"""
