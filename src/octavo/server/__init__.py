"""The HTTP server: OpenAI's endpoints, protection, and the life of the process."""
