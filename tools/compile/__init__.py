"""The build that compiles the packages on the path of a request with Cython; not shipped."""
