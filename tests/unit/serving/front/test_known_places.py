"""Front ends look for a conversation at the same replica, although they do not hear of each other's turns."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import SamplingParams
from serving.front import known_places
from serving.front.known_places import KnownPlaces
from serving.wire.turns import ChatPrompt, SessionTurn, TextPrompt, TokenPrompt, TurnCall

RULES = {"role": "system", "content": "Be short."}
TOOL = {"type": "function", "function": {"name": "look"}}


def call(front_end: KnownPlaces, *texts: str, affinity_key: str = "", **prompt: Any) -> TurnCall:
    """A turn of a conversation. After the rules, `texts` are questions and answers alternately."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    asked = ChatPrompt((RULES, *said), **prompt)
    return front_end.recognized(TurnCall("r", asked, SamplingParams(), affinity_key=affinity_key))


@pytest.mark.parametrize("prompt", [{}, {"tools": (TOOL,)}], ids=["plain", "tools"])
def test_a_conversation_has_one_home_in_all_its_turns(prompt: dict[str, Any]) -> None:
    first, second = KnownPlaces(100, shared=True), KnownPlaces(100, shared=True)
    begins = first.affinity(call(first, "one", **prompt))
    assert (begins.holder, begins.goes_on) == (None, False)
    on = second.affinity(call(second, "one", "answer", "two", "answer", "three", **prompt))
    assert (on.home, on.holder, on.goes_on) == (begins.home, None, True)
    other = second.affinity(call(second, "another", **prompt))
    assert other.home not in (None, begins.home), "with the same rules"


def test_a_long_conversation_keeps_its_home() -> None:
    front_end = KnownPlaces(100, shared=True)
    texts = [str(number) for number in range(2001)]
    assert front_end.affinity(call(front_end, *texts)).home == front_end.affinity(call(front_end, "0")).home


def test_what_a_front_end_knows_itself_comes_first() -> None:
    front_end = KnownPlaces(100, shared=True)
    front_end.note(call(front_end, "one"), "a")
    assert front_end.affinity(call(front_end, "one", "answer", "two")).holder == "a"
    assert front_end.affinity(call(front_end, "other")).holder is None
    alone = KnownPlaces(100)
    alone.note(call(alone, "one"), "a")
    assert alone.affinity(call(alone, "other")) == ("a", None, False), "it has the rules"


def test_calls_of_one_key_have_one_home() -> None:
    front_end = KnownPlaces(100)
    one, other = (front_end.affinity(call(front_end, text, affinity_key="k")) for text in ("one", "other"))
    assert one.home == other.home is not None
    assert front_end.affinity(call(front_end, "one", affinity_key="l")).home != one.home
    assert front_end.affinity(call(front_end, "one")).home is None


def test_a_key_only_says_where_a_new_conversation_goes() -> None:
    """Where a conversation is, or which session it is, does not follow from a key."""
    front_end = KnownPlaces(100, shared=True)
    asked = call(front_end, "one", affinity_key="k")
    assert front_end.affinity(asked).home != front_end.affinity(call(front_end, "one")).home
    front_end.note(call(front_end, "one", affinity_key="l"), "a")
    on = call(front_end, "one", "answer", "two", affinity_key="k")
    assert front_end.affinity(on).holder == "a"
    assert front_end.affinity(replace(on, session=SessionTurn("s"))) == front_end.affinity(on)
    kept = KnownPlaces(100, durable_timeout_s=60.0)
    named = [call(kept, "one", "answer", "two", affinity_key=key).session for key in ("k", "l", "")]
    assert named[0] == named[1] == named[2] is not None


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_plain_text_goes_where_its_beginning_was(kind: str) -> None:
    """The requests of a conversation in plain text used to go to any of the replicas."""

    def asked(length: int, begins: int = 0, **fields: Any) -> TurnCall:
        ids = [begins, *range(1, length)]
        prompt = TokenPrompt(tuple(ids)) if kind == "tokens" else TextPrompt("".join(map("{:4}".format, ids)))
        return TurnCall("r", prompt, SamplingParams(), **fields)

    front_end, other = KnownPlaces(100, shared=True), KnownPlaces(100, shared=True)
    assert front_end.affinity(asked(20)) == (None, None, False), "too short to tell"
    begun = front_end.affinity(asked(1000))
    assert begun.holder is None
    front_end.note(asked(1000), "a")
    front_end.note(asked(1000, begins=7), "b")
    assert front_end.affinity(asked(1100)).holder == front_end.affinity(asked(1_000_000)).holder == "a"
    assert front_end.affinity(asked(1100, begins=7)).holder == "b"
    for differing in (asked(1100, begins=8), asked(1100, tenant="t"), asked(1100, adapter="a")):
        assert front_end.affinity(differing).holder is None
    assert other.affinity(asked(1100)) == (None, begun.home, False), "they look at the same one"
    disabled = KnownPlaces(100, unnamed=False)
    disabled.note(asked(1000), "a")
    assert disabled.affinity(asked(1100)).holder is None


