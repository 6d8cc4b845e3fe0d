"""The attention that the benchmark gives to transformers where it has no flash kernel of its own."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import peer

CPU = torch.device("cpu")


def test_packed_sequences_attend_to_their_own_keys_from_the_end() -> None:
    generator = torch.Generator().manual_seed(3)
    query_NHD = torch.randn(6, 4, 8, generator=generator)
    key_TKD, value_TKD = (torch.randn(12, 2, 8, generator=generator) for _ in range(2))
    starts = (torch.tensor([0, 2, 3, 6, 6]), torch.tensor([0, 5, 6, 12, 12]))  # the last sequence is padding
    found_NHD = peer.one_by_one(query_NHD, key_TKD, value_TKD, starts, (3, 6), 0.4)
    seen = [(0, 4), (0, 5), (5, 6), (6, 10), (6, 11), (6, 12)]
    for row, (begin, end) in enumerate(seen):
        for head in range(4):
            keys_TD, values_TD = (each[begin:end, head // 2] for each in (key_TKD, value_TKD))
            shares_T = torch.softmax(keys_TD @ query_NHD[row, head] * 0.4, 0)
            torch.testing.assert_close(found_NHD[row, head], shares_T @ values_TD, atol=1e-5, rtol=1e-5)


def test_it_is_lent_only_where_it_fits() -> None:
    if not peer.takes_read_index():
        with pytest.raises(peer.PeerUnavailable, match="transformers"):
            peer.register_flash(CPU)
        return
    peer.register_flash(CPU)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[peer.FLASH_NAME] is peer.flash_forward


def test_without_a_card_the_kernel_is_not_there() -> None:
    with pytest.raises(peer.PeerUnavailable, match="flash kernel"):
        peer.check_flash(CPU)
