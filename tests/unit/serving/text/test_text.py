"""Prompts to token ids and back: only a turn's new part is rendered, only whole characters are shown, and the text does
not depend on batching."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.api import ContextLengthExceeded, Finish, FinishReason, InvalidRequest, TokenLogprob
from engine.models.errors import BadCheckpoint
from serving.text.detokenizer import ByteDetokenizer, TokenBytes, WindowDetokenizer
from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt, TextPrompt, TokenPrompt
from tests.unit.serving.small_tokenizer import BOS_ID, END_ID, START_ID, byte_level_tokenizer, piece_tokenizer

VOCAB_SIZE = 700
EMBEDDED_MODEL = Path(__file__).parents[4] / "assets/models/kedge-chat"
BYTE_LEVEL = byte_level_tokenizer()
PIECES = piece_tokenizer()
LENGTH = Finish(FinishReason.LENGTH)
patient = settings(deadline=None, print_blob=True)
HELLO = {"role": "user", "content": "My dog is called Rex."}
MORE = {"role": "user", "content": "What is my dog called?"}


@functools.cache
def processor(template: str | None = None, *, max_context_len: int = 1000) -> TextProcessor:
    tokenizer = BYTE_LEVEL if template is None else byte_level_tokenizer(template)
    return TextProcessor(tokenizer, vocab_size=VOCAB_SIZE, max_context_len=max_context_len)


def text_of(token_ids: list[int]) -> str:
    return BYTE_LEVEL.decode(token_ids, skip_special_tokens=False)


token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60)


@patient
@given(ids=token_ids, skip=st.booleans(), batch=st.integers(1, 7))
def test_streamed_text_is_the_decoded_text(ids: list[int], skip: bool, batch: int) -> None:
    output = processor().output_text(skip_special_tokens=skip)
    pieces = [output.push(ids[i : i + batch]) for i in range(0, len(ids), batch)]
    known = [i for i in ids if i < len(BYTE_LEVEL)]
    expected = BYTE_LEVEL.backend_tokenizer.decode(known, skip_special_tokens=skip)
    assert "".join(pieces) + output.push((), LENGTH) == expected


@patient
@given(text=st.text(max_size=30), skip=st.booleans())
def test_streamed_pieces_are_the_decoded_text(text: str, skip: bool) -> None:
    backend = PIECES.backend_tokenizer
    ids = [*backend.encode(text + " dog", add_special_tokens=False).ids, 1]
    output = TextProcessor(PIECES, vocab_size=len(PIECES), max_context_len=100).output_text(
        skip_special_tokens=skip
    )
    shown = "".join(output.push((i,)) for i in ids) + output.push((), LENGTH)
    assert shown == backend.decode(ids, skip_special_tokens=skip)


@patient
@given(before=st.text(max_size=30), text=st.text(max_size=30))
def test_an_output_goes_on_with_the_text_before_it(before: str, text: str) -> None:
    """The first blank of a completion was lost where a tokenizer drops the blank that a text begins with."""
    backend = PIECES.backend_tokenizer
    known = backend.encode(before + "dog", add_special_tokens=False).ids
    ids = backend.encode(" park" + text, add_special_tokens=False).ids[1:]
    output = TextProcessor(PIECES, vocab_size=len(PIECES), max_context_len=100).output_text(
        before=known[-16:]
    )
    shown = "".join(output.push((i,)) for i in ids) + output.push((), LENGTH)
    assert backend.decode([*known, *ids]) == backend.decode(known) + shown


def test_an_output_after_half_a_character_is_a_text_of_its_own() -> None:
    halves = PIECES.convert_tokens_to_ids(["<0xC3>", "<0xA9>"])
    text = TextProcessor(PIECES, vocab_size=len(PIECES), max_context_len=100)
    output = text.output_text(before=halves[:1])
    dog = PIECES.backend_tokenizer.encode("dog", add_special_tokens=False).ids
    assert output.push([halves[1], *dog]) + output.push((), LENGTH) == "\ufffd dog"


def test_broken_pieces_are_not_held_for_ever() -> None:
    output = TextProcessor(PIECES, vocab_size=len(PIECES), max_context_len=100).output_text()
    broken = PIECES.convert_tokens_to_ids("<0x80>")
    assert "".join(output.push((broken,)) for _ in range(100)).count("\ufffd") >= 90


@patient
@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    ids = processor().encode_prompt(TokenPrompt(tuple(processor()._encode(text, "prompt")) or (5,)))
    output = processor().output_text(skip_special_tokens=False)
    assert "".join(output.push((i,)) for i in ids) + output.push((), LENGTH) in (text, text_of([5]))


def test_half_characters_are_held_back() -> None:
    ids = processor()._encode("🦩", "prompt")
    assert len(ids) > 1
    output = processor().output_text()
    assert [output.push((i,)) for i in ids] == [""] * (len(ids) - 1) + ["🦩"]


class CountedBytes:
    """The bytes of tokens. Counts the look-ups."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self.looked_up = 0

    def __getitem__(self, token_id: int) -> bytes:
        self.looked_up += 1
        return self._token_bytes[token_id]


