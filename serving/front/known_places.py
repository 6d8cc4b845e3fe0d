"""How whole conversations are recognized, and which replicas have them. A front end remembers its own turns only.

A conversation without a name can be kept in the session log (the setting sessions.unnamed.durable). From its second
turn on it is then a session, whose id is a hash of everything up to the second question. So all front ends find it
without an index. If two conversations have the same beginning, the session follows the one that speaks.

A wrong or missing entry costs computation but never changes an answer: a replica compares what it has with what it is
sent.

A *place* is a point in a prompt, identified by a hash of everything up to it.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from controllers.session_keys import session_key
from serving.text.system_messages import head_len
from serving.wire.turns import ChatPrompt, Prompt, Said, SessionTurn, TextPrompt, TokenPrompt, TurnCall

T = TypeVar("T")

DIGEST_BYTES = 16
MOST_SAID = 256
"""How many of a conversation's newest places are kept, beside the first three. Calls that go back further begin
anew."""
TEXT_PIECE_BYTES = 512
TOKEN_PIECE_BYTES = 128 * 8
"""A prompt without messages has a place after every so many bytes."""
_DURABLE = "unnamed-"
"""How ids of sessions begin that are conversations without a name."""
ASSISTANT = "assistant"


class Affinity(NamedTuple):
    """Which replica a call should preferably go to. `holder` has some of the conversation. If it is None or gone,
    `home` decides: all front ends choose the same replica for the same `home`. `goes_on`: the conversation already has
    an answer."""

    holder: str | None = None
    home: bytes | None = None
    goes_on: bool = False


NOWHERE = Affinity()


@dataclass(slots=True, eq=False)
class _Holder:
    """A replica. Once it is `gone`, its places count as unknown."""

    replica_id: str
    gone: bool = False


class _PerPrompt(Generic[T]):
    """What was computed of prompts, while they are in use: the choices of a request have one prompt in common."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, str], tuple[weakref.ref[Prompt], T]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, prompt: Prompt, tenant: str, adapter: str, compute: Callable[[], T]) -> T:
        key = (id(prompt), tenant, adapter)
        found = self._found.get(key)
        if found is None:
            gone = weakref.ref(prompt, lambda _: self._found.pop(key, None))
            found = self._found[key] = (gone, compute())
        return found[1]


class KnownPlaces:
    """Which replica has which place, for the `capacity` places used last. `unnamed`: conversations without a session
    are recognized, too. `shared`: other front ends get turns of the same conversations. `durable_timeout_s`:
    conversations without a session are kept in the session log, with this idle timeout (None: they are not). Used on
    the front end's event loop only."""

    def __init__(
        self,
        capacity: int,
        *,
        unnamed: bool = True,
        shared: bool = False,
        durable_timeout_s: float | None = None,
    ) -> None:
        self._capacity = capacity
        self._unnamed = unnamed
        self._shared = shared
        self._durable_timeout_s = durable_timeout_s
        self._places: OrderedDict[bytes, _Holder] = OrderedDict()
        self._holders: dict[str, _Holder] = {}
        self._said: _PerPrompt[tuple[Said, ...]] = _PerPrompt()
        self._beginnings: _PerPrompt[list[bytes]] = _PerPrompt()

    def __len__(self) -> int:
        return len(self._places)

    def recognized(self, call: TurnCall) -> TurnCall:
        """The call, with the places that its replica looks for if the call may be a whole conversation."""
        session, prompt = call.session, call.prompt
        wanted = self._unnamed if session is None else session.mode != "append"
        if not wanted or not isinstance(prompt, ChatPrompt) or not call.may_go_on:
            return call
        # The checkpoints of a named session count for all its adapters: its KV is set apart by its chain.
        adapter = call.adapter if session is None else ""
        compute = partial(said_in, prompt, call.tenant, adapter)
        said = self._said.get(prompt, call.tenant, adapter, compute)
        call = replace(call, prompt=replace(prompt, said=said))
        return call if self._durable_timeout_s is None else _in_session(call, self._durable_timeout_s)

    def affinity(self, call: TurnCall) -> Affinity:
        """Where a call without a session, or the session that a call opens, finds most of its conversation."""
        prompt, home, unnamed = call.prompt, _home_of(call), _is_unnamed(call)
        if not isinstance(prompt, ChatPrompt):
            return self._of_text(call) if unnamed else Affinity(home=home)
        if not prompt.said:
            return Affinity(home=home)
        said = _said_behind_head(prompt)
        if home is None and unnamed and self._shared:
            home = said[0].digest
        # If there is a home, a replica that has only the system message and the tools does not count as the holder:
        # other front ends would not look there.
        holder = self._known([each.digest for each in (prompt.said if home is None else said)])
        goes_on = any(message["role"] == ASSISTANT for message in prompt.messages)
        return Affinity(holder, home, goes_on=goes_on)

    def _of_text(self, call: TurnCall) -> Affinity:
        """Plain text or tokens: the replica that last had the longest beginning of it."""
        places, home = self._places_of(call) if self._unnamed else [], _home_of(call)
        if home is None and places and self._shared:
            home = places[0]
        return Affinity(self._known(places), home)

    def _known(self, places: Sequence[bytes]) -> str | None:
        found = (self._places.get(place) for place in reversed(places))
        return next((each.replica_id for each in found if each is not None and not each.gone), None)

    def note(self, call: TurnCall, replica_id: str) -> None:
        """Records that the replica answers the call, and so has all of it."""
        places = self._places_of(call)
        if not places:
            return
        holder = self._holders.setdefault(replica_id, _Holder(replica_id))
        for digest in (*places[:1], *places[-1:]):
            self._places[digest] = holder
            self._places.move_to_end(digest)
        while len(self._places) > self._capacity:
            self._places.popitem(last=False)

    def _places_of(self, call: TurnCall) -> list[bytes]:
        session, prompt = call.session, call.prompt
        if isinstance(prompt, ChatPrompt):
            whole = session is None or session.mode == "full"
            return [said.digest for said in prompt.said] if whole else []
        if session is not None:
            return []
        compute = partial(_beginnings, call, prompt)
        return self._beginnings.get(prompt, call.tenant, call.adapter, compute)

    def forget_replica(self, replica_id: str) -> None:
        """The replica is gone. Its places stay until newer ones push them out: a search through all of them would block
        the event loop."""
        holder = self._holders.pop(replica_id, None)
        if holder is not None:
            holder.gone = True


