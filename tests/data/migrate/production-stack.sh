vllm-router --port 8001 --service-discovery static \
  --static-backends http://10.3.0.1:8000,http://10.3.0.2:8000,http://10.3.0.3:8000 \
  --static-models Qwen/Qwen3-8B,Qwen/Qwen3-8B,example/small \
  --static-aliases "chat:Qwen/Qwen3-8B" \
  --routing-logic session --session-key x-user-id \
  --engine-stats-interval 15 --request-stats-window 60 --log-stats --static-backend-health-checks \
  --static-model-types chat,chat,chat