class CountedTokenizer:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_long_run_of_broken_bytes_costs_linear_time() -> None:
    """Each token is looked up once, and only the beginning of one character is kept."""
    broken = processor()._encode("é", "prompt")[:1]
    counted = CountedBytes(TokenBytes(processor().tokenizer))
    detokenizer = ByteDetokenizer(counted, frozenset())
    shown = 0
    for _ in range(20_000):
        shown += len(detokenizer.push(broken))
        held, _ = detokenizer._decoder.getstate()
        assert len(held) < 4
    assert counted.looked_up == 20_000
    assert shown == 19_999  # the last byte may be the beginning of a character


def test_a_long_run_of_broken_pieces_costs_linear_time() -> None:
    """Vocabularies with rules for neighbouring tokens decode a window, whose length does not grow."""
    counted = CountedTokenizer(PIECES.backend_tokenizer)
    detokenizer = WindowDetokenizer(counted, frozenset())
    broken = PIECES.convert_tokens_to_ids("<0x80>")
    num_tokens, costs = 1000, []
    for _ in range(2):
        before = counted.decoded
        for _ in range(num_tokens):
            detokenizer.push((broken,))
        costs.append(counted.decoded - before)
    assert costs[1] <= 1.1 * costs[0]
    assert sum(costs) <= 2 * num_tokens * 32


@patient
@given(ids=token_ids, skip=st.booleans(), batch=st.integers(1, 5))
def test_the_text_is_the_same_whoever_makes_it(ids: list[int], skip: bool, batch: int) -> None:
    """Either the engine's thread finds the stop string, perhaps ahead of what has been read, or the reader finds it."""
    stops = ("a", " dog", "e ")
    text = processor()
    watched = text.output_text(stops, skip_special_tokens=skip)
    assert watched.watcher is not None
    accepted: list[int] = []
    matched, shown = None, ""
    while matched is None and len(accepted) < len(ids):
        accepted.append(ids[len(accepted)])
        matched = watched.watcher.accept(accepted[-1])
        if len(accepted) % batch == 0:
            shown += watched.push(accepted[len(accepted) - batch : len(accepted) - len(accepted) % 2])
            shown += watched.push(accepted[len(accepted) - len(accepted) % 2 :])
    finish = Finish(FinishReason.STOP, matched) if matched is not None else LENGTH
    shown += watched.push(accepted[len(accepted) - len(accepted) % batch :], finish)
    assert not any(stop in shown for stop in stops)
    assert text.output_text(stops, skip_special_tokens=skip).push(accepted, finish) == shown
    if matched is not None:
        kept = text.output_text(stops, trim_stop=False, skip_special_tokens=skip)
        assert kept.push(accepted, finish) == shown + matched


