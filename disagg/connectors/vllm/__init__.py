"""A KV connector for vLLM."""
