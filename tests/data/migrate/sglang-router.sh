python -m sglang_router.launch_router --pd-disaggregation \
  --prefill http://10.2.0.1:30001 8998 --prefill http://10.2.0.2:30001 8998 \
  --decode http://10.2.0.3:30011 \
  --policy cache_aware --cache-threshold 0.5 --balance-abs-threshold 32 --balance-rel-threshold 1.1 \
  --host 0.0.0.0 --port 8000 --log-level info --log-json --disable-circuit-breaker \
  --tool-call-parser qwen --history-backend memory --shutdown-grace-period-secs 120
