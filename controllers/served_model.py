"""Whether the model that a replica runs can continue a history. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controllers.errors import ModelChanged
from controllers.records import ModelFingerprint
from controllers.session_keys import named

_SHOWN = 12
_WHAT_TO_DO = "Open another session, or deploy the model that the session was begun with."


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of one replica. `vocab_size` is that of its embedding: token ids are below it."""

    fingerprint: ModelFingerprint
    vocab_size: int

    def check(self, session_id: str, made_by: ModelFingerprint | None, history: Sequence[int]) -> None:
        """Raises ModelChanged if this model cannot read `history`. A model with other weights or another chat template
        may continue it: the tokens keep their meaning, and their KV is computed again. O(history).

        `made_by` None: the log does not say which model made the history. Then only the token ids are checked.
        """
        if len(history) and made_by is not None and made_by.tokenizer != self.fingerprint.tokenizer:
            raise ModelChanged(
                f"{named(session_id)} was made with another tokenizer ({made_by.tokenizer[:_SHOWN]}) than that of "
                f"the model served now ({self.fingerprint.tokenizer[:_SHOWN]}): its tokens stand for something else. "
                f"{_WHAT_TO_DO}"
            )
        highest = int(np.asarray(history).max()) if len(history) else -1
        if highest >= self.vocab_size:
            raise ModelChanged(
                f"{named(session_id)} has token id {highest} in its history, and the model served now has "
                f"{self.vocab_size} tokens. {_WHAT_TO_DO}"
            )
