"""Transfers KV cache (the keys and values of computed tokens) between engines of an LLM.

agent           the object that an engine embeds to send and receive KV
layout/         how KV lies in memory, and which bytes go where
transfer/       offers and fetches of KV: who may fetch what, until when, and how it ends; no I/O
protocol/       messages between agents, proof of identity, and tickets (permissions to fetch)
links/          connections to other agents
transports/     how bytes move: TCP, shared memory, RDMA
dialects/       what the gateway adds to requests, for each kind of engine
store/          KV blocks in host memory and on disk, found by their content
engines/        plug-ins for real engines

No module here depends on the gateway. docs/kvtransfer.md describes the design and its threat model.
"""
