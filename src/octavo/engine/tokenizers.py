"""Which tokenizer a configuration asks for. No torch: a server's own process loads it too."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.locate import ModelFiles, locate, locate_tokenizer


def tokenizer_of(config: EngineConfig, files: ModelFiles | None = None) -> Tokenizer | None:
    """The tokenizer of `--tokenizer`, or the model's own; None under `skip_tokenizer_init`. files:
    the model's, where they were located already. Raises `ModelError` for one that cannot be used.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(locate_tokenizer(config.tokenizer))
    if files is None:
        files = locate(config.model, config.revision, config.load_format)
    return load_tokenizer(files.tokenizer)