def test_the_reader_leaves_alone_what_the_engine_makes_text_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fed nothing to the matcher and the detokenizer while the engine's thread fed the next token: text that was
    held back came twice, or not at all."""

    def in_use(*_args: object, **_options: object) -> str:
        raise AssertionError("the engine's thread owns this before the last delta")

    text = processor()
    ids = text._encode(" cat dog", "prompt")
    output = text.output_text(("zzz",))
    assert output.watcher is not None
    for token_id in ids:
        output.watcher.accept(token_id)
    with monkeypatch.context() as during:
        during.setattr(output._matcher, "feed", in_use)
        during.setattr(output._detokenizer, "push", in_use)
        shown = "".join(output.push((token_id,)) for token_id in ids)
    assert shown + output.push((), LENGTH) == text_of(ids)


@pytest.mark.parametrize("trim_stop", [True, False])
def test_a_stop_token_after_a_beginning_of_a_stop_string(trim_stop: bool) -> None:
    """The engine does not show the stop token to the watcher. The text that was held back is then no part of a stop
    string."""
    text = processor()
    begin, dog = (text._encode(word, "prompt")[0] for word in (" cat", " dog"))
    begun = text.token_text(begin).decode()
    finish = Finish(FinishReason.STOP, dog)
    output = text.output_text((" cats",), trim_stop=trim_stop)
    assert output.watcher is not None
    assert output.watcher.accept(begin) is None
    assert output.push((begin,)) == ""
    assert output.push((dog,), finish) == begun + ("" if trim_stop else " dog")


def test_a_stop_token_is_trimmed_unless_asked_for() -> None:
    rex, dog = (processor()._encode(word, "prompt")[0] for word in ("Rex", "dog"))
    finish = Finish(FinishReason.STOP, dog)
    trimmed = processor().output_text()
    kept = processor().output_text(trim_stop=False)
    assert text_of([rex]) == trimmed.push((rex, dog), finish)
    assert text_of([rex, dog]) == kept.push((rex, dog), finish)


def test_a_fresh_chat_is_the_whole_template() -> None:
    ids = processor().encode_prompt(ChatPrompt((HELLO, {"role": "assistant", "content": "I see."}, MORE)))
    assert text_of(ids) == (
        "<|im_start|>user\nMy dog is called Rex.<|im_end|>\n<|im_start|>assistant\nI see.<|im_end|>\n"
        "<|im_start|>user\nWhat is my dog called?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("ended", [True, False])
def test_turns_add_up_to_the_whole_conversation(ended: bool) -> None:
    """The history reads as the template writes it, whether or not the model closed its answer itself."""
    text = processor()
    history = text.encode_prompt(ChatPrompt((HELLO,)))
    history += text._encode("I see.", "prompt") + ([END_ID] if ended else [])
    history += text.encode_prompt(ChatPrompt((MORE,)), history_len=len(history), last_token=history[-1])
    whole = (HELLO, {"role": "assistant", "content": "I see."}, MORE)
    assert text_of(history) == text_of(text.encode_prompt(ChatPrompt(whole)))


def test_only_new_messages_are_rendered() -> None:
    """A template may write a default greeting at the beginning. A continuation must not repeat it."""
    template = "<|im_start|>system\nBe kind.<|im_end|>\n" + byte_level_tokenizer().chat_template
    ids = processor(template).encode_prompt(ChatPrompt((MORE,)), history_len=9, last_token=END_ID)
    assert text_of(ids) == "\n<|im_start|>user\nWhat is my dog called?<|im_end|>\n<|im_start|>assistant\n"
    assert START_ID in ids


THINKING = """{% set last = namespace(query=messages|length - 1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.index0 > last.query %}<think></think>
{%- endif %}{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}<assistant>"""
ALTERNATING = """{{ '<|begin|>' }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content }}<|im_end|>{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "added"),
    [
        (THINKING, "<user>What is my dog called?<|im_end|><assistant>"),
        (ALTERNATING, "[INST] What is my dog called? [/INST]"),
    ],
    ids=["thinking", "alternating"],
)
def test_templates_in_the_manner_of_known_models(template: str, added: str) -> None:
    """Some templates drop reasoning from earlier answers. Others require alternating roles or begin the text with a
    BOS."""
    ids = processor(template).encode_prompt(ChatPrompt((MORE,)), history_len=9, last_token=END_ID)
    assert text_of(ids) == added


def test_the_embedded_model_continues_its_own_conversations() -> None:
    text = TextProcessor.load(str(EMBEDDED_MODEL), vocab_size=2048, max_context_len=8192)
    history = text.encode_prompt(ChatPrompt((HELLO,)))
    history += text._encode("I see.<|im_end|>", "prompt")
    history += text.encode_prompt(ChatPrompt((MORE,)), history_len=len(history), last_token=history[-1])
    whole = (HELLO, {"role": "assistant", "content": "I see."}, MORE)
    assert history == text.encode_prompt(ChatPrompt(whole))


def test_a_template_that_looks_back_is_refused_for_continuation_only() -> None:
    template = "{% for m in messages %}[{{ loop.index }}] {{ m['content'] }}\n{% endfor %}"
    text = processor(template)
    assert text_of(text.encode_prompt(ChatPrompt((HELLO,)))) == "[1] My dog is called Rex.\n"
    with pytest.raises(InvalidRequest, match="depending on the ones before") as caught:
        text.encode_prompt(ChatPrompt((MORE,)), history_len=9, last_token=END_ID)
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_not_incremental")


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no such role') }}", "{{ messages[7].content.x }}", "{{ messages[0]['role'] + 1 }}"],
)
def test_what_a_template_refuses_is_the_clients_error(template: str) -> None:
    with pytest.raises(InvalidRequest, match="template refused") as caught:
        processor(template).encode_prompt(ChatPrompt((HELLO,)))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["tokenize", "messages", "add_generation_prompt", "chat_template"])
