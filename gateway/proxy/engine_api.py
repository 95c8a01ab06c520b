"""Chooses the API by which an engine is called: the client's API, or chat completions.

Engines can transfer KV between prefill and decode, and report token ids, only for chat completions
and completions. If a model's requests are split or resumed, requests of other APIs are therefore
sent as chat completions, provided that the translation loses nothing.
"""

from __future__ import annotations

from gateway.protocol.api_table import RESPONSES
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.request_body import CallContext
from gateway.protocol.response.resume_eligibility import continuation_terms
from gateway.protocol.translate.translation_table import (
    TRANSLATIONS,
    is_translated,
    translated,
    translated_losslessly,
)
from gateway.proxy.stored_responses import may_store
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway, Route


def call_for_engines(
    gateway: Gateway, exchange: Exchange, route: Route, call: Call, context: CallContext
) -> Call:
    """Return the request in the API by which engines are called; it may have to be translated.

    If so, a translator of the answer is stored on the exchange. Raises GatewayError if the request
    must be translated but cannot be, or if no engine serves its API.
    """
    path = call.api.path
    if path in route.unserved:
        text = f"No engine of the model {call.requested_model!r} serves {path}."
        raise GatewayError(Failure.NOT_FOUND, text)
    if is_translated(call, route.translated):
        lacks = path in route.translated
        exchange.translation_reason = "engines lack the API" if lacks else "cache salt"
        call, exchange.new_translator = translated(call, route, context)
        return call
    purpose = "split" if route.split is not None else "resume" if route.resume is not None else ""
    if not purpose or not call.api.generates or path not in TRANSLATIONS:
        return call
    stores = call.api is RESPONSES and may_store(gateway, route)
    result = translated_losslessly(call, route, context, stores_answers=stores)
    if isinstance(result, str):
        exchange.translation_reason = f"not translated: {result}"
        return call
    chat, new_translator = result
    if purpose == "resume" and continuation_terms(chat) is None:
        exchange.translation_reason = "not translated: its answer could not be resumed"
        return call
    exchange.translation_reason, exchange.new_translator = purpose, new_translator
    return chat
