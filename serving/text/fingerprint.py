"""Which model a replica serves, as the session log records it: hashes that are equal on every machine."""

from __future__ import annotations

import hashlib

from tokenizers import Tokenizer

_HASH_BYTES = 16


def template_hash(template: str) -> str | None:
    """None for an empty template."""
    return _hash(template.encode("utf-8", "surrogatepass")) if template else None


def tokenizer_hash(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """A hash of what each id stands for: the vocabulary with added and special tokens, by id. How a text is cut into
    tokens is left out, because a history is tokens already. So is how the file is written, because another version of
    its library may save it differently. Without a tokenizer the clients decide what ids mean, and all models with the
    same vocabulary size have the same hash."""
    if tokenizer is None:
        return _hash(f"no tokenizer, {vocab_size} ids".encode())
    tokens = sorted(
        (token_id, token) for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
    )
    return _hash(repr(tokens).encode("utf-8", "surrogatepass"))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).hexdigest()
