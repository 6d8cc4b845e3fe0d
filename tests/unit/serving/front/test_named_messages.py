"""Where the chat template has no place for a message, errors name it as the client has sent it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.front.http import create_http_app
from serving.text.text import TextProcessor
from tests.unit.serving.local_service import MODEL, LocalService, client_of
from tests.unit.serving.replica_rig import VOCAB_SIZE, running_rig
from tests.unit.serving.small_tokenizer import byte_level_tokenizer

SHOWS_THE_FIRST = """{%- for m in messages %}{%- if m.role != 'system' or loop.first %}
{{- '<' + m.role + '>' + m.content + '</>' }}{% endif %}{% endfor %}{{ '<assistant>' }}"""
REFUSES = "{{ raise_exception('nothing pleases me') }}"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SAID = [{"role": role, "content": "Rex"} for role in ("user", "assistant", "system", "assistant", "user")]


@pytest.mark.parametrize("count", ["", "count"])
@pytest.mark.parametrize(
    ("template", "path", "body", "param"),
    [
        (SHOWS_THE_FIRST, RESPONSES, {"input": SAID}, "input[2]"),
        (SHOWS_THE_FIRST, RESPONSES, {"input": SAID, "instructions": "Be brief."}, "input[2]"),
        (SHOWS_THE_FIRST, MESSAGES, {"messages": SAID}, "messages[2]"),
        (SHOWS_THE_FIRST, MESSAGES, {"messages": SAID, "system": "Be brief."}, "messages[2]"),
        (REFUSES, RESPONSES, {"input": "hi"}, "input"),
        (REFUSES, MESSAGES, {"messages": SAID[:1]}, "messages"),
    ],
)
async def test_a_message_is_named_as_it_was_sent_also_where_it_is_only_counted(
    tmp_path: Path, template: str, path: str, body: dict[str, Any], param: str, count: str
) -> None:
    """The count used to name the field of another protocol, and to number the messages of the prompt."""
    text = TextProcessor(byte_level_tokenizer(template), vocab_size=VOCAB_SIZE, max_context_len=512)
    fields = body | {"model": MODEL.model_id}
    if count:
        path += "/input_tokens" if path == RESPONSES else "/count_tokens"
    elif path == MESSAGES:
        fields["max_tokens"] = 4
    async with running_rig(tmp_path, text=text) as rig:
        service = LocalService(rig)
        async with client_of(create_http_app(service)) as client:
            reply = await client.post(path, json=fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error.get("param") == param if path.startswith(RESPONSES) else param in error["message"]
