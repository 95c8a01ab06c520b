"""Transfer of KV cache between tensor-parallel groups, and the engines' handoff dialects.

agent                       the object that an engine embeds
layout, reshard, regions    where KV lies, which bytes go where, and the memory itself
source, sink, lease, ends   who may fetch what, until when, and how it ends: sans-IO
session, ticket, messages   proof of identity, permissions, and the protocol
transports/                 how bytes move
dialects/                   how the gateway asks each engine for a handoff

Nothing of the gateway is here. docs/kvtransfer.md describes the design and its threat model.
"""
