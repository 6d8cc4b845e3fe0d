"""OpenAI's and Anthropic's own clients, at an address or for a service that is served as long as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai

from serving.front.api.service import TurnService
from serving.front.http import create_http_app
from tests.unit.serving.local_service import http_server


def openai_at(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def anthropic_at(url: str, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


@asynccontextmanager
async def openai_of(service: TurnService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with http_server(create_http_app(lambda: service)) as url, openai_at(url) as client:
        yield client


@asynccontextmanager
async def anthropic_of(service: TurnService) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with http_server(create_http_app(lambda: service)) as url, anthropic_at(url) as client:
        yield client
