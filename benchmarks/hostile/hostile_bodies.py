"""Request bodies made to cost a server time: the largest of each kind that its limits let through, and larger ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
RESPONSES = "/v1/responses"
CONVERSATIONS = "/v1/conversations"
HELLO = {"role": "user", "content": "hi"}
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A body to send: `content` goes to `path` as JSON, valid or not. With `num_before`, `path` goes on from that of a
    conversation that has had so many such bodies."""

    name: str
    path: str
    content: bytes
    headers: tuple[tuple[str, str], ...] = ()
    num_before: int = 0


def hostile_bodies(context_len: int, size_bytes: int) -> Iterator[HostileBody]:
    """Bodies for a model with `context_len` tokens of context and a server that takes `size_bytes` of body."""
    yield from _not_ours(size_bytes)
    yield from _messages(size_bytes)
    yield from _pieces(size_bytes)
    yield from _calls(size_bytes)
    yield from _fields_of_chat()
    yield from _choices(size_bytes)
    yield from _prompts(context_len, size_bytes)
    yield from _answers(context_len)
    yield from _scored(context_len)
    yield from _grammars()
    yield _long_conversation()


def _chat(name: str, headers: dict[str, str] | None = None, **fields: Any) -> HostileBody:
    body = {"messages": [HELLO], "max_tokens": 1, **fields}
    return HostileBody(name, CHAT, json.dumps(body).encode(), tuple((headers or {}).items()))


def _completion(name: str, path: str = COMPLETIONS, **fields: Any) -> HostileBody:
    limit: dict[str, Any] = {} if path == GENERATE else {"max_tokens": 1}
    return HostileBody(name, path, json.dumps(limit | fields).encode())


def _not_ours(size_bytes: int) -> Iterator[HostileBody]:
    """Bodies that are refused for size, number of values or depth, and bodies that stay just below those limits."""
    yield HostileBody("1.5 million zeros for messages", CHAT, b'{"messages":[' + b"0," * 1_500_000 + b"0]}")
    many = (size_bytes - 64) // 3
    yield HostileBody("empty messages up to the size limit", CHAT, b'{"messages":[' + b"{}," * many + b"{}]}")
    yield HostileBody("32,760 empty messages", CHAT, b'{"messages":[' + b"{}," * 32_759 + b"{}]}")
    yield HostileBody("99,000 zeros for messages", CHAT, b'{"messages":[' + b"0," * 99_000 + b"0]}")
    yield HostileBody(
        "99,000 strings in an unknown field", CHAT, b'{"a":[' + b'"aaaaaaaa",' * 99_000 + b'""]}'
    )
    yield HostileBody("31 MiB of nothing", CHAT, b" " * (31 * MIB))
    yield HostileBody("spaces up to the size limit", CHAT, b" " * (size_bytes - 1))
    yield HostileBody("backslashes up to the size limit", CHAT, b'{"a":"' + b"\\" * (size_bytes - 64) + b'"}')
    yield HostileBody("lists 5,000 deep", CHAT, b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}")
    yield HostileBody("a number of 4 MB", COMPLETIONS, b'{"prompt":[' + b"9" * (4 * MIB - 64) + b"]}")
    unknown: dict[str, Any] = {f"unknown{n}": 0 for n in range(40_000)}
    yield _chat("40,000 unknown fields", **unknown)


