"""vLLM as an engine behind the port of ours."""
