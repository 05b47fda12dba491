"""vLLM as an actor: its weights follow a run in place. Only this package imports vllm."""
