"""Calls of tools in the text of models: found, and told apart from what is said beside them."""
