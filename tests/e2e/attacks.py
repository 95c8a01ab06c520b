"""Malicious requests for test_attacks.py, each with the response that it must get."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.e2e.raw_connection import post
from tests.e2e.recording_engine import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


class Attack(NamedTuple):
    name: str
    sent: bytes | Callable[[], bytes]
    status: int = 400
    code: str | None = None
    param: str | None = None
    says: str = ""


def chat(**changes: Any) -> bytes:
    return post({**CHAT, **changes})


def raw(body: bytes, *headers: str) -> bytes:
    return post(body, PATH, *headers)


def head(
    *lines: str, start: str = f"POST {PATH} HTTP/1.1", host: str | None = "Host: test"
) -> bytes:
    return "\r\n".join([start, *([host] if host else []), *lines, "", ""]).encode("latin-1")


def chunked(body: bytes, *lines: str) -> bytes:
    return head("Transfer-Encoding: chunked", *lines) + body


BODY = json.dumps(CHAT).encode()
LENGTH = f"Content-Length: {len(BODY)}"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
TOO_BIG = "request_too_large"

JSON_ATTACKS = [
    Attack("not JSON", raw(b"{'model': 'demo'}"), says="not valid JSON"),
    Attack("cut JSON", raw(BODY[:-2])),
    Attack("empty body", raw(b"")),
    Attack("an array", raw(b"[" + BODY + b"]"), says="object"),
    Attack("two objects", raw(BODY + BODY)),
    Attack("a BOM before it", raw(b"\xef\xbb\xbf" + BODY)),
    Attack(
        "arrays 100,000 deep",
        raw(b'{"model":"demo","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        says="deep",
    ),
    Attack("objects 100,000 deep", raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), says="deep"),
    Attack("depth that never closes", raw(b"[" * 1_000_000)),
    Attack(
        "a million members",
        lambda: raw(
            b'{"model":"demo","messages":[]'
            + b"".join(b',"k%d":1' % i for i in range(1_000_000))
            + b"}"
        ),
        says="members",
    ),
    Attack("a thousand members", chat(**{f"k{i}": 1 for i in range(1000)}), says="members"),
    Attack("a name of 8 MiB", lambda: raw(b'{ "' + b"a" * 2**23 + b'":1,' + BODY[1:]), says="name"),
    Attack(
        "a number of 100,000 digits",
        raw(BODY[:-1] + b',"seed":' + b"9" * 100_000 + b"}"),
        param="seed",
    ),
    Attack(
        "a guarded number of 5,000 digits",
        raw(BODY[:-1] + b',"n":' + b"9" * 5_000 + b"}"),
        param="n",
    ),
    Attack("a number beyond floats", raw(BODY[:-1] + b',"n":1e999}'), param="n"),
    Attack("NaN", raw(BODY[:-1] + b',"temperature":NaN}')),
    Attack("Infinity", raw(BODY[:-1] + b',"temperature":-Infinity}')),
    Attack(
        "a lone high surrogate",
        raw(rb'{"model":"demo","messages":[{"role":"user","content":"\ud800 and more text"}]}'),
    ),
    Attack(
        "a lone low surrogate",
        raw(rb'{"model":"demo","messages":[{"role":"user","content":"\udc00 and more text"}]}'),
    ),
    Attack("a lone surrogate as model", raw(rb'{"model":"\ud800 and more text","messages":[]}')),
    Attack(
        "invalid UTF-8",
        raw(b'{"model":"demo","messages":[{"role":"user","content":"\xff\xfe"}]}'),
        says="UTF-8",
    ),
    Attack(
        "overlong UTF-8",
        raw(b'{"model":"demo","messages":[{"role":"user","content":"\xc0\xaf"}]}'),
        says="UTF-8",
    ),
    Attack("a NUL after it", raw(BODY + b"\x00")),
    Attack(
        "duplicates, compact", raw(b'{"model":"demo","messages":[],"model":"demo"}'), param="model"
    ),
    Attack(
        "duplicates, other value",
        raw(b'{"model":"dear","messages":[],"model":"demo"}'),
        param="model",
    ),
    Attack(
        "duplicates, spread out",
        raw(b'{ "model" : "demo",\n "messages": [],\t"model":\r\n"demo" }'),
        param="model",
    ),
    Attack(
        "duplicates, name escaped",
        raw(rb'{"model":"demo","messages":[],"mod\u0065l":"demo"}'),
        param="model",
    ),
    Attack(
        "duplicates, both escaped",
        raw(rb'{"mode\u006c":"a","messages":[],"mod\u0065l":"demo"}'),
        param="model",
    ),
    Attack(
        "duplicates, first longer", raw(b'{"n":12,"model":"demo","messages":[],"n":1}'), param="n"
    ),
    Attack(
        "duplicates, first an object",
        raw(b'{"messages":{"messages":[]},"model":"demo","messages":[]}'),
        param="messages",
    ),
    Attack(
        "duplicates around a nested one",
        raw(b'{"model":"demo","a":{"b":1},"messages":[],"a":{"b":1}}'),
        param="a",
    ),
    Attack(
        "duplicates with blanks for the name",
        raw(b'{"model":"demo","messages":[],"":1, "":2}'),
        param="",
    ),
    Attack("a model that is no text", chat(model=["demo"]), param="model"),
    Attack("no messages", raw(b'{"model":"demo"}'), param="messages"),
    Attack("n = 16384", chat(n=16384), param="n"),
    Attack("best_of = 16384", chat(best_of=16384), param="best_of"),
    Attack("n is no integer", chat(n="2.5"), param="n"),
    Attack(
        "a million prompts",
        lambda: post(
            b'{"model":"demo","prompt":[' + b'"a",' * 999_999 + b'"a"]}', "/v1/completions"
        ),
        param="prompt",
        says="sequences",
    ),
    Attack(
        "257 prompts",
        post({"model": MODEL, "prompt": ["a"] * 257}, "/v1/completions"),
        param="prompt",
    ),
    Attack(
        "100 prompts, n = 3",
        post({"model": MODEL, "prompt": [[1]] * 100, "n": 3}, "/v1/completions"),
    ),
    Attack("max_tokens = 2^31", chat(max_tokens=2**31), param="max_tokens"),
    Attack(
        "max_completion_tokens = -1", chat(max_completion_tokens=-1), param="max_completion_tokens"
    ),
    Attack("10,000 stop strings", chat(stop=["stop"] * 10_000), param="stop"),
    Attack(
        "a huge logit_bias", chat(logit_bias={str(i): 1 for i in range(50_000)}), param="logit_bias"
    ),
    Attack(
        "an answer longer than the context", chat(max_tokens=5000), code="context_length_exceeded"
    ),
    Attack(
        "CRLF in the model's name",
        chat(model="demo\r\nX-Evil: 1\r\n\r\n"),
        404,
        "model_not_found",
        "model",
    ),
    Attack("an unknown model of 1 MiB", chat(model="x" * 2**20), 404, "model_not_found", "model"),
    Attack("the model's name in other case", chat(model="DEMO"), 404, "model_not_found", "model"),
]

SIZE_ATTACKS = [
    Attack("Content-Length of 1 GB", head("Content-Length: 1000000000"), 413, TOO_BIG),
    Attack(
        "Content-Length of 1 GB, and Expect",
        head("Content-Length: 1000000000", "Expect: 100-continue"),
        413,
        TOO_BIG,
    ),
    Attack(
        "Content-Length one over the limit", head(f"Content-Length: {32 * 2**20 + 1}"), 413, TOO_BIG
    ),
    Attack(
        "40 MiB in chunks",
        lambda: chunked((b"100000\r\n" + b" " * 2**20 + b"\r\n") * 40 + b"0\r\n\r\n"),
        413,
        TOO_BIG,
    ),
    Attack(
        "1.2 million chunks of one byte",
        lambda: chunked(b"1\r\n \r\n" * 1_200_000 + b"0\r\n\r\n"),
        413,
        TOO_BIG,
    ),
    Attack(
        "a gzip bomb",
        lambda: raw(gzip.compress(bytes(20 * 2**20)), "Content-Encoding: gzip"),
        415,
        "unsupported_media_type",
    ),
    Attack("honest deflate", raw(BODY, "Content-Encoding: deflate"), 415, "unsupported_media_type"),
    Attack(
        "an encoding nobody knows",
        raw(BODY, "Content-Encoding: zstd, gzip"),
        415,
        "unsupported_media_type",
    ),
    Attack(
        "a header of 9 KB", head("X-Long: " + "a" * 9000, LENGTH) + BODY, 431, "headers_too_large"
    ),
    Attack(
        "a header name of 9 KB", head("X" * 9000 + ": a", LENGTH) + BODY, 431, "headers_too_large"
    ),
    Attack(
        "300 headers",
        head(*(f"X-{i}: a" for i in range(300)), LENGTH) + BODY,
        431,
        "headers_too_large",
    ),
    Attack(
        "a head of 70 KB",
        head(*(f"X-{i}: {'a' * 7000}" for i in range(10)), LENGTH) + BODY,
        431,
        "headers_too_large",
    ),
    Attack(
        "a URI of 20 KB",
        head(LENGTH, start=f"POST {PATH}?{'a' * 20_000} HTTP/1.1") + BODY,
        414,
        "uri_too_long",
    ),
    Attack(
        "Expect that is no 100-continue", raw(BODY, "Expect: 200-ok"), 417, "expectation_failed"
    ),
    Attack("the same before the body", head("Expect: 200-ok", LENGTH), 417, "expectation_failed"),
    Attack(
        "the same on an unknown path",
        post(BODY, "/v1/x", "Expect: 200-ok"),
        417,
        "expectation_failed",
    ),
]

PATH_ATTACKS = [
    Attack("GET on the line", head(start=f"GET {PATH} HTTP/1.1"), 405, "method_not_allowed"),
    Attack(
        "PUT on the line",
        head(LENGTH, start=f"PUT {PATH} HTTP/1.1") + BODY,
        405,
        "method_not_allowed",
    ),
    Attack("POST on the root", post(BODY, "/"), 405, "method_not_allowed"),
    Attack("POST on the models", post(BODY, "/v1/models"), 405, "method_not_allowed"),
    Attack(
        "DELETE of a model",
        head(start="DELETE /v1/models/demo HTTP/1.1"),
        405,
        "method_not_allowed",
    ),
    Attack("OPTIONS", head(start=f"OPTIONS {PATH} HTTP/1.1"), 405, "method_not_allowed"),
    Attack(
        "an unknown model by GET",
        head(start="GET /v1/models/nope HTTP/1.1"),
        404,
        "model_not_found",
        "model",
    ),
    *(
        Attack(f"path {path}", post(BODY, path), 404, "unknown_url")
        for path in (
            "/v1",
            "/v1/chat",
            "/v1/chat/completions/",
            "//v1/chat/completions",
            "/V1/chat/completions",
            "/v1/%2e%2e/admin",
            "/v1%2fchat/completions",
            "/v1/../v1/chat/completions",
            "/v1/chat/completions;a=b",
            "/v1/chat/completions%00",
            "/v1/embeddings/",
            "/pause",
            "/collective_rpc",
            "/metrics",
            "/config",
            "/healthz",
            "/%ff%fe",
        )
    ),
]

FRAMING_ATTACKS = [
    Attack("CL.TE", head(LENGTH, "Transfer-Encoding: chunked") + IN_CHUNKS),
    Attack("TE.CL", head("Transfer-Encoding: chunked", "Content-Length: 4") + IN_CHUNKS),
    Attack("two Content-Lengths, equal", head(LENGTH, LENGTH) + BODY),
    Attack("two Content-Lengths, different", head("Content-Length: 1", LENGTH) + BODY),
    Attack("Content-Length: 5, 5", head("Content-Length: 5, 5") + b"hello"),
    Attack("Content-Length: +5", head("Content-Length: +5") + b"hello"),
    Attack("Content-Length: -5", head("Content-Length: -5") + b"hello"),
    Attack("Content-Length: 0x5", head("Content-Length: 0x5") + b"hello"),
    Attack("Content-Length: 5 5", head("Content-Length: 5 5") + b"hello"),
    Attack("Content-Length of 30 digits", head("Content-Length: " + "9" * 30) + b"hello"),
    Attack("empty Content-Length", head("Content-Length: ") + b"hello"),
    Attack("Transfer-Encoding: xchunked", head("Transfer-Encoding: xchunked") + IN_CHUNKS),
    Attack(
        "Transfer-Encoding: gzip, chunked",
        head("Transfer-Encoding: gzip, chunked") + IN_CHUNKS,
        501,
        "not_implemented",
    ),
    Attack(
        "gzip, chunked on another path",
        head("Transfer-Encoding: gzip, chunked", start="POST /v1/x HTTP/1.1") + IN_CHUNKS,
        501,
        "not_implemented",
    ),
    Attack("Transfer-Encoding: gzip", head("Transfer-Encoding: gzip") + IN_CHUNKS),
    Attack(
        "Transfer-Encoding: chunked, identity",
        head("Transfer-Encoding: chunked, identity") + IN_CHUNKS,
    ),
    Attack("Transfer-Encoding: \\x0bchunked", head("Transfer-Encoding: \x0bchunked") + IN_CHUNKS),
    Attack(
        "Transfer-Encoding twice",
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + IN_CHUNKS,
    ),
    Attack("obs-fold", head("X-Folded: a", " b", LENGTH) + BODY),
    Attack("a blank before the colon", head(f"Content-Length : {len(BODY)}") + BODY),
    Attack("a blank before the name", head(" X: a", LENGTH) + BODY),
    Attack("a header without colon", head("X-Nothing", LENGTH) + BODY),
    Attack("NUL in a header", head("X: a\x00b", LENGTH) + BODY),
    Attack("bare CR in a header", head("X: a\rb", LENGTH) + BODY),
    Attack("bare LF line ends", head(LENGTH).replace(b"\r\n", b"\n") + BODY),
    Attack("negative chunk size", chunked(b"-1\r\nx\r\n0\r\n\r\n")),
    Attack("chunk size with 0x", chunked(b"0x5\r\nhello\r\n0\r\n\r\n")),
    Attack("chunk size beyond 64 bits", chunked(b"fffffffffffffffff\r\nhello\r\n")),
    Attack("chunk without CRLF", chunked(b"5\r\nhelloXX0\r\n\r\n")),
    Attack("LF in a chunk extension", chunked(b"5;a\nb\r\nhello\r\n0\r\n\r\n")),
    Attack("no Host", head(LENGTH, host=None) + BODY),
    Attack("two Hosts", head("Host: other", LENGTH) + BODY),
    Attack("CONNECT", head(start="CONNECT 127.0.0.1:22 HTTP/1.1")),
    Attack("a TLS hello", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(range(160))),
    Attack("HTTP/3.7", head(LENGTH, start=f"POST {PATH} HTTP/3.7") + BODY),
    Attack("HTTP/0.9", b"GET /\r\n\r\n"),
    Attack("HTTP/0.9 on the line", head(LENGTH, start=f"POST {PATH} HTTP/0.9") + BODY),
    Attack("HTTP/2.0 without a preface", head(LENGTH, start=f"POST {PATH} HTTP/2.0") + BODY),
    Attack("no method", head(LENGTH, start=f"{PATH} HTTP/1.1") + BODY),
    Attack("blanks in the path", head(LENGTH, start="POST /v1/chat /completions HTTP/1.1") + BODY),
]

ATTACKS = JSON_ATTACKS + SIZE_ATTACKS + PATH_ATTACKS + FRAMING_ATTACKS
