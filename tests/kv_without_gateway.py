"""Transfers KV between two agents in an environment with only penstock-kv: `kv_without_gateway.py PAGE`

It runs the example of docs/kvtransfer.md (PAGE) without the rest of the project. It prints as JSON
which of our packages can be imported, and whether the native pump (C code) moved the bytes.
"""

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
from penstock_kv import Agent, KvDtype, KvLayout, MemoryFileRegion, Tcp

from kvtransfer.transports.pump import PUMP

OURS = ("gateway", "kvtransfer", "mockgpu", "penstock_kv", "planner", "policies")
LAYOUT = KvLayout(2, 2, 16, KvDtype.BF16, 4)
KEY = b"a key of this test"


async def _transfer(example: str) -> None:
    names: dict[str, object] = {"LAYERS": LAYOUT.layers}
    exec(example, names)
    size = LAYOUT.rank_block_bytes(0)
    regions = [MemoryFileRegion.create(4, size, name=role) for role in ("source", "sink")]
    regions[0].bytes[:] = np.arange(regions[0].bytes.size, dtype=np.uint8)
    source, sink = (
        Agent(name, LAYOUT, [region], key=KEY, transports=[Tcp()])
        for name, region in zip(("prefill-0", "decode-0"), regions, strict=True)
    )
    await source.start()
    await sink.start()
    handoff = asyncio.get_running_loop().create_future()
    prefill = asyncio.create_task(
        names["prefill"](source, "r", [1, 2], 8, lambda *given: handoff.set_result(given))
    )
    assert await names["decode"](sink, "r", [3, 0], 8, *await handoff)
    await prefill
    for taken, given in ((3, 1), (0, 2)):
        sent = regions[0].bytes[given * size : (given + 1) * size]
        assert np.array_equal(regions[1].bytes[taken * size : (taken + 1) * size], sent)
    await source.close()
    await sink.close()
    for region in regions:
        region.close()


if __name__ == "__main__":
    (example,) = re.findall(r"```python\n(.*?)```", Path(sys.argv[1]).read_text(), re.DOTALL)
    asyncio.run(_transfer(example))
    importable = [name for name in OURS if importlib.util.find_spec(name)]
    print(json.dumps({"importable": importable, "has_pump": PUMP is not None}))
