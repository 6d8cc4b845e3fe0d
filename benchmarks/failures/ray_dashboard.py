"""A client of Ray's dashboard, which may require the token of the user who started the cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

TIMEOUT_S = 60.0


def open_dashboard(url: str) -> httpx.AsyncClient:
    """Opens the dashboard with the user's token. A cluster without tokens ignores it."""
    ray = Path(sys.executable).with_name("ray")
    told = subprocess.run([ray, "get-auth-token"], check=False, capture_output=True, text=True)
    token = told.stdout.strip()
    return httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, headers={"authorization": f"Bearer {token}"} if token else {}
    )
