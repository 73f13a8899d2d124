"""The endpoints that speak OpenAI's language, with vLLM's extensions."""
