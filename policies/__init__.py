"""Pure decisions: which requests enter, which endpoint serves them, how long they wait.

Nothing here reads a clock, a socket, a random source or a global: `now` and `rng` are arguments.
The same code therefore runs in the live gateway, in tests and on a virtual clock.
"""
