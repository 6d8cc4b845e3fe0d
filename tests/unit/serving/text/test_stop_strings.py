"""Stop strings are found where a plain search finds them, however the text is cut, and never shown."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.stop_strings import StopMatcher

letters = st.text(alphabet="ab.", max_size=40)
stops = st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), max_size=4)


def plain_search(text: str, words: list[str]) -> tuple[str, str | None]:
    """The slow reference: the text before the first stop string to end. If several end there, the longest counts."""
    for end in range(1, len(text) + 1):
        found = [word for word in words if text[:end].endswith(word)]
        if found:
            word = max(found, key=len)
            return text[: end - len(word)], word
    return text, None


@settings(deadline=None, print_blob=True)
@given(text=letters, words=stops, cuts=st.lists(st.integers(0, 40), max_size=10))
def test_agrees_with_a_plain_search(text: str, words: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    before, matched = plain_search(text, words)
    for keep_stop in (False, True):
        matcher = StopMatcher(words, keep_stop=keep_stop)
        shown = ""
        for piece in pieces:
            shown += matcher.feed(piece)
            assert before.startswith(shown) or (keep_stop and (before + (matched or "")).startswith(shown))
        shown += matcher.flush()
        assert matcher.matched == matched
        assert shown == before + (matched if keep_stop and matched else "")


def test_holds_back_only_what_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("Hello\n") == "Hello"
    assert matcher.feed("you") == "\nyou"
    assert matcher.feed("\n\nUser") == ""
    assert matcher.feed(": hi") == ""
    assert matcher.matched == "\n\nUser:"


def test_nothing_is_held_without_stop_strings() -> None:
    assert StopMatcher([]).feed("text") == "text"


def test_where_nothing_may_match_a_stop_string_is_text() -> None:
    """A stop string that begins there may still end later."""
    matcher = StopMatcher(["ab"])
    shown = matcher.feed("xabxa", may_match=False)
    assert (shown, matcher.matched) == ("xabx", None)
    assert (matcher.feed("b!"), matcher.matched) == ("", "ab")
