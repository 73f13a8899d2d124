"""A load generator for any OpenAI-compatible server: what its clients see."""
