vllm-router --vllm-pd-disaggregation --kv-connector mooncake \
  --prefill http://10.1.0.21:8000 9100 --prefill http://10.1.0.22:8000 none \
  --decode http://10.1.0.31:8000 --decode http://10.1.0.32:8000 \
  --prefill-policy cache_aware --decode-policy power_of_two
