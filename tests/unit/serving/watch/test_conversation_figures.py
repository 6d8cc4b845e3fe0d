"""Turns whose clients send the whole conversation: how many were recognized, and how much of their input was cached."""

from __future__ import annotations

from pathlib import Path

from tests.unit.serving.local_service import local_client
from tests.unit.serving.replica_rig import METRIC_LABELS

CHAT = {"model": "null-model", "max_tokens": 4}


async def test_unnamed_and_named_conversations(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, service):
        for kind, headers in (("unnamed", {}), ("named", {"x-session-id": "s"})):
            messages = [{"role": "user", "content": f"{kind}: hello, how are you today?"}]
            for _ in range(2):
                reply = await client.post(
                    "/v1/chat/completions", json={**CHAT, "messages": messages}, headers=headers
                )
                answer = reply.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
            figure = service.rig.figure
            labels = {"kind": kind, **METRIC_LABELS}
            assert figure("kedge_conversations_total", outcome="new", **labels) == 1, kind
            assert figure("kedge_conversations_total", outcome="recognized", **labels) == 1, kind
            cached = figure("kedge_conversation_cached_tokens_total", **labels)
            prompt = figure("kedge_conversation_prompt_tokens_total", **labels)
            assert 0 < cached < prompt, kind


async def test_a_prompt_of_tokens_is_no_conversation(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, service):
        await client.post("/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}})
        for outcome in ("new", "recognized"):
            labels = {"kind": "unnamed", "outcome": outcome, **METRIC_LABELS}
            assert service.rig.figure("kedge_conversations_total", **labels) == 0
