"""Anthropic Messages and OpenAI Responses as chat completions, and back. No I/O.

For engines that only have chat completions. A request is translated as a whole; an answer as a
whole or, by a StreamTranslator, in any pieces in which its bytes arrive.
"""
