"""Serves Anthropic Messages and OpenAI Responses with engines that only have chat completions.

A request is translated to a chat completion as a whole. A StreamTranslator translates a streamed
answer back as its bytes arrive; other answers are translated as a whole. No I/O.
"""
