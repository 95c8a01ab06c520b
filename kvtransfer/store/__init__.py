"""A store of KV blocks that all engines of one host share, in memory and on disk.

block_keys          names of blocks, which cover their content and their tenant
tier_index          which block is in which place (slot) of one tier, memory or disk; no I/O
store_index         both tiers, the leases of readers, and what to save or load; no I/O
slot_format         the file format of both tiers, and verified reads
memory_slots        the slots in memory
disk_slots          the slots in a file on disk
block_store         the store within one process: index and slots together
unix_socket_server  the store for other processes; `python -m kvtransfer.store` runs it
client              what an engine uses
fetch_rule          decides how many stored blocks to fetch, and how many to compute; no I/O
cost_fit            learns the costs that the rule compares

docs/kv-store.md describes the design.
"""
