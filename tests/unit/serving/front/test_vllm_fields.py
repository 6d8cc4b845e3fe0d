"""Fields of vLLM's and SGLang's clients: what they do to an answer, or where they are refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from serving.front.api.rules import ApiRules
from serving.front.http import create_http_app
from serving.front.known_places import KnownPlaces
from tests.unit.serving.local_service import LocalService, client_of, small_text
from tests.unit.serving.small_tokenizer import END_ID

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
HELLO = {"role": "user", "content": "hi"}
PLAIN = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}


async def said(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post(COMPLETIONS, json={"prompt": "hello there", **PLAIN, **body})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


async def test_before_min_tokens_nothing_ends_the_answer(client: httpx.AsyncClient) -> None:
    plain = await said(client)
    stop = plain["token_ids"][2]
    assert len((await said(client, stop_token_ids=[stop]))["token_ids"]) == 3
    ruled = await said(client, stop_token_ids=[stop], min_tokens=6)
    assert stop not in ruled["token_ids"][:6]
    assert len(ruled["token_ids"]) >= 6
    native = await client.post(
        GENERATE,
        json={
            "text": "hello there",
            "sampling_params": {
                "temperature": 0, "max_new_tokens": 12, "stop_token_ids": [stop], "min_new_tokens": 6,
            },
        },
    )  # fmt: skip
    assert native.json()["output_ids"] == ruled["token_ids"]


async def test_a_stop_string_counts_from_min_tokens_on(client: httpx.AsyncClient) -> None:
    """A stop string that ends within these tokens does not count. One that begins within them may end later."""
    plain = await said(client, max_tokens=40)
    texts = [small_text().token_text(token_id) for token_id in plain["token_ids"]]
    place = next(i for i in range(2, 39) if all(t.isascii() and t.strip() for t in texts[i : i + 2]))
    stop = (texts[place] + texts[place + 1]).decode()
    early = await said(client, max_tokens=40, stop=stop)
    assert early["stop_reason"] == stop
    for least, ends in ((place + 1, True), (place + 2, False)):
        ruled = await said(client, max_tokens=40, stop=stop, min_tokens=least)
        assert (len(ruled["token_ids"]) == len(early["token_ids"])) is ends
        assert ruled["token_ids"] == plain["token_ids"][: len(ruled["token_ids"])]


async def test_bad_words_and_allowed_tokens(client: httpx.AsyncClient, service: LocalService) -> None:
    plain = await said(client)
    word = next(
        text
        for token_id in plain["token_ids"]
        if (text := small_text().token_text(token_id).decode("ascii", "ignore")).strip()
        and [token_id] == small_text().tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[union-attr]
        and not text.startswith(" ")
    )
    ruled = await said(client, bad_words=[word])
    assert service.calls[-1].bad_words == (word,)
    assert word not in ruled["text"]
    few = [70, 71, 72]
    assert set((await said(client, allowed_token_ids=few))["token_ids"]) <= set(few)


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "ab|cd"}, {"ab", "cd"}),
        ({"guided_json": {"enum": [1, 22]}}, {"1", "22"}),
        ({"guided_json": '{"enum": [1, 22]}'}, {"1", "22"}),
        ({"guided_grammar": 'root ::= "ab" | x\nx ::= "cd"'}, {"ab", "cd"}),
        ({"guided_grammar": 'start: "ab" | X\nX: "cd"', "guided_decoding_backend": "xgrammar"}, {"ab", "cd"}),
        ({"structured_outputs": {"grammar": '%llguidance {}\nstart: "ab" | "cd"'}}, {"ab", "cd"}),
        ({"regex": "ab|cd"}, {"ab", "cd"}),
        ({"ebnf": 'root ::= "ab" | x\nx ::= "cd"'}, {"ab", "cd"}),
    ],
)
async def test_what_guides_an_answer(
    client: httpx.AsyncClient, fields: dict[str, Any], texts: set[str]
) -> None:
    assert (await said(client, **fields))["text"] in texts


async def test_the_same_may_be_said_in_the_fields_of_several_versions(client: httpx.AsyncClient) -> None:
    """guidance says a grammar to vLLM so, because an earlier vLLM does not know the later field."""
    grammar = '%llguidance {}\n\nstart: "I say " c r\nc[capture]: C\n\nC: "yes"\n     | "no"\n\nr[capture]: /[ab]{3}/\n'
    guided = {"guided_decoding_backend": "guidance", "guided_grammar": grammar}
    told = await said(client, max_tokens=40, structured_outputs={"grammar": grammar}, **guided)
    assert re.fullmatch("I say (yes|no)[ab]{3}", told["text"])


async def test_ebnf_guides_the_native_protocol(client: httpx.AsyncClient) -> None:
    body = {"text": "a", "sampling_params": {"ebnf": 'root ::= "ab" [0-9]{2}', "temperature": 0}}
    text = (await client.post(GENERATE, json=body)).json()["text"]
    assert text[:2] == "ab"
    assert text[2:].isdecimal()


BAD: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "min_tokens": 20}, "min_tokens"),
    (CHAT, {"messages": [HELLO], "min_tokens": 5, "max_completion_tokens": 4}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [" "]}, "bad_words[0]"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["long" * 64] * 65}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "guided_grammar": "root ::= x"}, "guided_grammar"),
    (COMPLETIONS, {"prompt": "a", "guided_grammar": "start: x"}, "guided_grammar"),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "("}, "guided_regex"),
    (CHAT, {"messages": [HELLO], "guided_json": "{"}, "guided_json"),
    (CHAT, {"messages": [HELLO], "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"messages": [HELLO], "guided_regex": "a", "regex": "b"}, "regex"),
    (CHAT, {"messages": [HELLO], "ebnf": "root ::= x"}, "ebnf"),
    (CHAT, {"messages": [HELLO], "guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    (CHAT, {"messages": [HELLO], "structured_outputs": {"grammar": "?"}}, "structured_outputs.grammar"),
    (GENERATE, {"text": "a", "sampling_params": {"ebnf": "root ::= ("}}, "sampling_params.ebnf"),
    (GENERATE, {"text": "a", "sampling_params": {"ebnf": "a", "regex": "a"}}, "sampling_params.ebnf"),
    (GENERATE, {"text": "a", "sampling_params": {"min_new_tokens": 4, "max_new_tokens": 3}},
     "sampling_params.min_new_tokens"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 1, "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (CHAT, {"messages": [HELLO], "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    (CHAT, {"messages": [HELLO], "chat_template": "x"}, "chat_template"),
]  # fmt: skip
IN_SESSIONS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": "x"}, "cache_salt"),
    (CHAT, {"messages": [HELLO], "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"messages": [HELLO], "add_generation_prompt": False}, "add_generation_prompt"),
    (CHAT, {"messages": [HELLO], "add_special_tokens": True}, "add_special_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param", "headers"), [
    *((*bad, {}) for bad in BAD), *((*bad, {"x-session-id": "s"}) for bad in IN_SESSIONS)
])  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, headers: dict[str, str]
) -> None:
    reply = await client.post(path, json=body, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param, reply.text


@pytest.mark.parametrize("most", [0, 2])
async def test_prompt_logprobs_have_an_entry_for_each_token(client: httpx.AsyncClient, most: int) -> None:
    text = await said(client, prompt_logprobs=most, logprobs=1)
    whole = await client.post(
        CHAT, json={"messages": [HELLO], "prompt_logprobs": most, "max_tokens": 2, "logprobs": True,
                    "top_logprobs": 1}
    )  # fmt: skip
    tokens = (await client.post("/tokenize", json={"prompt": "hello there"})).json()["tokens"]
    chat_tokens = (await client.post("/tokenize", json={"messages": [HELLO]})).json()["tokens"]
    chat = whole.json()
    for ids, entries in ((tokens, text["prompt_logprobs"]), (chat_tokens, chat["prompt_logprobs"])):
        assert len(entries) == len(ids)
        assert entries[0] is None
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
            assert len(entry) <= most + 1
    assert all(len(top) == 1 for top in text["logprobs"]["top_logprobs"])
    assert len(text["logprobs"]["tokens"]) == len(text["token_ids"])
    assert all(len(entry["top_logprobs"]) == 1 for entry in chat["choices"][0]["logprobs"]["content"])


async def test_tokens_are_told_by_their_ids(client: httpx.AsyncClient) -> None:
    choice = await said(client, logprobs=1, return_tokens_as_token_ids=True)
    body = {"messages": [HELLO], **PLAIN, "logprobs": True, "return_tokens_as_token_ids": True}
    chat = (await client.post(CHAT, json=body)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    told = [entry["token"] for entry in chat["logprobs"]["content"]]
    assert told == [f"token_id:{token_id}" for token_id in chat["token_ids"]]


async def prompt_of(
    client: httpx.AsyncClient, service: LocalService, path: str, body: dict[str, Any]
) -> list[int]:
    """Sends the body. Returns the tokens that the engine got."""
    seen: list[list[int]] = []
    engine = service.rig.engine
    submit = engine.submit
    engine.submit = lambda spec: (seen.append([*spec.new_tokens]), submit(spec))[1]  # type: ignore[method-assign, func-returns-value]
    reply = await client.post(path, json=body | {"max_tokens": 2})
    engine.submit = submit  # type: ignore[method-assign]
    assert reply.status_code == 200, reply.text
    (tokens,) = seen
    return tokens


async def test_a_prompt_is_cut_and_begun_as_asked(client: httpx.AsyncClient, service: LocalService) -> None:
    whole = await prompt_of(client, service, COMPLETIONS, {"prompt": "hello there"})
    cut = await prompt_of(
        client, service, COMPLETIONS, {"prompt": "hello there", "truncate_prompt_tokens": 2}
    )
    room = await prompt_of(client, service, COMPLETIONS, {"prompt": [9] * 600, "truncate_prompt_tokens": -1})
    chat = await prompt_of(client, service, CHAT, {"messages": [HELLO]})
    chat_cut = await prompt_of(client, service, CHAT, {"messages": [HELLO], "truncate_prompt_tokens": 3})
    assert cut == whole[-2:]
    assert chat_cut == chat[-3:]
    assert len(room) == service.model.max_context_len - 2


async def test_a_final_message_is_gone_on_with(client: httpx.AsyncClient, service: LocalService) -> None:
    """Nothing closes the message and nothing opens another: the answer continues its very words."""
    begun = [HELLO, {"role": "assistant", "content": "Well, <|im_end|> I"}]
    closed = await prompt_of(client, service, CHAT, {"messages": [HELLO]})
    going = await prompt_of(
        client, service, CHAT,
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    bare = await prompt_of(client, service, CHAT, {"messages": [HELLO], "add_generation_prompt": False})
    tokenized = await client.post("/tokenize", json={"messages": begun, "continue_final_message": True})
    assert going[: len(closed)] == closed
    assert (
        small_text().detokenize(going[len(closed) :], skip_special_tokens=True).endswith("Well, <|im_end|> I")
    )
    assert going.count(END_ID) == closed.count(END_ID)
    assert bare == closed[: len(bare)]
    assert len(bare) < len(closed)
    assert tokenized.json()["tokens"] == going


async def test_a_request_may_bring_its_template_where_that_is_allowed(service: LocalService) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    app = create_http_app(service, rules=ApiRules(request_chat_template=True))
    async with client_of(app) as client:
        body = {"messages": [HELLO, HELLO], "chat_template": template}
        tokens = await prompt_of(client, service, CHAT, body)
        broken = await client.post(CHAT, json={"messages": [HELLO], "chat_template": "{% if"})
        session = await client.post(CHAT, json=body, headers={"x-session-id": "s"})
    assert small_text().detokenize(tokens, skip_special_tokens=False) == "[hi][hi]"
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "chat_template_error")
    assert (session.status_code, session.json()["error"]["param"]) == (400, "chat_template")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ 1 + 'a' }}",
        "{% for i in range(10**12) %}{{ i }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 2.0 ** 10000 }}",
        "{{ 'x' * 2**62 }}",
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{{ raise_exception('no') }}",
        "{{ raise_exception('half \\ud800') }}",
    ],
)
async def test_a_template_of_a_request_that_fails_is_refused_by_name(
    service: LocalService, template: str
) -> None:
    """Errors other than Jinja's own used to be answered with a 500."""
    app = create_http_app(service, rules=ApiRules(request_chat_template=True))
    async with client_of(app) as client:
        reply = await client.post(CHAT, json={"messages": [HELLO], "chat_template": template})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "chat_template_error"), reply.text
    assert error["param"] == "chat_template"


async def test_a_salt_keeps_prefixes_apart(client: httpx.AsyncClient) -> None:
    prompt = [*range(20, 120)]

    async def cached(**fields: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        reply = await client.post(COMPLETIONS, json=body, headers={"x-tenant-id": "t"})
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(), await cached(cache_salt="a"), await cached(cache_salt="b")] == [0, 0, 0]
    assert min([await cached(), await cached(cache_salt="a"), await cached(cache_salt="b")]) > 50


async def test_a_salted_conversation_is_not_recognized(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    await client.post(CHAT, json={"messages": [HELLO], "cache_salt": "a", "max_tokens": 1})
    await client.post(CHAT, json={"messages": [HELLO], "max_tokens": 1})
    salted, plain = (KnownPlaces(8).recognized(call).prompt for call in service.calls)
    assert not salted.said  # type: ignore[union-attr]
    assert plain.said  # type: ignore[union-attr]


async def test_a_request_names_itself(client: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, {"messages": [HELLO]}), (COMPLETIONS, {"prompt": "a"})):
        reply = await client.post(path, json={**body, "request_id": "mine", "max_tokens": 1})
        assert json.loads(reply.text)["id"].endswith("cmpl-mine")
