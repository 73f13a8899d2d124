"""The models on this machine's disk, for the commands and pages that people use."""

from __future__ import annotations

from octavo.weights.locate import ModelFiles, locate
from octavo.weights.manage import StoredModel, list_models, pull, remove
from octavo.weights.progress import RichProgress

__all__ = ["ModelFiles", "RichProgress", "StoredModel", "list_models", "locate", "pull", "remove"]
