"""The table of translations: which APIs can be served through another API, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from gateway.protocol.api_table import (
    CHAT,
    COUNT_TOKENS,
    INPUT_TOKENS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Api,
)
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.request_body import CallContext, ModelInfo, parse_call
from gateway.protocol.translate import (
    messages_answer,
    messages_request,
    responses_answer,
    responses_request,
    token_counts,
)
from gateway.protocol.translate.messages_answer import MessagesStream
from gateway.protocol.translate.responses_stream import ResponsesStream
from gateway.protocol.translate.translator import AnswerTranslator

NewTranslator = Callable[[], AnswerTranslator]
"""A function that creates the translator of one attempt's answer."""


class Translation(msgspec.Struct, frozen=True):
    """The functions that translate requests and answers of one API to and from another API.

    target       the API by which engines are called
    request      translates the body; raises GatewayError (400) with the name of a member
    answers      called with a request body, the client's name of the model and the expected number
                 of prompt tokens; returns a factory that creates one translator per attempt
    lost_member  returns the member of a body that is lost in translation, "" if there is none;
                 raises GatewayError for an invalid body
    """

    target: Api
    request: Callable[[bytes], bytes]
    answers: Callable[[bytes, str, int], NewTranslator]
    lost_member: Callable[[bytes], str] = lambda body: ""


def _messages(body: bytes, model: str, prompt_tokens: int) -> NewTranslator:
    whole = partial(messages_answer.from_chat, model=model)
    return lambda: AnswerTranslator(whole, MessagesStream(model, prompt_tokens))


def _responses(body: bytes, model: str, prompt_tokens: int) -> NewTranslator:
    echoed = responses_answer.echo(body)
    whole = partial(responses_answer.from_chat, model=model, echoed=echoed)
    return lambda: AnswerTranslator(whole, ResponsesStream(model, echoed))


def _count(
    count_of: Callable[[bytearray], bytes], body: bytes, model: str, prompt_tokens: int
) -> NewTranslator:
    return lambda: AnswerTranslator(lambda answer: iter((count_of(answer),)))


TRANSLATIONS: Mapping[str, Translation] = MappingProxyType(
    {
        MESSAGES.path: Translation(
            CHAT, messages_request.to_chat, _messages, messages_request.lost_member
        ),
        COUNT_TOKENS.path: Translation(
            TOKENIZE,
            token_counts.messages_to_tokenize,
            partial(_count, token_counts.messages_count),
        ),
        RESPONSES.path: Translation(
            CHAT, responses_request.to_chat, _responses, responses_request.lost_member
        ),
        INPUT_TOKENS.path: Translation(
            TOKENIZE,
            token_counts.responses_to_tokenize,
            partial(_count, token_counts.responses_count),
        ),
    }
)
"""The translations by the path of the client's API."""


NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "messages": (MESSAGES.path, COUNT_TOKENS.path),
        "responses": (RESPONSES.path,),
    }
)
"""The names of translated APIs in the configuration, with the paths that engines have or lack."""


def is_translated(call: Call, lacking: Set[str]) -> bool:
    """Return whether a request has to be served through another API.

    `lacking` has the paths that the engines do not serve. A request with a cache salt is also
    translated if engines accept no salt on its path. Otherwise, isolated tenants would share a
    prefix cache.
    """
    return call.api.path in lacking or (call.salt != b"" and not call.api.takes_salt)


def translated(call: Call, model: ModelInfo, context: CallContext) -> tuple[Call, NewTranslator]:
    """Return the request translated to the engines' API, and a factory of answer translators.

    The session and the model's name are taken from the client's own body. Raises GatewayError for a
    request that cannot be translated.
    """
    translation, request = TRANSLATIONS.get(call.api.path), call.request
    if translation is None:
        message = (
            f"Engines accept no cache salt on {call.api.path}, so requests of isolated tenants and "
            "those with a 'cache_salt' cannot be served there. Use another API."
        )
        raise GatewayError(Failure.BAD_REQUEST, message, param="cache_salt")
    preferences = replace(
        context.preferences,
        session=request.session,
        session_source=request.session_source,
        session_hints=request.session_hints,
    )
    context = replace(context, preferences=preferences)
    body = translation.request(call.body)
    # The body has the model's own name by now, which the client's key need not be valid for.
    other = parse_call(body, translation.target, {request.model: model}, context)
    other.requested_model = call.requested_model
    expected = other.request.prompt_tokens
    return other, translation.answers(call.body, call.requested_model, expected)


def translated_losslessly(
    call: Call, model: ModelInfo, context: CallContext, *, stores_answers: bool
) -> tuple[Call, NewTranslator] | str:
    """Translate a request to the engines' API, but only if the translation loses nothing.

    Returns the result of translated(), or the name of a member that the translation would lose.

    stores_answers  whether an engine may store the answer to this request for later ones
    """
    try:
        lost = TRANSLATIONS[call.api.path].lost_member(call.body)
        if lost and (lost != "store" or stores_answers):
            return lost
        return translated(call, model, context)
    except GatewayError as error:
        return error.param or "body"


def translated_paths(
    native: Sequence[str] | None, is_lacking: Callable[[str], bool]
) -> frozenset[str]:
    """Return the paths whose requests have to be translated for the engines of a pool.

    native      configured names of the APIs that the engines serve; None: not configured
    is_lacking  function that returns whether an engine of the pool is known not to serve a path
    """
    lacking = {
        path
        for name, paths in NAMES.items()
        if (name not in native if native is not None else any(map(is_lacking, paths)))
        for path in paths
    }
    if RESPONSES.path in lacking or is_lacking(INPUT_TOKENS.path):
        lacking.add(INPUT_TOKENS.path)  # hardly any engine has it
    return frozenset(lacking)
