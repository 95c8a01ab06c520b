"""The engine's side of split requests, where one engine prefills and another one decodes.

Each module implements the protocol of one engine (vLLM, SGLang, TensorRT-LLM), over the KV transfer
library kvtransfer. They follow the engines' documented behaviour and share no code with the
gateway's side.
"""
