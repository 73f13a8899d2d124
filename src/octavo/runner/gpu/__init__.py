"""The runner on a GPU: one upload a step, recorded decodes, results that nobody waits for."""