def said_in(prompt: ChatPrompt, tenant: str, adapter: str = "") -> tuple[Said, ...]:
    """The places before each answer and at the end. If there is a system message or a tool, the first place is after
    these. Reads each message once."""
    messages = prompt.messages
    asked = (tenant, prompt.tools, prompt.template_kwargs, *_apart(adapter))
    spoken = blake2b(_canonical(asked), digest_size=DIGEST_BYTES)
    num_head = head_len(messages)
    places = [Said(0, spoken.digest())] if prompt.tools and not num_head else []
    for count, message in enumerate(messages):
        if message["role"] == ASSISTANT or (count and count == num_head):
            places.append(Said(count, spoken.digest()))
        spoken.update(_canonical(message))
    places.append(Said(len(messages), spoken.digest()))
    return (*places[:3], *places[3:][-MOST_SAID:])


def _in_session(call: TurnCall, timeout_s: float) -> TurnCall:
    """The call in a session that is kept in the log, if it is the second or a later turn of a conversation without a
    session. Most have only one turn."""
    prompt = call.prompt
    assert isinstance(prompt, ChatPrompt)
    said = _said_behind_head(prompt)
    scores_input = call.logprobs is not None and call.logprobs.input_start is not None
    if call.session is not None or len(said) < 2 or scores_input or not call.may_be_kept:
        return call
    session_id = session_key(call.tenant, f"{_DURABLE}{said[1].digest.hex()}")
    return replace(
        call, session=SessionTurn(session_id, mode="full", timeout_s=timeout_s, fallback="unnamed")
    )


def _is_unnamed(call: TurnCall) -> bool:
    return call.session is None or call.session.fallback == "unnamed"


def _home_of(call: TurnCall) -> bytes | None:
    if not call.affinity_key:
        return None
    return blake2b(_canonical((call.tenant, call.affinity_key)), digest_size=DIGEST_BYTES).digest()


def _said_behind_head(prompt: ChatPrompt) -> tuple[Said, ...]:
    """The places after system message and tools. The first is the place before the first answer: it is the same in all
    turns of a conversation."""
    begins_with_head = len(prompt.said) > 1 and prompt.said[0].num_messages <= head_len(prompt.messages)
    return prompt.said[1:] if begins_with_head else prompt.said


def _beginnings(call: TurnCall, prompt: TextPrompt | TokenPrompt) -> list[bytes]:
    """The places of a prompt without messages: after each whole piece, a hash of everything up to there."""
    if isinstance(prompt, TextPrompt):
        kind, size, whole = "text", TEXT_PIECE_BYTES, prompt.text.encode("utf-8", "surrogatepass")
    else:
        kind, size, whole = "tokens", TOKEN_PIECE_BYTES, array("q", prompt.token_ids).tobytes()
    read = blake2b(_canonical((call.tenant, kind, *_apart(call.adapter))), digest_size=DIGEST_BYTES)
    places = []
    for start in range(0, len(whole) - size + 1, size):
        read.update(whole[start : start + size])
        places.append(read.digest())
    return places[:1] + places[1:][-MOST_SAID:]


def _apart(adapter: str) -> tuple[str, ...]:
    """What sets an adapter's places apart. Those of the model itself are as if there were no adapters: they are in the
    log."""
    return (adapter,) if adapter else ()


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
