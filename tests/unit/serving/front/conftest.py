"""What several files of this folder are given: a service, a client without a network, an address, stored responses.
Some files have a `served`, a `client` or a `url` of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService, client_of, http_server, local_service
from tests.unit.serving.responses_client import Served, served_responses


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LocalService]:
    async with local_service(tmp_path) as service:
        yield service


@pytest.fixture
async def client(service: LocalService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_http_app(lambda: service, metrics=service.metrics)) as client:
        yield client


@pytest.fixture
async def url(service: LocalService) -> AsyncIterator[str]:
    async with http_server(create_http_app(lambda: service)) as url:
        yield url


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with served_responses(tmp_path) as served:
        yield served