def test_a_whole_conversation_that_is_stored_anew_goes_where_it_was() -> None:
    """Each such request is a session of its own. It used to be placed by free KV alone."""

    def stored(session_id: str, *texts: str) -> TurnCall:
        asked = replace(call(front_end, *texts), session=SessionTurn(session_id, create=True, mode="full"))
        return front_end.recognized(asked)

    front_end = KnownPlaces(100)
    assert front_end.affinity(stored("s", "one")).holder is None
    front_end.note(stored("s", "one"), "a")
    on = stored("t", "one", "answer", "two")
    assert front_end.affinity(on).holder == "a"
    front_end.note(replace(on, session=SessionTurn("t", create=True)), "b")
    assert front_end.affinity(on).holder == "a", "new messages alone are no conversation"
    assert front_end.affinity(on).home is None
    keyed = front_end.affinity(replace(stored("u", "another"), affinity_key="k"))
    assert keyed.holder is None, "it has only the rules"
    assert keyed.home == front_end.affinity(call(front_end, "other", affinity_key="k")).home is not None


def test_a_conversation_that_is_kept_begins_where_it_would_be_without() -> None:
    """Its second turn may come through another front end than its first."""
    kept, other = (KnownPlaces(100, shared=True, durable_timeout_s=each) for each in (60.0, None))
    second = call(kept, "one", "answer", "two")
    assert second.session is not None
    assert kept.affinity(second) == other.affinity(call(other, "one", "answer", "two"))
    assert kept.affinity(second).home is not None


def test_a_replica_that_is_gone_has_nothing_and_who_had_the_conversation_before_it_is_known() -> None:
    front_end = KnownPlaces(100)
    front_end.note(call(front_end, "one", "answer", "two"), "a")
    front_end.note(call(front_end, "one", "answer", "two", "answer", "three"), "b")
    on = call(front_end, "one", "answer", "two", "answer", "three", "answer", "four")
    assert front_end.affinity(on).holder == "b"
    front_end.forget_replica("b")
    front_end.forget_replica("never known")
    assert front_end.affinity(on).holder == "a"
    front_end.note(on, "b")
    assert front_end.affinity(on).holder == "b", "it is there again"


def test_the_choices_of_a_request_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices with 11 MB of tools took three seconds of a front end."""
    hashed: list[object] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        hashed.append(args)
        return blake2b(*args, **kwargs)

    monkeypatch.setattr(known_places, "blake2b", noted)
    front_end = KnownPlaces(100)
    for prompt in (ChatPrompt((RULES,), tools=(TOOL,)), TextPrompt("long " * 1000), TokenPrompt((7,) * 1000)):
        hashed.clear()
        choices = [TurnCall(f"r-{index}", prompt, SamplingParams()) for index in range(3)]
        for choice in choices:
            recognized = front_end.recognized(choice)
            front_end.affinity(recognized)
            front_end.note(recognized, "a")
        assert len(hashed) == 1


def test_of_a_prompt_that_is_over_nothing_is_kept() -> None:
    front_end = KnownPlaces(100)
    chat, text = ChatPrompt((RULES,)), TextPrompt("long " * 1000)
    places = set()
    for tenant, adapter in (("", ""), ("acme", ""), ("", "poet")):
        for prompt in (chat, text):
            one = TurnCall("r", prompt, SamplingParams(), tenant=tenant, adapter=adapter)
            places.add(front_end._places_of(front_end.recognized(one))[-1])
    assert len(places) == 6, "a tenant and an adapter have places of their own"
    assert (len(front_end._said), len(front_end._beginnings)) == (3, 3)
    del chat, text, prompt, one
    assert (len(front_end._said), len(front_end._beginnings)) == (0, 0)
