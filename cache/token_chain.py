"""TokenChain: which KV a sequence's pages hold. Each page has a chain hash; equal hash, equal KV.

A page's KV depends on every token before its end, on the model, and on how KV is kept. Its chain hash depends on the
same: h(i) = BLAKE2b(key, h(i-1), tokens of page i), 16 bytes. The root, h(-1), is made of the namespace: tenants, and
what is applied to the weights. The key is made of the KVIdentity and the page size.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from cache.distinct_tokens import DistinctTokens

DIGEST_BYTES = 16
_SCHEME = "kedge-kv-2"
_TOKEN = np.dtype("<u4")  # on every machine, since replicas compare hashes
_TYPECODE = next(code for code in "IL" if array(code).itemsize == _TOKEN.itemsize)


class Tokens(Protocol):
    """A sequence's token ids, read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Sequence[int] | NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Everything that KV depends on except namespace and tokens.

    `weights` is the fingerprint of the model's weights, `kv_format` says how a token's KV is kept (types, heads,
    sizes). Replicas that agree on both give equal pages equal hashes. The key is made of these values, so it is no
    secret. Since the namespace is in every hash, it takes 2**128 tries to find a page of one tenant that has the hash
    of another's.
    """

    weights: str = ""
    kv_format: str = ""

    def chain(self, namespace: str, page_size: int) -> TokenChain:
        """The empty chain of a sequence of this namespace."""
        kept = json.dumps([_SCHEME, self.weights, self.kv_format, page_size])
        key = blake2b(kept.encode(), digest_size=32).digest()
        owner = json.dumps(namespace)
        root = blake2b(owner.encode(), key=key, digest_size=DIGEST_BYTES, person=b"kedge-kv-root")
        return TokenChain(key, root.digest(), page_size)


ANY_KV = KVIdentity()
"""For books whose pages are never compared with others."""


class ChainedTokens(Sequence[int]):
    """A live view of a chain's tokens, to be read: they grow and are cut with the chain. A slice costs its length."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytearray) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // _TOKEN.itemsize

    @overload
    def __getitem__(self, index: int, /) -> int: ...

    @overload
    def __getitem__(self, index: slice, /) -> array[int]: ...

    def __getitem__(self, index: int | slice, /) -> int | array[int]:
        if isinstance(index, int):
            at = range(len(self))[index] * _TOKEN.itemsize
            return int.from_bytes(self._packed[at : at + _TOKEN.itemsize], "little")
        start, end, step = index.indices(len(self))
        if step != 1:
            return self[:][index]
        part = array(_TYPECODE, self._packed[start * _TOKEN.itemsize : end * _TOKEN.itemsize])
        if sys.byteorder == "big":
            part.byteswap()
        return part

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])


class TokenChain:
    """A sequence's tokens, and the chain hashes of its pages. Takes 4 bytes for each token and 16 for each page.

    Owned by the owner of the sequence; lent for reading only.
    """

    __slots__ = ("_digests", "_distinct", "_key", "_root", "_tokens", "page_size")

    def __init__(self, key: bytes, root: bytes, page_size: int) -> None:
        self._key = key
        self._root = root
        self._digests = bytearray()  # of the whole pages
        self._tokens = bytearray()
        self._distinct: DistinctTokens | None = None  # kept from the first call of `distinct` on
        self.page_size = page_size

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._tokens) // _TOKEN.itemsize

    @property
    def num_pages(self) -> int:
        """Pages, including a partly filled last one."""
        return -(-len(self) // self.page_size)

    def page_hash(self, index: int) -> bytes:
        """The chain hash of page `index`. That of a partly filled last page is over the tokens it has so far.

        Raises IndexError.
        """
        if not 0 <= index < self.num_pages:
            raise IndexError(f"there is no page {index} in {len(self)} tokens")
        if index < self._num_hashed:
            return self._link(index)
        return self._hash(self._link(index - 1), index)

    @property
    def tokens(self) -> ChainedTokens:
        """All of them; the view follows later changes."""
        return ChainedTokens(self._tokens)

    def extend(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Appends tokens; costs their number."""
        self._tokens += np.asarray(tokens, dtype=_TOKEN).tobytes()
        link = self._link(self._num_hashed - 1)
        for index in range(self._num_hashed, len(self) // self.page_size):
            link = self._hash(link, index)
            self._digests += link

    def cut(self, length: int) -> None:
        """Drops the tokens past the first `length`."""
        if length < len(self):
            del self._tokens[length * _TOKEN.itemsize :]
            del self._digests[length // self.page_size * DIGEST_BYTES :]
            if self._distinct is not None:
                self._distinct.cut(length)

    def prefix(self, length: int) -> TokenChain:
        """A copy of the first `length` tokens, for another owner."""
        copy = TokenChain(self._key, self._root, self.page_size)
        copy._tokens[:] = self._tokens[: length * _TOKEN.itemsize]
        copy._digests[:] = self._digests[: len(copy) // self.page_size * DIGEST_BYTES]
        return copy

    def distinct(self) -> NDArray[np.uint32]:
        """Each token that occurs, once: a view, valid until the chain next changes. Only for the owner. Costs the
        tokens added since the last call, and one pass over the vocabulary at most."""
        if self._distinct is None:
            self._distinct = DistinctTokens()
        self._distinct.extend(self._read(self._distinct.length, len(self)))
        return self._distinct.ids

    def common_len(self, other: TokenChain) -> int:
        """How many leading tokens both have in common: 0 if they are of different namespaces or models.

        Looks at one hash if all agree, else at O(log pages), and at the tokens of one page.
        """
        if (self._key, self._root, self.page_size) != (other._key, other._root, other.page_size):
            return 0
        start = self._num_common(other) * self.page_size
        end = min(len(self), len(other), start + self.page_size)
        differs = np.flatnonzero(self._read(start, end) != other._read(start, end))
        return start + int(differs[0]) if len(differs) else end

    @property
    def _num_hashed(self) -> int:
        return len(self._digests) // DIGEST_BYTES

    def _num_common(self, other: TokenChain) -> int:
        """How many leading whole pages both have in common. Where a link is equal, all before it are."""
        equal, differs = 0, min(self._num_hashed, other._num_hashed) + 1
        probe = differs - 1  # most often all are equal
        while differs - equal > 1:
            if self._link(probe - 1) == other._link(probe - 1):
                equal = probe
            else:
                differs = probe
            probe = (equal + differs) // 2
        return equal

    def _link(self, index: int) -> bytes:
        """The hash that the page after page `index` is chained to."""
        if index < 0:
            return self._root
        return bytes(self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def _hash(self, link: bytes, index: int) -> bytes:
        num_bytes = self.page_size * _TOKEN.itemsize
        tokens = self._tokens[index * num_bytes : (index + 1) * num_bytes]
        return blake2b(link + tokens, key=self._key, digest_size=DIGEST_BYTES).digest()

    def _read(self, start: int, end: int) -> NDArray[np.uint32]:
        part = self._tokens[start * _TOKEN.itemsize : end * _TOKEN.itemsize]
        return np.frombuffer(part, dtype=_TOKEN)

    def __repr__(self) -> str:
        last = self.page_hash(self.num_pages - 1).hex() if len(self) else "none"
        return f"TokenChain({len(self)} tokens, last page {last})"
