"""Choice of a pool's routing policy by replays of its recent requests (`policy: auto`)."""
