"""The build that compiles the packages on a request's path with Cython; not shipped."""
