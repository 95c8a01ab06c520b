"""Serves Anthropic Messages and OpenAI Responses by engines that only have chat completions.

A request is translated to a chat completion as a whole. Its answer is translated back as a whole
or, by a StreamTranslator, as its bytes arrive. No I/O.
"""
