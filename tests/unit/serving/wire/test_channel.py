"""Two ends of a channel over connections that break: each message arrives once, in order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.wire.channel import ACKNOWLEDGE_EVERY, Channel, ChannelLost, begins, lost_header

Frame = tuple[bytes, bytes]


class Pipe:
    """Two channels and the frames on their way between them."""

    def __init__(self) -> None:
        self.ways: tuple[deque[Frame], deque[Frame]] = (deque(), deque())
        self.ends = tuple(
            Channel(lambda header, body, way=way: way.append((header, body))) for way in self.ways
        )
        self.got: tuple[list[bytes], list[bytes]] = ([], [])

    def arrive(self, source: int) -> bool:
        """Delivers the next frame from end `source`. Returns False if there is none."""
        if not self.ways[source]:
            return False
        message = self.ends[1 - source].take(*self.ways[source].popleft())
        if message is not None:
            self.got[1 - source].append(message)
        return True

    def settle(self) -> None:
        while self.arrive(0) or self.arrive(1):
            pass

    def break_off(self, arrived: tuple[int, int] = (0, 0)) -> None:
        """Breaks the connection. Of the frames on their way, only the first `arrived` of each end arrive. End 0, which
        connects, then resumes."""
        for source, count in enumerate(arrived):
            for _ in range(count):
                self.arrive(source)
        for way in self.ways:
            way.clear()
        self.ends[0].resume()


def test_messages_arrive_in_order() -> None:
    pipe = Pipe()
    for body in (b"a", b"b", b"c"):
        pipe.ends[0].send(body)
    pipe.ends[1].send(b"x")
    pipe.settle()
    assert pipe.got == ([b"x"], [b"a", b"b", b"c"])


def test_what_a_broken_connection_lost_is_sent_again() -> None:
    pipe = Pipe()
    for body in (b"a", b"b", b"c"):
        pipe.ends[0].send(body)
        pipe.ends[1].send(body.upper())
    pipe.break_off((1, 2))
    pipe.settle()
    assert pipe.got == ([b"A", b"B", b"C"], [b"a", b"b", b"c"])


def test_a_gap_is_noticed_without_a_new_connection() -> None:
    pipe = Pipe()
    pipe.ends[1].send(b"a")
    pipe.ways[1].clear()
    pipe.ends[1].send(b"b")
    pipe.settle()
    assert pipe.got[0] == [b"a", b"b"]


def test_a_sign_of_life_tells_what_was_lost_at_the_end() -> None:
    pipe = Pipe()
    pipe.ends[1].send(b"a")
    pipe.ways[1].clear()
    pipe.ends[1].state()
    pipe.settle()
    assert pipe.got[0] == [b"a"]


def test_an_end_that_resumes_is_answered_even_if_nothing_was_lost() -> None:
    """The other end counted the connection as broken until its next sign of life, for two seconds."""
    pipe = Pipe()
    pipe.break_off()
    assert pipe.arrive(0)
    assert len(pipe.ways[1]) == 1
    pipe.settle()
    assert not any(pipe.ways), "the answer is not answered"


def test_messages_are_kept_until_the_other_end_has_them() -> None:
    pipe = Pipe()
    for _ in range(ACKNOWLEDGE_EVERY - 1):
        pipe.ends[0].send(b"ab")
    pipe.settle()
    assert (pipe.ends[0].unread, pipe.ends[0].unread_bytes) == (
        ACKNOWLEDGE_EVERY - 1,
        2 * ACKNOWLEDGE_EVERY - 2,
    )
    pipe.ends[0].send(b"ab")
    pipe.settle()
    assert (pipe.ends[0].unread, pipe.ends[0].unread_bytes) == (0, 0)


def test_any_message_acknowledges() -> None:
    pipe = Pipe()
    pipe.ends[0].send(b"a")
    pipe.settle()
    pipe.ends[1].send(b"x")
    pipe.settle()
    assert pipe.ends[0].unread == 0


def test_an_end_that_has_forgotten_the_channel_says_so() -> None:
    pipe = Pipe()
    with pytest.raises(ChannelLost):
        pipe.ends[0].take(lost_header(), b"")


def test_an_end_that_begins_anew_is_not_taken_for_the_one_before() -> None:
    pipe = Pipe()
    pipe.ends[0].send(b"a")
    pipe.settle()
    pipe.ends[1].send(b"x")
    pipe.settle()
    pipe.ends[0].send(b"b")
    header, body = pipe.ways[0].popleft()
    assert not begins(header)
    with pytest.raises(ChannelLost):
        Channel(lambda *_: None).take(header, body)


def test_a_first_frame_may_come_late() -> None:
    pipe = Pipe()
    pipe.ends[0].send(b"a")
    pipe.ends[0].send(b"b")
    pipe.ways[0].popleft()
    assert begins(pipe.ways[0][0][0])
    pipe.settle()
    assert pipe.got[1] == [b"a", b"b"]


@pytest.mark.parametrize("header", [b"", b"short", b"\x00" * 64])
def test_what_is_no_header_loses_the_channel(header: bytes) -> None:
    with pytest.raises(ChannelLost):
        Channel(lambda *_: None).take(header, b"")


def test_an_acknowledgement_of_what_was_never_sent_loses_the_channel() -> None:
    pipe = Pipe()
    pipe.ends[0].send(b"a")
    pipe.settle()
    pipe.ends[1].send(b"x")
    with pytest.raises(ChannelLost):
        Channel(lambda *_: None).take(*pipe.ways[1][-1])


events = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 1)),
        st.tuples(st.just("arrive"), st.integers(0, 1)),
        st.tuples(st.just("state"), st.integers(0, 1)),
        st.tuples(st.just("break"), st.tuples(st.integers(0, 3), st.integers(0, 3))),
    ),
    max_size=200,
)


@given(events)
def test_whatever_breaks_each_message_arrives_once_and_in_order(schedule: list[tuple[str, object]]) -> None:
    pipe = Pipe()
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    for kind, what in schedule:
        match kind, what:
            case "break", (int(), int()) as arrived:
                pipe.break_off(arrived)
            case "send", int(end):
                sent[end].append(b"%d" % len(sent[end]))
                pipe.ends[end].send(sent[end][-1])
            case "arrive", int(end):
                pipe.arrive(end)
            case "state", int(end):
                pipe.ends[end].state()
        assert pipe.got[0] == sent[1][: len(pipe.got[0])]
        assert pipe.got[1] == sent[0][: len(pipe.got[1])]
    pipe.break_off()
    pipe.settle()
    assert pipe.got == (sent[1], sent[0])
    for end in pipe.ends:
        end.state()
    pipe.settle()
    assert [end.unread for end in pipe.ends] == [0, 0]
