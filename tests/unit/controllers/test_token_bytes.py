from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.tokens import count_tokens, encode_tokens, unpack_tokens


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_round_trip(token_ids: list[int]) -> None:
    data = encode_tokens(token_ids)
    assert unpack_tokens(data).tolist() == token_ids
    assert count_tokens(data) == len(token_ids)


def test_layout_is_little_endian_uint32() -> None:
    assert encode_tokens([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_out_of_range_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        encode_tokens([token_id])


def test_broken_data_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of item size"):
        unpack_tokens(b"abc")
