"""The table of HTTP APIs: one Api value for each path that clients call and engines serve.

Every difference between two APIs is a field of this value. Therefore the code that serves requests
has no branches for single APIs. request/request_body.py parses bodies, and request/request_head.py
parses heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gateway.protocol import error_formats
from gateway.protocol.error_formats import ErrorFormat
from gateway.protocol.request.json_members import read_members
from gateway.protocol.request.multipart import read_form
from gateway.protocol.response import event_grammar
from gateway.protocol.response.event_grammar import EventGrammar

MAX_INPUTS = 2048
"""Maximum number of inputs in a request that generates no text, such as a list for embeddings; as
in OpenAI's API.
"""


class Api(msgspec.Struct, frozen=True, eq=False):
    """The description of one API. Values are compared by identity.

    path           path of the API at clients and engines, without a query
    operation      first word of the root trace span's name (attribute gen_ai.operation.name)
    conversation   the required body member that contains the prompt, or the last part of it
    prompt         the members that contain the prompt, in the order in which an engine renders them
    alternatives   members that may replace `conversation`
    output_limit   the member that limits the answer's tokens; `max_tokens` is accepted as well
    generates      whether the answer is generated text, which has an expected length and may be a
                   stream
    is_admitted    whether the engine computes tokens, so that admission control may queue or reject
                   the request
    lists_prompts  whether `conversation` may be a list of independent prompts
    max_prompts    maximum number of prompts in that list; None: what the model allows
    can_split      whether prefill and decode may run at different endpoints
    can_resume     whether another endpoint may continue a broken stream
    errors         the format of its error responses and error events
    grammar        the events of its streams; None: those of chat completions
    keeps_answers  whether an engine may store the answer for later requests, which need that engine
    takes_salt     whether engines that accept cache salts accept one on this path too
    is_form        whether bodies are forms (multipart/form-data)
    is_plain       whether bodies are JSON, and streams have the events of chat completions
    read           function that returns the members of a body as raw JSON; raises GatewayError
    method         the HTTP method of its requests
    """

    path: str
    operation: str
    conversation: str
    prompt: tuple[str, ...]
    alternatives: frozenset[str] = frozenset()
    output_limit: str = "max_completion_tokens"
    generates: bool = False
    is_admitted: bool = True
    lists_prompts: bool = False
    max_prompts: int | None = None
    can_split: bool = False
    can_resume: bool = False
    errors: ErrorFormat = error_formats.OPENAI
    grammar: EventGrammar | None = None
    keeps_answers: bool = False
    takes_salt: bool = True
    is_form: bool = False
    is_plain: bool = True
    read: Callable[[bytes], dict[str, msgspec.Raw]] = read_members
    method: str = "POST"


CHAT = Api(
    "/v1/chat/completions",
    "chat",
    "messages",
    ("chat_template", "chat_template_kwargs", "tools", "documents", "messages"),
    generates=True,
    can_split=True,
    can_resume=True,
)
COMPLETIONS = Api(
    "/v1/completions",
    "text_completion",
    "prompt",
    ("prompt_embeds", "prompt"),
    alternatives=frozenset(("prompt_embeds",)),
    generates=True,
    lists_prompts=True,
    can_split=True,
    can_resume=True,
)


MESSAGES = Api(
    "/v1/messages",
    "chat",
    "messages",
    ("chat_template_kwargs", "tools", "system", "messages"),
    output_limit="max_tokens",
    generates=True,
    errors=error_formats.ANTHROPIC,
    grammar=event_grammar.MESSAGES,
    is_plain=False,
    takes_salt=False,
)
COUNT_TOKENS = Api(
    "/v1/messages/count_tokens",
    "count_tokens",
    "messages",
    ("tools", "system", "messages"),
    is_admitted=False,
    errors=error_formats.ANTHROPIC,
    grammar=event_grammar.MESSAGES,
    is_plain=False,
)
RESPONSES = Api(
    "/v1/responses",
    "chat",
    "input",
    ("chat_template_kwargs", "tools", "instructions", "input"),
    output_limit="max_output_tokens",
    generates=True,
    errors=error_formats.RESPONSES,
    grammar=event_grammar.RESPONSES,
    is_plain=False,
    keeps_answers=True,
)
INPUT_TOKENS = Api(
    "/v1/responses/input_tokens",
    "count_tokens",
    "input",
    ("chat_template_kwargs", "tools", "instructions", "input"),
    is_admitted=False,
    errors=error_formats.RESPONSES,
    grammar=event_grammar.RESPONSES,
    is_plain=False,
)


def _stored(path: str, operation: str, method: str) -> Api:
    # Return the Api for requests about a response that an engine stores.
    #
    # A request about a stored response has neither a model nor a prompt.
    return Api(
        path,
        operation,
        "",
        (),
        is_admitted=False,
        errors=error_formats.RESPONSES,
        grammar=event_grammar.RESPONSES,
        is_plain=False,
        method=method,
    )


def _inputs(path: str, operation: str) -> Api:
    # Return the Api of an endpoint that processes each text of `input`, such as embeddings.
    #
    # A chat in `messages` may replace `input`.
    return Api(
        path,
        operation,
        "input",
        ("input", "messages"),
        alternatives=frozenset(("messages",)),
        lists_prompts=True,
        max_prompts=MAX_INPUTS,
    )


def _rerank(path: str) -> Api:
    # Return the Api of an endpoint that scores each of `documents` for a `query`.
    return Api(
        path,
        "rerank",
        "documents",
        ("query", "documents"),
        lists_prompts=True,
        max_prompts=MAX_INPUTS,
    )


def _score(path: str) -> Api:
    # Return the Api of an endpoint that scores pairs of texts.
    #
    # Engines accept several names for the two members that contain the texts.
    first, second = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
    others = frozenset((*first, *second)) - {"text_2"}
    return Api(
        path,
        "score",
        "text_2",
        (*first, *second),
        alternatives=others,
        lists_prompts=True,
        max_prompts=MAX_INPUTS,
    )


def _audio(path: str, operation: str) -> Api:
    # Return the Api of an endpoint that transcribes or translates an audio recording.
    return Api(
        path,
        operation,
        "file",
        ("prompt", "file"),
        generates=True,
        is_form=True,
        is_plain=False,
        read=read_form,
    )


TRANSCRIPTIONS = _audio("/v1/audio/transcriptions", "transcription")
TRANSLATIONS = _audio("/v1/audio/translations", "translation")
EMBEDDINGS = _inputs("/v1/embeddings", "embeddings")
COHERE_EMBED = Api(
    "/v2/embed",
    "embeddings",
    "texts",
    ("texts", "images", "inputs"),
    alternatives=frozenset(("images", "inputs")),
    lists_prompts=True,
    max_prompts=MAX_INPUTS,
    takes_salt=False,
)
CLASSIFY = _inputs("/classify", "classify")
POOLING = _inputs("/pooling", "pooling")
MODERATIONS = _inputs("/v1/moderations", "moderation")
RERANK = _rerank("/v1/rerank")
SCORE = _score("/v1/score")
TOKENIZE = Api(
    "/tokenize",
    "tokenize",
    "prompt",
    ("prompt", "messages"),
    alternatives=frozenset(("messages",)),
    is_admitted=False,
)
DETOKENIZE = Api("/detokenize", "detokenize", "tokens", ("tokens",), is_admitted=False)

APIS: tuple[Api, ...] = (
    *(CHAT, COMPLETIONS, MESSAGES, COUNT_TOKENS, RESPONSES, INPUT_TOKENS),
    *(EMBEDDINGS, COHERE_EMBED, CLASSIFY, POOLING, MODERATIONS),
    *(RERANK, _rerank("/rerank"), _rerank("/v2/rerank")),
    *(SCORE, _score("/score")),
    *(TOKENIZE, DETOKENIZE, TRANSCRIPTIONS, TRANSLATIONS),
)
"""Every API whose requests are POSTs to a fixed path."""

STORED_PATH, CANCEL_PATH = "/v1/responses/{id}", "/v1/responses/{id}/cancel"
STORED_APIS: Mapping[tuple[str, str], Api] = {
    (api.method, api.path): api
    for api in (
        _stored(STORED_PATH, "get_response", "GET"),
        _stored(STORED_PATH, "delete_response", "DELETE"),
        _stored(CANCEL_PATH, "cancel_response", "POST"),
    )
}

API_PATHS: Mapping[str, Api] = {api.path: api for api in APIS}


def stored_api(method: str, path: str) -> Api | None:
    """Return the Api of a request about a stored response; None if the request is another one.

    `path` has no query.
    """
    rest = path.removeprefix("/v1/responses/")
    response_id, slash, action = rest.partition("/")
    if rest == path or not response_id or slash + action not in ("", "/cancel"):
        return None
    return STORED_APIS.get((method, CANCEL_PATH if slash else STORED_PATH))


PREAMBLE = frozenset(name for api in APIS for name in api.prompt) - frozenset(
    api.conversation for api in APIS if api.generates
)
"""Body members that an engine may render before the conversation, such as tools.

If a request has one of them, its prompt may not begin with the conversation.
"""

_NAMES_IN_PAGES = {path: f'"{path}"'.encode() for path in API_PATHS}


def api_paths(page: bytes) -> frozenset[str]:
    """Return the paths of known APIs that an engine's OpenAPI page mentions.

    The result is empty if the page does not mention chat completions. The page is searched as
    bytes. To decode its JSON would be slow, because it is large and is read from every engine.
    """
    paths = frozenset(path for path, name in _NAMES_IN_PAGES.items() if page.find(name) >= 0)
    return paths if CHAT.path in paths else frozenset()
