"""How KV lies in memory, and which bytes of one group are copied where in another group."""
