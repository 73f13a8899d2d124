"""Which endpoints a server has, besides health and admin. A new file of them is one row here."""

from __future__ import annotations

from fastapi import APIRouter

from octavo.server import scrape
from octavo.server.openai import chat, completions, models, tokens


def routers() -> tuple[APIRouter, ...]:
    """In the order of the API's description."""
    return (completions.router, chat.router, models.router, tokens.router, scrape.router)
