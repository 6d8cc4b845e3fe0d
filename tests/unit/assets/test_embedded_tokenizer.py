"""The committed tokenizer: any text survives it, and a longer conversation begins with the shorter one."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from assets.training.dialogues import Message, RecallCase, recall_case
from assets.training.sequences import IGNORED, Encoder, case_row, training_rows

MODELS = Path(__file__).parents[3] / "assets" / "models"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODELS / "kedge-chat")


def _conversation(case: RecallCase) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": case.system}] if case.system else []
    for user, reply in zip(case.user_messages, case.references, strict=True):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return messages


def _render(messages: list[dict[str, str]], prompt: bool = False) -> str:
    return str(TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def test_vocabulary_size_and_special_tokens() -> None:
    assert len(TOKENIZER) == 2048
    assert [TOKENIZER.convert_tokens_to_ids(token) for token in SPECIAL] == [0, 1, 2]
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"


def test_both_models_share_it() -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        chat, draft = (MODELS / model / name for model in ("kedge-chat", "kedge-chat-draft"))
        assert chat.read_bytes() == draft.read_bytes()


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "naïve 犬 🐕‍🦺\u200d", "\x00\x7f", "1234567890", "I'm  here ."]
)
def test_odd_texts_survive_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_digits_stand_alone() -> None:
    assert len(TOKENIZER.encode("48213", add_special_tokens=False)) == 5


def test_rendering_is_incremental() -> None:
    for case in map(recall_case, range(4)):
        messages = _conversation(case)
        whole = _render(messages)
        for end in range(1, len(messages)):
            assert whole.startswith(_render(messages[:end]))
            if messages[end]["role"] == "assistant":
                prompt = _render(messages[:end], prompt=True)
                assert whole.startswith(prompt + messages[end]["content"] + "<|im_end|>\n")


def test_tokens_of_turns_add_up() -> None:
    """Encoding turn by turn, as a session does, gives the tokens of the whole conversation."""
    messages = _conversation(recall_case(3))
    parts = [TOKENIZER.encode(_render([message]), add_special_tokens=False) for message in messages]
    whole = TOKENIZER.encode(_render(messages), add_special_tokens=False)
    assert [token for part in parts for token in part] == whole


def test_text_parts_render_like_a_string() -> None:
    parts = [{"type": "text", "text": "My dog "}, {"type": "text", "text": "is called Rex."}]
    in_parts = TOKENIZER.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert in_parts == _render([{"role": "user", "content": "My dog is called Rex."}])


def test_training_rows_are_what_the_template_gives() -> None:
    encoder = Encoder(TOKENIZER)
    for case in map(recall_case, range(20)):
        expected = TOKENIZER.encode(_render(_conversation(case)), add_special_tokens=False)
        assert case_row(encoder, case).tokens == expected


def test_labels_are_the_replies() -> None:
    encoder = Encoder(TOKENIZER)
    row = encoder.row([Message("user", "Hi"), Message("assistant", "Hello!", learn=True)])
    labels = [label for label in row.labels if label != IGNORED]
    assert TOKENIZER.decode(labels) == "Hello!<|im_end|>"
    unlearned = encoder.row([Message("user", "Hi"), Message("assistant", "Hello!")])
    assert set(unlearned.labels) == {IGNORED}
    assert unlearned.tokens == row.tokens


def test_training_rows_are_full_and_repeatable() -> None:
    encoder = Encoder(TOKENIZER)
    tokens, labels = training_rows(encoder, 11, 3, 512)
    again, _ = training_rows(encoder, 11, 3, 512)
    assert tokens.shape == labels.shape == (3, 512)
    assert tokens.equal(again)
    assert not tokens[0].equal(tokens[1])
