"""Pure decisions and their vocabulary: who may enter, who serves, how long to wait.

Nothing here reads a clock, a socket, a random source or a global: `now` and `rng` are arguments.
That is why the same code runs in the live gateway, in tests and on a virtual clock.
"""
