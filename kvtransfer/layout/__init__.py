"""How KV lies in memory, and which bytes of one group go where in another."""
