"""Finding, reading and loading a model's weights: hub, caches, safetensors, GGUF, dummy."""
