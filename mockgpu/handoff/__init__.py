"""The mock engine's side of split requests: one engine prefills, and another one decodes.

Each module implements the protocol of one engine (vLLM, SGLang, TensorRT-LLM). The KV cache moves
over the library kvtransfer. The modules follow the engines' documented behaviour. They share no
code with the gateway's side, so that a test can find a mistake in either side.
"""
