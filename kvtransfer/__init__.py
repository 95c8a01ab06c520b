"""Transfer of KV cache between tensor-parallel groups, and the engines' handoff dialects.

agent                       the object that an engine embeds
layout/                     how KV lies in memory, which bytes go where, and the memory itself
transfer/                   who may fetch what, until when, and how a transfer ends; without I/O
protocol/                   proof of identity, tickets (permissions) and messages
links/                      connections to peers
transports/                 how bytes move
dialects/                   how the gateway asks each engine for a handoff
store/                      KV blocks by their content, in host memory and on disk
engines/                    connectors for real engines

No module here depends on the gateway. docs/kvtransfer.md describes the design and its threat model.
"""
