"""The mock engine's side of split requests: one engine prefills, and another one decodes.

Each module imitates the protocol of one engine (vLLM, SGLang, TensorRT-LLM), as it is documented.
The library kvtransfer moves the KV cache. The modules share no code with the gateway's side, so
that a test can find a mistake in either side.
"""