def test_template_arguments_cannot_take_over(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        processor().encode_prompt(ChatPrompt((HELLO,), {name: True}))
    assert caught.value.param == "chat_template_kwargs"


def test_template_arguments_reach_the_template() -> None:
    text = processor("{{ mood }}: {{ messages[0]['content'] }}")
    assert text_of(text.encode_prompt(ChatPrompt((HELLO,), {"mood": "good"}))).startswith("good: My dog")


def test_a_bos_begins_a_sequence_and_nothing_else() -> None:
    text = processor()
    assert text.encode_prompt(TokenPrompt((BOS_ID, 5, BOS_ID))) == [BOS_ID, 5, BOS_ID]
    assert text.encode_prompt(TokenPrompt((BOS_ID, 5, BOS_ID)), history_len=3) == [5, BOS_ID]
    plain = text.encode_prompt(TextPrompt("dog"), history_len=3)
    assert text.encode_prompt(TextPrompt("<|begin|>dog"), history_len=3) == plain


@pytest.mark.parametrize(
    ("prompt", "history_len", "param"),
    [
        (TokenPrompt(()), 0, "prompt"),
        (TokenPrompt((BOS_ID,)), 3, "prompt"),
        (TextPrompt(""), 3, "prompt"),
        (TokenPrompt((1, VOCAB_SIZE)), 0, "prompt"),
        (TokenPrompt((-1,)), 0, "prompt"),
        (TextPrompt("\ud800"), 0, "prompt"),
    ],
)
def test_prompts_that_cannot_be(prompt: object, history_len: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        processor().encode_prompt(prompt, history_len=history_len)
    assert caught.value.param == param


def test_absurdly_long_texts_are_refused_before_work() -> None:
    with pytest.raises(ContextLengthExceeded, match="context length"):
        processor(max_context_len=10).encode_prompt(TextPrompt("dog " * 10_000))


def test_a_text_of_very_many_tokens_is_refused_before_they_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A million emoji were four million tokens, whose list held the interpreter for 80 ms."""
    text, prompt = processor(max_context_len=10), TextPrompt("🧭" * 20)
    num_tokens = len(text.encode_prompt(prompt))
    assert num_tokens > 11, "some are more than the context, since the last ones alone may be wanted"
    monkeypatch.setattr("serving.text.text._MOST_TOKENS", 11)
    with pytest.raises(ContextLengthExceeded, match=f"{num_tokens} tokens"):
        text.encode_prompt(prompt)


def test_a_long_text_does_not_hold_up_other_threads() -> None:
    text = processor(max_context_len=10_000_000)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    started_s = time.perf_counter()
    text.encode_prompt(TextPrompt("My dog is called Rex. " * 20_000))
    took_s = time.perf_counter() - started_s
    done.set()
    ticker.join()
    assert any(0.25 < (tick - started_s) / took_s < 0.75 for tick in ticks), "nobody ran in the midst of it"


def test_without_a_tokenizer_only_ids_work(tmp_path: Path) -> None:
    text = TextProcessor.load(str(tmp_path), vocab_size=VOCAB_SIZE, max_context_len=100)
    assert text.tokenizer is None
    assert text.encode_prompt(TokenPrompt((5, 6))) == [5, 6]
    assert text.output_text().push((5, 6), LENGTH) == ""
    assert text.token_text(5) == b""
    for prompt in (TextPrompt("hi"), ChatPrompt((HELLO,))):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            text.encode_prompt(prompt)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        text.output_text(("stop",))


@pytest.mark.parametrize("written", ["", "{}", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, written: str) -> None:
    BYTE_LEVEL.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(written)
    with pytest.raises(BadCheckpoint, match=f"^{tmp_path}: the tokenizer cannot be read: "):
        TextProcessor.load(str(tmp_path), vocab_size=VOCAB_SIZE, max_context_len=100)


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    text = TextProcessor.load(str(tmp_path), vocab_size=VOCAB_SIZE, max_context_len=100)
    assert text.encode_prompt(TextPrompt("dog"))
    with pytest.raises(InvalidRequest, match="no chat template"):
        text.encode_prompt(ChatPrompt((HELLO,)))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["bytes", "pieces"])
def test_token_texts_join_to_the_exact_text(tokenizer: object) -> None:
    text = TextProcessor(tokenizer, vocab_size=VOCAB_SIZE, max_context_len=100)
    ids = text._encode("Köln 🦩!", "prompt")
    entries = text.text_logprobs([TokenLogprob(i, -1.0, ((i, -1.0),)) for i in ids])
    joined = b"".join(entry.text for entry in entries)
    assert joined.decode().strip() == "Köln 🦩!"
    assert all(entry.top_texts == (entry.text,) for entry in entries)
