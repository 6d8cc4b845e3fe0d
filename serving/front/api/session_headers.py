"""The headers that say in which session a request's turn is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header

from serving.front.api.errors import refusal
from serving.front.api.fields import MAX_INT, Name, SessionName
from serving.front.api.hidden_sessions import check_not_hidden
from serving.wire.turns import HistoryMode, SessionTurn

MAX_RETRIES = 1000

SessionHeader = Annotated[SessionName | None, Header(alias="x-session-id")]
ModeHeader = Annotated[HistoryMode | None, Header(alias="x-session-mode")]
"""What the messages are: only new ones (append), the whole history (full), or whichever they look like (auto)."""
TurnHeader = Annotated[int | None, Header(alias="x-session-turn", ge=0, le=MAX_INT)]
"""The number that the turn must have in its session; otherwise it is refused."""
RetriesHeader = Annotated[int | None, Header(alias="x-stainless-retry-count", ge=0, le=MAX_RETRIES)]
"""OpenAI's SDKs count here how often they have sent this call before."""
AffinityHeader = Annotated[str | None, Header(alias="x-session-affinity")]
"""opencode sends one id here and as x-session-id, with its conversation and with requests beside it, such as that for
its title. Such an id names no session."""
IdempotencyHeader = Annotated[Name | None, Header(alias="idempotency-key")]


@dataclass(frozen=True, slots=True)
class SessionHeaders:
    """What a request's headers say of its turn. None: nothing."""

    session_id: str | None
    mode: HistoryMode | None
    expected_turn: int | None
    idempotency_key: str | None
    retries: int | None

    def turn(self, num_calls: int, param: str, *, unsaid_mode: HistoryMode = "auto") -> SessionTurn | None:
        """The turn in the session; None without a session. Then a key has no use, because a retry repeats nothing. If
        there is a key, the count of retries has no use. `param`: the field that says that there are `num_calls`.
        `unsaid_mode`: the mode if the header does not say one. Raises ServiceError."""
        if self.session_id is None:
            for name, said in (("x-session-mode", self.mode), ("x-session-turn", self.expected_turn)):
                if said is not None:
                    raise refusal(f"{name}: says nothing without x-session-id.", name)
            return None
        check_not_hidden(self.session_id, "x-session-id")
        if num_calls > 1:
            raise refusal(f"{param}: a session takes one generation at a time.", param)
        return SessionTurn(
            self.session_id,
            idempotency_key=self.idempotency_key,
            retries=self.retries if self.idempotency_key is None else None,
            expected_turn=self.expected_turn,
            mode=self.mode or unsaid_mode,
        )


async def get_session_headers(
    x_session_id: SessionHeader = None,
    x_session_mode: ModeHeader = None,
    x_session_turn: TurnHeader = None,
    idempotency_key: IdempotencyHeader = None,
    x_stainless_retry_count: RetriesHeader = None,
    x_session_affinity: AffinityHeader = None,
) -> SessionHeaders:
    if x_session_id == x_session_affinity:
        x_session_id = None
    return SessionHeaders(
        x_session_id, x_session_mode, x_session_turn, idempotency_key, x_stainless_retry_count
    )


InSession = Annotated[SessionHeaders, Depends(get_session_headers)]


async def check_no_session(
    x_session_id: SessionHeader = None,
    x_session_mode: ModeHeader = None,
    x_session_turn: TurnHeader = None,
) -> None:
    headers = (
        ("x-session-id", x_session_id),
        ("x-session-mode", x_session_mode),
        ("x-session-turn", x_session_turn),
    )
    for name, said in headers:
        if said is not None:
            raise refusal(
                f"{name}: only what is sent is counted, without a session's history. Send all of it, without {name}.",
                name,
            )


IN_NO_SESSION = [Depends(check_no_session)]
"""Dependencies of routes that count a prompt's tokens, and know no sessions."""
