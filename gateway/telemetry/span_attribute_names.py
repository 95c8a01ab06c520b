"""The names of trace span attributes: OpenTelemetry's semantic conventions, and the gateway's own.

The conventions for generative AI and HTTP are still in development and may change. Therefore no
other module contains attribute names.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
STATUS = "http.response.status_code"
METHOD = "http.request.method"
ROUTE = "http.route"
ERROR = "error.type"

REQUEST_ID = "penstock.request_id"
OUTCOME = "penstock.outcome"
REASON = "penstock.reason"
TENANT = "penstock.tenant"
CLASS = "penstock.slo.class"
SLO_OUTCOME = "penstock.slo.outcome"
BUDGET_TTFT = "penstock.slo.ttft_s"
BUDGET_TPOT = "penstock.slo.tpot_s"
TTFT = "penstock.ttft_s"
TPOT = "penstock.tpot_s"
PREDICTED_TTFT = "penstock.predicted.ttft_s"
PREDICTED_TPOT = "penstock.predicted.tpot_s"
ENDPOINT = "penstock.endpoint"
ROLE = "penstock.role"
POLICY = "penstock.policy"
SCORE = "penstock.score"
CANDIDATES = "penstock.candidates"
BELIEVED_CACHED = "penstock.believed_cached_tokens"
RETRIES = "penstock.retries"
SPLIT_REASON = "penstock.split.reason"
DIALECT = "penstock.split.dialect"
TRANSPORT = "penstock.split.transport"
