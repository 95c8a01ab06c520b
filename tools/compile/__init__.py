"""Compile the packages on a request's path with Cython, from the same sources. Not shipped."""
