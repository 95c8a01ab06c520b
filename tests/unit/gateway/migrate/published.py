"""Option names of other routers, from their documentation."""

from __future__ import annotations


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


VLLM_ROUTER = _names(
    """
host port max-payload-size request-timeout-secs max-concurrent-requests queue-size
queue-timeout-secs rate-limit-tokens-per-second cors-allowed-origins worker-startup-timeout-secs
worker-startup-check-interval intra-node-data-parallel-size backend runtime mini-lb enable-igw
history-backend profile policy prefill-policy decode-policy cache-threshold balance-abs-threshold
balance-rel-threshold eviction-interval eviction-interval-secs max-tree-size kv-connector
vllm-discovery-address enable-program-scheduling program-scheduling-config-json selector
service-discovery-port service-discovery-namespace prefill-selector decode-selector
retry-max-retries retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier
retry-jitter-factor disable-retries cb-failure-threshold cb-success-threshold
cb-timeout-duration-secs cb-window-duration-secs disable-circuit-breaker health-failure-threshold
health-success-threshold health-check-timeout-secs health-check-interval-secs
health-check-endpoint log-dir log-level prometheus-port prometheus-host request-id-headers api-key
"""
)

SMG = _names(
    """
host port policy prefill-policy decode-policy cache-threshold balance-abs-threshold
balance-rel-threshold bucket-adjust-interval-secs eviction-interval-secs max-tree-size
max-idle-secs assignment-mode max-payload-size dp-aware enable-igw worker-startup-timeout-secs
worker-startup-check-interval load-monitor-interval log-dir log-level log-json selector
service-discovery-port service-discovery-namespace prefill-selector decode-selector
prometheus-port prometheus-host prometheus-duration-buckets request-id-headers
request-timeout-secs shutdown-grace-period-secs cors-allowed-origins max-concurrent-requests
queue-size queue-timeout-secs rate-limit-tokens-per-second retry-max-retries
retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier retry-jitter-factor
disable-retries cb-failure-threshold cb-success-threshold cb-timeout-duration-secs
cb-window-duration-secs disable-circuit-breaker health-failure-threshold health-success-threshold
health-check-timeout-secs health-check-interval-secs health-check-endpoint disable-health-check
model-path tokenizer-path chat-template served-model-name tokenizer-cache-enable-l0
tokenizer-cache-l0-max-entries reasoning-parser tool-call-parser mcp-config-path backend
storage-hook-wasm-path history-backend oracle-wallet-path postgres-db-url redis-url
client-cert-path client-key-path ca-cert-paths server-cert-path enable-trace otlp-traces-endpoint
control-plane-api-keys jwt-issuer api-key
"""
)

PRODUCTION_STACK = _names(
    """
host port k8s-service-discovery-type static-aliases static-model-types static-model-labels
static-backend-health-checks k8s-port k8s-namespace k8s-label-selector k8s-watcher-timeout-seconds
backend-health-check-timeout-seconds routing-logic lmcache-controller-port session-key callbacks
request-rewriter enable-batch-api file-storage-class file-storage-path batch-processor
engine-stats-interval request-stats-window log-stats log-stats-interval dynamic-config-yaml
feature-gates log-level sentry-dsn sentry-traces-sample-rate otel-endpoint otel-service-name
otel-secure prefill-model-labels decode-model-labels kv-aware-threshold
lmcache-health-check-interval lmcache-worker-timeout
"""
)

FLAGS = _names(
    """mini-lb enable-igw profile enable-program-scheduling disable-retries disable-circuit-breaker
    dp-aware log-json disable-health-check tokenizer-cache-enable-l0 enable-trace log-stats
    static-backend-health-checks enable-batch-api otel-secure"""
)

VALUES = {
    "cors-allowed-origins": "https://app.example.com",
    "host": "10.0.0.9",
    "port": "7000",
    "policy": "power_of_two",
    "prefill-policy": "round_robin",
    "decode-policy": "round_robin",
    "backend": "trtllm",
    "runtime": "trtllm",
    "routing-logic": "prefixaware",
    "log-level": "debug",
    "api-key": "sk-secret-of-the-engine",
    "prometheus-host": "0.0.0.0",
    "health-check-endpoint": "/ready",
    "static-aliases": "alias:example/large",
    "otlp-traces-endpoint": "collector:4317",
    "otel-endpoint": "collector:4317",
    "kv-connector": "mooncake",
    "selector": "app=engine",
    "cache-threshold": "0.7",
}
