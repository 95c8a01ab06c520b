"""Routing decisions as pure functions: which requests enter a pool, and which endpoint serves each.

An endpoint is one inference engine behind one URL; a pool is a group of endpoints that serve the
same models. No module here reads a clock, a socket, a random source or a global: the time `now` and
the random generator `rng` are arguments. So the same code runs in the live gateway, in tests, and
in simulations on a virtual clock.
"""
