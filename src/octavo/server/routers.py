"""Which endpoints a server has, besides health and admin. A new file of them is one row here."""

from __future__ import annotations

from fastapi import APIRouter

from octavo.dashboard import app as dashboard
from octavo.server import scrape
from octavo.server.anthropic import endpoint as messages
from octavo.server.config import ServeConfig
from octavo.server.openai import chat, completions, models, tokens
from octavo.server.responses import endpoint as responses


def routers(config: ServeConfig) -> tuple[APIRouter, ...]:
    """In the order of the API's description."""
    found = (
        completions.router, chat.router, responses.router, messages.router, models.router,
        tokens.router, scrape.router,
    )  # fmt: skip
    return (*found, dashboard.router) if config.dashboard else found
