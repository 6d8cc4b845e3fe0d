"""OpenAI's and Anthropic's own clients, and a plain one, at an address or for a service that is served as long as they
are. They load no certificates: that takes 24 ms of CPU time for each, and nothing here is encrypted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai

from serving.front.api.service import TurnService
from serving.front.http import create_http_app
from tests.unit.serving.local_service import http_server


def http_at(url: str, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, verify=False, **options)


def openai_at(url: str, key: str = "none", *, max_retries: int = 0) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=max_retries, http_client=http)


def anthropic_at(url: str, key: str = "none", *, max_retries: int = 0) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=max_retries, http_client=http)


@asynccontextmanager
async def openai_of(service: TurnService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with http_server(create_http_app(service)) as url, openai_at(url) as client:
        yield client


@asynccontextmanager
async def anthropic_of(service: TurnService) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with http_server(create_http_app(service)) as url, anthropic_at(url) as client:
        yield client
