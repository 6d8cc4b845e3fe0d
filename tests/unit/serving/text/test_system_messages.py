"""No system or developer message is lost: the template shows it, a neighbouring message includes it, or it is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from serving.text.chat_template import ChatTemplate, TemplateRefused
from serving.text.system_messages import NoPlaceForMessage, standing_in
from tests.unit.serving.small_tokenizer import CHATML, byte_level_tokenizer
from tests.unit.serving.tool_templates import ARGS, HERMES, LLAMA, MISTRAL, TAGS

EMBEDDED_MODEL = Path(__file__).parents[4] / "assets/models/kedge-chat"
STRICT = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
{{- '<' + m.role + '>' + m.content + '</>' }}{% endfor %}{{ '<assistant>' }}"""
"""A template that raises an error where other templates leave a message out."""
KNOWS_DEVELOPERS = """{%- for m in messages %}
{%- if m.role in ['system', 'developer', 'user', 'assistant'] %}{{ '<' + m.role + '>' + m.content + '</>' }}{% endif %}
{%- endfor %}{{ '<assistant>' }}"""
TEMPLATES = {
    "chatml": CHATML,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "tags": TAGS,
    "args": ARGS,
    "strict": STRICT,
    "developers": KNOWS_DEVELOPERS,
}
every_template = pytest.mark.parametrize("name", [*TEMPLATES, "embedded"])


def template(name: str) -> ChatTemplate:
    if name == "embedded":
        return ChatTemplate(AutoTokenizer.from_pretrained(EMBEDDED_MODEL))
    return ChatTemplate(byte_level_tokenizer(TEMPLATES[name]))


def said(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages]


def assert_in_order(texts: list[str], text: str) -> None:
    places = [text.find(each) for each in texts]
    assert -1 not in places, (texts, text)
    assert places == sorted(places)
    assert all(text.count(each) == 1 for each in texts)
    assert "KedgeInstruction" not in text


CONVERSATIONS = {
    "first": said(("system", "Be-kind"), ("user", "Hello-you")),
    "developer": said(("developer", "Be-kind"), ("user", "Hello-you")),
    "both": said(("system", "Be-kind"), ("developer", "Be-brief"), ("user", "Hello-you")),
    "late": said(("user", "Hello-you"), ("assistant", "Hi-there"), ("system", "Be-brief"), ("user", "Go-on")),
    "late developer": said(
        ("system", "Be-kind"),
        ("user", "Hello-you"),
        ("assistant", "Hi-there"),
        ("developer", "Be-brief"),
        ("system", "Be-true"),
        ("user", "Go-on"),
    ),
    "last": said(("user", "Hello-you"), ("system", "Be-brief")),
}


@every_template
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_everything_that_was_said_is_there_once_in_order(name: str, messages: list[dict[str, Any]]) -> None:
    assert_in_order(texts_of(messages), template(name).render(messages, {}))


@every_template
@pytest.mark.parametrize("role", ["system", "developer"])
def test_so_it_is_in_a_turn_that_continues(name: str, role: str) -> None:
    messages = said((role, "Be-brief"), ("user", "Go-on"))
    assert_in_order(texts_of(messages), template(name).render_continuation(messages, {}))


@every_template
def test_no_text_of_a_user_makes_one_vanish(name: str) -> None:
    """Kedge's marks were the same in every call, and a message whose mark a user had written counted as shown."""
    messages = CONVERSATIONS["late developer"]
    _, marks = standing_in(messages)
    forged = [*messages[:-1], *said(("user", " ".join(marks.values())))]
    for text in texts_of(messages[:-1]):
        assert text in template(name).render(forged, {})
    forged = said(("system", "Be-brief"), ("user", " ".join(marks.values())))
    assert "Be-brief" in template(name).render_continuation(forged, {})


@every_template
def test_what_a_template_shows_is_left_where_it_is(name: str) -> None:
    """Conversations that every template accepts do not change."""
    messages = said(("user", "Hello-you"), ("assistant", "Hi-there"), ("user", "Go-on"))
    made = template(name)
    assert made.render(messages, {}) == made._render(messages, {})
    if name not in ("mistral", "args"):  # these two show no system messages at all
        messages = [*said(("system", "Be-kind")), *messages]
        assert made.render(messages, {}) == made._render(messages, {})


def test_a_developer_is_the_system_where_the_template_does_not_name_the_role() -> None:
    """A template that writes any role would write a role that the model has never seen."""
    messages = CONVERSATIONS["developer"]
    assert "<|im_start|>system\nBe-kind<|im_end|>" in template("chatml").render(messages, {})
    assert "<|im_start|>system\nBe-kind<|im_end|>" in template("embedded").render(messages, {})
    assert "<developer>Be-kind</>" in template("developers").render(messages, {})


def test_a_late_message_is_a_system_message_where_the_template_has_them() -> None:
    text = template("embedded").render(CONVERSATIONS["late"], {})
    assert "<|im_start|>system\nBe-brief<|im_end|>\n<|im_start|>user\nGo-on" in text


@pytest.mark.parametrize("name", ["hermes", "mistral", "strict"])
def test_a_message_that_is_not_shown_is_part_of_the_users_behind_it(name: str) -> None:
    assert "Be-brief\n\nGo-on" in template(name).render(CONVERSATIONS["late"], {})
    messages = said(("system", "Be-brief"), ("user", "Go-on"))
    assert "Be-brief\n\nGo-on" in template(name).render_continuation(messages, {})


@pytest.mark.parametrize("name", ["hermes", "strict"])
def test_those_behind_the_first_system_message_are_part_of_it(name: str) -> None:
    assert "Be-kind\n\nBe-brief" in template(name).render(CONVERSATIONS["both"], {})


def test_with_tools_nothing_is_lost_either() -> None:
    tools = [{"type": "function", "function": {"name": "find_dog", "parameters": {}}}]
    for name in ("hermes", "mistral", "embedded"):
        for messages in (CONVERSATIONS["both"], CONVERSATIONS["late"]):
            text = template(name).render(messages, {}, tools)
            assert_in_order(texts_of(messages), text)
            assert "find_dog" in text


@pytest.mark.parametrize("name", ["hermes", "mistral", "strict"])
def test_one_with_no_user_beside_it_is_refused_by_name(name: str) -> None:
    made = template(name)
    messages = said(("user", "Hello-you"), ("assistant", "Hi-there"), ("system", "Be-brief"))
    with pytest.raises(NoPlaceForMessage) as caught:
        made.render(messages, {})
    assert caught.value.param == "messages[2]"
    with pytest.raises(NoPlaceForMessage) as caught:
        made.render_continuation(said(("developer", "Be-brief")), {})
    assert caught.value.param == "messages[0]"


def test_what_else_a_template_refuses_it_refuses_still() -> None:
    messages = said(("system", "Be-kind"), ("user", "one"), ("user", "two"))
    with pytest.raises(TemplateRefused, match="alternate"):
        template("mistral").render(messages, {})
