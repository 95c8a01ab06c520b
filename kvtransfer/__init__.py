"""KV cache between TP groups: the agent that an engine embeds, and the engines' own dialects of a handoff.

layout, reshard, regions    what lies where, which bytes go where, the memory itself
source, sink, lease, ends   who may fetch what, until when, and how it ends: sans-IO
session, ticket, messages   who is who, and what is said
transports/                 how bytes move
Nothing of the gateway is here; docs/kvtransfer.md tells how it works together and what it defends against.
"""
