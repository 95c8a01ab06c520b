"""The KV connector for vLLM, under a short name: "kv_connector_module_path": "penstock_kv.vllm"."""

try:
    from kvtransfer.engines.vllm.connector import PenstockConnector
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "vllm":
        raise
    raise ImportError(
        f"PenstockConnector needs vLLM 0.32 in this Python environment: {error}"
    ) from None

__all__ = ["PenstockConnector"]
