#!/bin/bash
# Engines start first.
sleep 5
vllm-router \
  --host 0.0.0.0 --port 30000 \
  --policy consistent_hash \
  --worker-urls http://10.1.0.11:8000 http://10.1.0.12:8000@0 http://10.1.0.13:8000/v1 \
  --api-key "$VLLM_KEY" \
  --max-payload-size 268435456 \
  --queue-size 64 --queue-timeout-secs 20 \
  --request-timeout-secs 900 \
  --retry-max-retries 4 --retry-initial-backoff-ms 100 \
  --cb-failure-threshold 8 --health-failure-threshold 3 --cb-timeout-duration-secs 30 \
  --health-check-endpoint /ping --health-check-interval-secs 10 \
  --prometheus-host 0.0.0.0 --prometheus-port 29000 \
  --max-tree-size 1000 --cache-threshold 0.4 --log-level warn \
  --request-id-headers x-request-id x-trace-id # the end
