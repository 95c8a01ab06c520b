"""A process with one KV transfer agent, which tests suspend and kill.

It reads commands from stdin and writes events to stdout, as JSON.

python -m tests.chaos.kv_peer TRANSPORT MISSES source          offers KV under the name "r"
python -m tests.chaos.kv_peer TRANSPORT MISSES sink ADDRESS    fetches "r" from ADDRESS

MISSES is the number of missed heartbeats after which a connection counts as lost. The command
`ready` marks further layers of the offer as computed.
"""

from __future__ import annotations

import asyncio
import json
import sys

from kvtransfer.transfer.handles import TransferHandle
from kvtransfer.transports.inproc import InprocWire
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import ThreadClock
from tests.contract.kvtransfer.groups import SMALL, group
from tests.contract.kvtransfer.links import PATIENCE_S, make

BLOCKS, TOKENS = [1, 2, 3], 48
# An emulated processor may not run a process for a second.
SLOW = PATIENCE_S / 20


def options(misses: int) -> AgentOptions:
    shipped = AgentOptions()
    return AgentOptions(
        beat_s=shipped.beat_s * SLOW,
        max_missed_beats=misses,
        handshake_s=shipped.handshake_s * SLOW,
    )


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(transport: str, misses: str, role: str, *rest: str) -> None:
    here = group(
        role, SMALL, [make(transport, InprocWire(ThreadClock()))], options=options(int(misses))
    )
    await here.agent.start()
    for region in here.regions:
        region.bytes[:] = 0x55
    if role == "source":
        offer = here.agent.offer("r", BLOCKS, TOKENS, ready_layers=0, public=True)
        tell(address=here.agent.address, ticket=offer.ticket)
        handle: TransferHandle = offer
    else:
        handle = here.agent.fetch(rest[0], "r", BLOCKS, TOKENS)
        tell(asked=True)
    watch = asyncio.create_task(handle.wait_ended())
    watch.add_done_callback(lambda done: tell(end=str(done.result().reason)))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := (await reader.readline()).split():
        if line[0] == b"ready":
            here.agent.mark_ready(handle.number, int(line[1]))
        elif line[0] == b"overwrite":
            for region in here.regions:
                region.bytes[:] = 0xEE
    await here.agent.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
