"""The mock engine's audio APIs: a recording is uploaded, and a transcript is returned.

As in vLLM, the transcript is either one JSON object or a stream of events. Its text is made up. It
depends only on the content and the length of the recording.
"""

from __future__ import annotations

from typing import Any

from xxhash import xxh3_128_hexdigest

from mockgpu.http.chat_conversion import chat_of
from mockgpu.http.choice_and_stop_reason import Choice
from mockgpu.http.openai_format import DONE, event, http_chunk
from mockgpu.mock_tokenizer import TOKEN_BYTES
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody

BYTES_PER_TOKEN = 1024
MAX_TOKENS = 448


def read_audio(fields: dict[str, Any]) -> RequestBody:
    """Convert an uploaded audio form to a chat request, and return the request.

    Raises ApiError if a field is missing or invalid.
    """
    recording = fields.get("file")
    if not isinstance(recording, bytes) or not recording:
        raise ApiError(400, "1 validation error: file: field required", "file")
    tokens = min(MAX_TOKENS, 1 + len(recording) // BYTES_PER_TOKEN)
    is_stream = str(fields.get("stream", "")).lower() in ("true", "1")
    text = f"{xxh3_128_hexdigest(recording)} {fields.get('prompt', '')}"
    return chat_of(text, fields.get("model"), max_tokens=tokens, stream=is_stream)


def transcription(parsed: ParsedRequest, choice: Choice) -> dict[str, Any]:
    """Return a complete transcript as a JSON object with its text and token usage."""
    usage = {"type": "duration", "seconds": max(1, parsed.limit // 4)}
    return {"text": choice.text.strip(), "usage": usage}


class AudioChunks:
    """Builds the server-sent events of one transcript that is sent as a stream."""

    __slots__ = ("_choice", "_created", "_made", "_parsed")

    def __init__(self, parsed: ParsedRequest, choice: Choice, created: int) -> None:
        self._parsed, self._choice, self._created = parsed, choice, created
        self._made = 0

    def begin(self) -> bytes:
        """Return no bytes: nothing is sent before a transcript's first token."""
        return b""

    def next(self, cached: int | None) -> bytes:
        start = self._made * TOKEN_BYTES
        self._made += 1
        return self._chunk(self._choice.text[start : start + TOKEN_BYTES], None)

    def end(self, cached: int | None) -> bytes:
        """Return the end of a transcript stream: an event with the finish reason, then `[DONE]`."""
        return self._chunk("", "stop") + http_chunk(DONE)

    def _chunk(self, piece: str, reason: str | None) -> bytes:
        choice = {"delta": {"content": piece}, "finish_reason": reason, "index": 0}
        return http_chunk(
            event(
                {
                    "id": self._parsed.id,
                    "object": "transcription.chunk",
                    "created": self._created,
                    "model": self._parsed.model,
                    "choices": [choice],
                }
            )
        )
