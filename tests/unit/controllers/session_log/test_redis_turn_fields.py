"""What is read of a session's many turns in Redis."""

from __future__ import annotations

from redis_server import CLUSTER, RedisServer
from store_turns import SESSION, append_turn, turn_of

from controllers.session_log.redis_store import RedisSessionStore


def test_what_a_rewind_reads_does_not_depend_on_how_long_the_session_is(redis_server: RedisServer) -> None:
    """Each used to read all of the session's turns and notes."""
    store = RedisSessionStore(redis_server.log(), CLUSTER)
    store.open(SESSION)

    def sent_for_a_rewind(index: int, length: int) -> int:
        before = redis_server.client().info("stats")["total_net_output_bytes"]
        append_turn(store, turn_of(index, length, [1] * 10, note=b"n" * 100))
        return int(redis_server.client().info("stats")["total_net_output_bytes"] - before)

    for index in range(10):
        append_turn(store, turn_of(index, 10 * index, [index] * 10, note=b"n" * 100))
    short = sent_for_a_rewind(10, 95)
    for index in range(11, 200):
        append_turn(store, turn_of(index, 10 * index - 5, [index] * 10, note=b"n" * 100))
    assert sent_for_a_rewind(200, 1990) < short + 500
    store.disconnect()
