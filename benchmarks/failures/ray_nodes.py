"""Adds and drains nodes of a Ray cluster, as before a machine is taken away."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx

COMMAND_TIMEOUT_S = 60.0
DRAINED_BY_S = 120
"""The deadline that Ray is given, in seconds. Serve stops a deployment's replica before it, by the time that its
graceful shutdown may take (60 s for a front end), whether or not its successor is up."""


class RayNodes:
    """The nodes of the cluster. `address` is the address of the head's GCS."""

    def __init__(self, dashboard: httpx.AsyncClient, address: str) -> None:
        self._dashboard = dashboard
        self._address = address

    async def replica_to_drain(self) -> tuple[str, str]:
        """A replica of the model that is not on the head, and its node. The head cannot be drained. Raises RuntimeError
        if there is none."""
        nodes = await self._get("/api/v0/nodes")
        head = {node["node_id"] for node in nodes["data"]["result"]["result"] if node["is_head_node"]}
        serving = await self._get("/api/serve/applications/")
        for application in serving["applications"].values():
            for replica in application["deployments"].get("LLMReplica", {}).get("replicas", ()):
                if replica["node_id"] not in head:
                    return replica["replica_id"], replica["node_id"]
        raise RuntimeError("every replica is on the head: a node drain needs another node")

    async def drain(self, node_id: str) -> None:
        """Returns once Ray has accepted the drain. Raises RuntimeError if it does not."""
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "benchmark")
        deadline = ("--deadline-remaining-seconds", str(DRAINED_BY_S))
        await self._ray("drain-node", "--node-id", node_id, *reason, *deadline)

    async def add(self, num_cpus: int) -> None:
        """Starts another node on this machine."""
        await self._ray("start", "--num-cpus", str(num_cpus))

    async def _get(self, path: str) -> Any:
        reply = await self._dashboard.get(path)
        reply.raise_for_status()
        return reply.json()

    async def _ray(self, command: str, *options: str) -> None:
        ray = Path(sys.executable).with_name("ray")
        process = await asyncio.create_subprocess_exec(
            ray,
            command,
            "--address",
            self._address,
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"ray {command}: {output.decode(errors='replace')}")
