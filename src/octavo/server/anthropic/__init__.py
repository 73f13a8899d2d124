"""Anthropic's Messages API: text in, text out."""
