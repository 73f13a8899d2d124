"""OpenAI's Responses API: text in, text out, nothing stored."""