def _messages(size_bytes: int) -> Iterator[HostileBody]:
    yield _chat("4,096 messages", messages=[HELLO] * 4_096)
    parts = [{"type": "text", "text": "a"}] * 1_024
    yield _chat("31 messages of 1,024 parts", messages=[HELLO | {"content": parts}] * 31)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call] * 128}
    results = {"role": "tool", "tool_call_id": "c", "content": "x"}
    yield _chat("100 messages of 128 calls", messages=[HELLO, *[said, *[results] * 3] * 100])
    yield _chat(
        "a message up to the size limit",
        messages=[{"role": "user", "content": "ab " * ((size_bytes - 200) // 3)}],
    )
    yield _chat("control tokens in 1 MB", messages=[{"role": "user", "content": "<|im_start|>" * 80_000}])
    yield _chat("one word of 1 MB", messages=[{"role": "user", "content": "a" * MIB}])
    yield _chat("a message of escapes", messages=[{"role": "user", "content": "\u0001" * 600_000}])


def _pieces(size_bytes: int) -> Iterator[HostileBody]:
    """Texts in thousands of pieces, which the chat template gets as one."""
    text = "x" * (size_bytes // (24 * 1_024) - 48)
    said = {"role": "user", "content": [{"type": "text", "text": text}] * 1_024}
    body: dict[str, Any] = {"max_tokens": 1, "messages": [said] * 24}
    yield HostileBody("24 messages of 1,024 blocks of text", "/v1/messages", json.dumps(body).encode())
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    part = {"type": "output_text", "text": "x" * (size_bytes // 10_000 - 128)}
    message = {"type": "message", "role": "assistant", "content": [part]}
    body = {"max_output_tokens": 16, "input": [called, *[message] * 10_000]}
    yield HostileBody("10,000 texts behind a call", RESPONSES, json.dumps(body).encode())


def _calls(size_bytes: int) -> Iterator[HostileBody]:
    """Calls of functions in the history, whose arguments are JSON in a text."""

    def called(name: str, arguments: str) -> HostileBody:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return _chat(name, messages=[HELLO, said, {"role": "tool", "tool_call_id": "c", "content": "x"}])

    yield called("32,000 lists in the arguments of a call", json.dumps({"a": [[]] * 32_000}))
    yield called("99,000 numbers in the arguments of a call", json.dumps({"a": [0] * 99_000}))
    many = (size_bytes - 400) // 3
    yield called("lists in the arguments of a call up to the size limit", '{"a":[' + "[]," * many + "[]]}")


def _fields_of_chat() -> Iterator[HostileBody]:
    yield _chat("a chat_template_kwargs of 64 KB", chat_template_kwargs={"a": "b" * 65_000})
    yield _chat("a chat_template_kwargs of 10,000 values", chat_template_kwargs={"a": [0] * 20_000})
    yield _chat(
        "a chat_template_kwargs of 90,000 values", chat_template_kwargs={f"{n}": 0 for n in range(45_000)}
    )
    deep: Any = {}
    for _ in range(180):
        deep = {"a": deep}
    yield _chat("a chat_template_kwargs 180 deep", chat_template_kwargs=deep)
    takes = {"parameters": {"type": "object"}}
    tools = [{"type": "function", "function": {"name": f"f{n}"} | takes} for n in range(128)]
    yield _chat("128 tools", tools=tools)
    yield _chat("128 tools, one of which must be called", tools=tools, tool_choice="required")
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1_500)}}
    yield _chat(
        "a tool of 1,500 properties",
        tools=[{"type": "function", "function": {"name": "f", "parameters": wide}}],
        tool_choice="required",
    )
    huge = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(30_000)}}
    yield _chat(
        "a tool of 30,000 properties",
        tools=[{"type": "function", "function": {"name": "f", "parameters": huge}}],
    )
    yield _chat(
        "a tool of 1 MB",
        tools=[{"type": "function", "function": {"name": "f", "description": "a " * (MIB // 2)}}],
    )
    yield _chat("2,000 biases", logit_bias={str(n % 2_000): 0 for n in range(2_000)})
    yield _chat("30,000 biases", logit_bias={str(n): 0 for n in range(30_000)})
    yield _chat("16 stop strings", stop=["x" * 255 + chr(65 + n) for n in range(16)])
    yield _chat("50,000 stop strings", stop=["x"] * 50_000)
    yield _chat("64 stop tokens", stop_token_ids=list(range(64)))
    yield _chat("50,000 stop tokens", stop_token_ids=[5] * 50_000)
    yield _chat("metadata of 40,000 keys", metadata={f"k{n}": "v" for n in range(40_000)})
    yield _chat("a user of 1 MB", user="u" * MIB)
    yield _chat("a model of 1 MB", model="m" * MIB)
    yield _chat("a session's id of 8 KB", headers={"x-session-id": "s" * 8_000})


def _choices(size_bytes: int) -> Iterator[HostileBody]:
    yield _chat("128 choices", n=128)
    yield _chat("128 choices of 20 log-probabilities", n=128, logprobs=True, top_logprobs=20, max_tokens=16)
    words = [f"{n:0>256}" for n in range(1_024)]
    yield _chat("128 choices without 64 words of 256 letters", n=128, bad_words=words[:64])
    yield _chat("128 choices without 1,024 words of 256 letters", n=128, bad_words=words)
    described = {"description": "a " * (size_bytes // 256 - 100), "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": {"name": f"f{n}", **described}} for n in range(128)]
    yield _chat("128 choices with tools up to the size limit", n=128, tools=tools)


def _prompts(context_len: int, size_bytes: int) -> Iterator[HostileBody]:
    yield _completion("token ids that fill the context", prompt=[7] * (context_len - 2))
    yield _completion("four times the context in token ids", prompt=[7] * (4 * context_len))
    yield _completion("text up to the size limit", prompt="ab " * ((size_bytes - 200) // 3))
    yield _completion("text of four bytes a character", prompt="\U0001f9ed" * 100_000)
    yield _completion("256 prompts", prompt=["hi"] * 256)
    yield _completion("2 prompts, 128 choices of each", prompt=["hi"] * 2, n=128)
    share = [7] * (context_len // 2)
    yield _completion("64 prompts of half the context", prompt=[share] * 64)
    yield _completion("30,000 prompts of one token", prompt=[[7]] * 30_000)
    yield _completion("99,000 prompts of one letter", prompt=["a"] * 99_000)
    ids = [f"{n:0>250}" for n in range(256)]
    params = {"max_new_tokens": 1}
    yield _completion("256 ids of 250 letters", GENERATE, text=["a"] * 256, rid=ids, sampling_params=params)
    yield _completion("echo of a long prompt", prompt="ab " * 2_000, echo=True, logprobs=5)


def _answers(context_len: int) -> Iterator[HostileBody]:
    """Small requests that ask for large answers."""
    many = {"max_new_tokens": min(1_500, context_len - 200), "ignore_eos": True}
    for stream in (False, True):
        yield _completion(
            f"1,500 tokens out, with log-probabilities, stream {stream}",
            GENERATE,
            text="a",
            stream=stream,
            return_logprob=True,
            top_logprobs_num=20,
            sampling_params=many,
        )
        yield _completion(
            f"1,500 tokens out, stream {stream}", GENERATE, text="a", stream=stream, sampling_params=many
        )
        yield _completion(
            f"128 choices of 128 tokens, stream {stream}",
            prompt="a",
            n=128,
            max_tokens=128,
            ignore_eos=True,
            logprobs=5,
            stream=stream,
        )
        yield _chat(
            f"1,000 tokens of chat with log-probabilities, stream {stream}",
            max_tokens=1_000,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=20,
            stream=stream,
        )


def _scored(context_len: int) -> Iterator[HostileBody]:
    """Requests for the log-probabilities of the prompt."""
    scored, params = [7] * (context_len - 8), {"max_new_tokens": 1}
    yield _completion(
        "log-probabilities of a whole context",
        GENERATE,
        input_ids=scored,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=20,
        return_text_in_logprobs=True,
        sampling_params=params,
    )
    opening = json.dumps({"capacity_of_str_len": 0, "streaming": True, "session_id": "hostile"})
    yield HostileBody("(a session is opened)", "/open_session", opening.encode())
    yield HostileBody(
        "log-probabilities of 2,000 tokens, in a session, with a key",
        GENERATE,
        json.dumps(
            {
                "input_ids": scored[:2_000],
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 20,
                "sampling_params": params,
                "session_params": {"id": "hostile"},
            }
        ).encode(),
        (("idempotency-key", "k"),),
    )


def _grammars() -> Iterator[HostileBody]:
    def held(name: str, schema: Any) -> HostileBody:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        return _chat(name, response_format=form)

    yield held(
        "a schema of 1,500 properties", {"type": "object", "properties": {f"p{n}": {} for n in range(1_500)}}
    )
    yield held(
        "a schema of 30,000 properties",
        {"type": "object", "properties": {f"p{n}": {} for n in range(30_000)}},
    )
    yield held("an enum of 8,000", {"enum": [f"{n}" for n in range(8_000)]})
    yield held("an enum of 90,000", {"enum": list(range(90_000))})
    deep: Any = {"type": "string"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield held("a schema 90 deep", deep)
    nested: Any = 0
    for _ in range(190):
        nested = [nested]
    yield held("a default 190 deep", {"default": nested})
    yield held("numbers of 2,000 digits", {"enum": [10**2_000 + n for n in range(20)]})
    yield _chat("a regular expression of 64 KB", structured_outputs={"regex": "(a|b)" * 13_000})
    yield _chat("a regular expression that explodes", structured_outputs={"regex": "((a{1,99}){1,99}){1,99}"})
    yield _chat(
        "2,000 choices of answers", structured_outputs={"choice": [f"{n:0>30}" for n in range(2_000)]}
    )
    text = json.dumps({"enum": list(range(90_000))})
    params = {"max_new_tokens": 1, "json_schema": text}
    yield _completion("a schema of 0.5 MB as text", GENERATE, text="a", sampling_params=params)


def _long_conversation() -> HostileBody:
    """One more item for a conversation that is read first."""
    content = json.dumps({"items": [HELLO]}).encode()
    return HostileBody("an item for a conversation of 2,000 items", "/items", content, num_before=2_000)
