"""The public names that an engine needs to embed a KV transfer agent.

`penstock_kv.vllm` is the plug-in for vLLM. The code is in the package kvtransfer.
"""

try:
    from kvtransfer.agent import Agent
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise ImportError(
        "penstock_kv needs numpy; install it with: pip install 'penstock-kv[numpy]'"
    ) from None
from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.protocol.outcomes import OutcomeKind
from kvtransfer.transports.shm import Shm
from kvtransfer.transports.tcp import Tcp
from kvtransfer.util.agent_options import AgentOptions

__all__ = [
    "Agent",
    "AgentOptions",
    "KvDtype",
    "KvLayout",
    "MemoryFileRegion",
    "OutcomeKind",
    "Shm",
    "Tcp",
]
