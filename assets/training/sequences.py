"""Turns dialogues into token rows: one endless dialogue per row, cut where the row is full.

A row never holds two dialogues. So attention needs only the causal mask, and positions begin at 0 as when the model is
served.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from assets.training.dialogues import Message, RecallCase, training_dialogue
from assets.training.train_tokenizer import TURN_END, TURN_START

IGNORED = -100
CHUNK_CHARACTERS = 4


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    labels: list[int]


class Encoder:
    """Encodes messages exactly as the chat template and tokenizer together would."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._start = int(tokenizer.convert_tokens_to_ids(TURN_START))
        self._end = int(tokenizer.convert_tokens_to_ids(TURN_END))
        self._newline: list[int] = self._backend.encode("\n").ids

    def row(self, messages: Sequence[Message]) -> Row:
        """Tokens and labels. A label stands at the position of its token; the trainer shifts labels."""
        texts = self._backend.encode_batch([f"{message.role}\n{message.content}" for message in messages])
        tokens: list[int] = []
        labels: list[int] = []
        for message, text in zip(messages, texts, strict=True):
            body = [*text.ids, self._end]
            tokens += [self._start, *body, *self._newline]
            # The prompt gives the role name and the line break. What the model writes begins after them.
            given = 1 + text.tokens.index("\u010a") + 1
            wanted = body[given - 1 :] if message.learn else [IGNORED] * (len(body) - given + 1)
            labels += [IGNORED] * given + wanted + [IGNORED] * len(self._newline)
        return Row(tokens, labels)


def training_rows(
    encoder: Encoder, first_seed: int, rows: int, length: int, far_share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each [rows, length], of the dialogues from ``first_seed`` on."""
    tokens, labels = [], []
    for seed in range(first_seed, first_seed + rows):
        messages: list[Message] = []
        characters = 0
        for message in training_dialogue(seed, far=random.Random(f"far {seed}").random() < far_share):
            messages.append(message)
            characters += len(message.content) + CHUNK_CHARACTERS * 4
            if characters > length * CHUNK_CHARACTERS * 2:
                break
        row = encoder.row(messages)
        if len(row.tokens) < length:
            raise ValueError(f"dialogue {seed} is shorter than {length} tokens")
        tokens.append(row.tokens[:length])
        labels.append(row.labels[:length])
    return torch.tensor(tokens), torch.tensor(labels)


def drill_row(rng: random.Random, words: Sequence[int], length: int, context: int) -> Row:
    """A row of spans of ``words``. Most spans repeat an earlier one.

    Only repeats have labels, and only after the ``context`` tokens that tell which span it is.
    """
    spans: list[list[int]] = []
    row = Row([], [])
    while len(row.tokens) < length:
        if not spans or rng.random() < 0.4:
            spans.append([rng.choice(words) for _ in range(rng.randint(3, 12))])
            row.tokens.extend(spans[-1])
            row.labels.extend([IGNORED] * len(spans[-1]))
        else:
            span = rng.choice(spans)
            row.tokens.extend(span)
            row.labels.extend([IGNORED] * context + span[context:])
    return Row(row.tokens[:length], row.labels[:length])


def drill_rows(
    vocabulary: int, first_seed: int, rows: int, length: int, narrow: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each [rows, length]. No token with a label can be guessed without looking back.

    ``narrow`` draws every second row from a few dozen tokens, so that one token is not enough to find its span.
    """
    drilled = []
    for seed in range(first_seed, first_seed + rows):
        rng = random.Random(f"drill {seed}")
        words: Sequence[int] = range(3, vocabulary)
        context = 1
        if narrow and rng.random() < 0.5:
            words, context = rng.sample(words, rng.randint(40, 160)), 2
        drilled.append(drill_row(rng, words, length, context))
    return torch.tensor([row.tokens for row in drilled]), torch.tensor([row.labels for row in drilled])


def case_row(encoder: Encoder, case: RecallCase) -> Row:
    """A held-out dialogue with the generator's replies. Only the last reply has labels."""
    messages = [Message("system", case.system)] if case.system else []
    last = len(case.references) - 1
    for index, (user, reply) in enumerate(zip(case.user_messages, case.references, strict=True)):
        messages += [Message("user", user), Message("assistant", reply, learn=index == last)]
    return encoder.row(messages)
