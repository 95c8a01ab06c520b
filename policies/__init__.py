"""Pure routing decisions: which requests enter a pool, which endpoint serves each, how long they
wait.

No module here reads a clock, a socket, a random source or a global; the time `now` and the random
generator `rng` are arguments. The same code therefore runs in the live gateway, in tests and in
simulations on a virtual clock.
"""
