"""What several files of this folder are given: a service, its application, a client without a network, an address;
stored responses; a front end over replicas that a test can lose. Some files have a `served` or a `client` of their
own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from serving.front.http import create_http_app
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.local_service import LocalService, client_of, http_server, local_service
from tests.unit.serving.responses_client import Served, served_responses


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LocalService]:
    async with local_service(tmp_path) as service:
        yield service


@pytest.fixture
def app_options() -> dict[str, Any]:
    """For create_http_app. A file that tests an application with options has its own."""
    return {}


@pytest.fixture
def app(service: LocalService, app_options: dict[str, Any]) -> FastAPI:
    return create_http_app(service, metrics=service.metrics, **app_options)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    async with http_server(app) as url:
        yield url


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with served_responses(tmp_path) as served:
        yield served


@pytest.fixture
async def failover(tmp_path: Path) -> AsyncIterator[Failover]:
    async with running_failover(tmp_path) as failover:
        yield failover
        await failover.settled()
