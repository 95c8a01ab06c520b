"""A store of KV blocks for all engines of one host: memory first, then disk.

block_keys     names of blocks, which cover their content and their tenant
tier_index     which block is in which slot of one tier; without I/O
store_index    both tiers, the leases of readers, and what to save or load; without I/O
slots          the file format of both tiers, and verified reads
memory_slots   the slots in memory
disk_slots     the slots in a file on disk
block_store    the store in one process: index and slots together
service        the same for other processes, on a Unix socket; `python -m kvtransfer.store` runs it
client         what an engine uses
fetch_rule     how many stored blocks an engine fetches, and computes the rest; without I/O
cost_fit       learns the costs that the rule compares

docs/kv-store.md describes the design.
"""
