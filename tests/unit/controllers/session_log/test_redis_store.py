"""What is special about a session log in Redis: which controller may write, what Redis is asked to keep, and what its
failures lead to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from manual_clock import ManualClock
from redis_server import CLUSTER, RedisServer
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.cluster import Cluster
from controllers.errors import SessionNotFound, SessionTakenOver, StaleEpoch, StoreError
from controllers.records import ReplicaStatus
from controllers.session_keys import tenant_in
from controllers.session_log import circuit_breaker, redis_log
from controllers.session_log.log_cipher import KEY_BYTES, LogCipher
from controllers.session_log.redis_store import RedisSessionStore
from controllers.settings import REDIS_PASSWORD, ClusterSettings, RedisLogSettings

ROOT = Path(__file__).resolve().parents[4]
Changes = Sequence[tuple[Sequence[redis_log.Command], redis_log.Guards]]


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that a test may kill or freeze. It keeps every write."""
    server = RedisServer("--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.stop()


@pytest.fixture
def log(redis_server: RedisServer) -> RedisLogSettings:
    return redis_server.log()


def test_the_last_controller_of_a_cluster_is_its_writer(log: RedisLogSettings) -> None:
    """The former writer may be a controller that only seemed dead."""
    former = RedisSessionStore(log, CLUSTER)
    former.open(SESSION)
    store = RedisSessionStore(log, CLUSTER)
    for change in (
        lambda: append_turn(former, turn_of(0, 0, [1])),
        lambda: former.assign("s", "b", 2),
        lambda: former.touch("s", 1.0),
        lambda: former.close("s"),
        lambda: former.open(replace(SESSION, session_id="other")),
        lambda: former.changes(),
    ):
        with pytest.raises(
            StoreError, match=rf"this cluster has taken it over.*{log.name} in Redis at unix://"
        ):
            change()
    assert store.load("s") == SESSION
    assert [entry.session_id for entry in list(store.load_all_entries())] == ["s"]
    append_turn(store, turn_of(0, 0, [1]))
    former.disconnect()
    store.disconnect()


def test_logs_of_other_names_are_apart(redis_server: RedisServer) -> None:
    names = ["a", "a:b", "a}b", "{a"]
    stores = [RedisSessionStore(redis_server.log(name), CLUSTER) for name in names]
    for index, store in enumerate(stores):
        store.open(SESSION)
        append_turn(store, turn_of(0, 0, [index]))
    assert [history_of(store) for store in stores] == [[0], [1], [2], [3]]
    assert stores[0].close("s")
    assert [len(list(store.load_all_entries())) for store in stores] == [0, 1, 1, 1]
    for store in stores:
        store.disconnect()


def test_a_closed_session_leaves_nothing(redis_server: RedisServer, log: RedisLogSettings) -> None:
    store = RedisSessionStore(log, CLUSTER)
    store.open(SESSION)
    for index in range(12):
        append_turn(store, turn_of(index, index, [index], idempotency_key=f"k{index}"))
    store.close("s")
    store.disconnect()
    with redis_server.client() as client:
        left = {key.rpartition(b"}:")[2] for key in client.scan_iter() if log.name.encode() in key}
    assert left == {b"layout", b"writers", b"alive:cluster", b"epoch_floor"}


def test_the_documented_command_forgets_all_sessions(
    redis_server: RedisServer, log: RedisLogSettings
) -> None:
    """Keys of tenants' sessions have a space, and ids may have quotes."""
    store = RedisSessionStore(log, CLUSTER)
    for session_id in ("s", "tenant s", "tenant it's"):
        store.open(replace(SESSION, session_id=session_id, tenant=tenant_in(session_id)))
    store.disconnect()
    page = (ROOT / "docs" / "operations" / "redis.md").read_text()
    (command,) = (line.strip() for line in page.splitlines() if "redis-cli --scan" in line)
    command = command.replace("kedge-controller", log.name).replace(
        "redis-cli", f"redis-cli -s {redis_server.directory}/redis.sock"
    )
    subprocess.run(command, shell=True, check=True)
    with redis_server.client() as client:
        assert [key for key in client.scan_iter() if log.name.encode() in key] == []


def test_rewound_turns_are_deleted(redis_server: RedisServer, log: RedisLogSettings) -> None:
    store = RedisSessionStore(log, CLUSTER)
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    for index in range(1, 50):
        append_turn(store, turn_of(index, 2, [3, 4, index]))
    assert history_of(store) == [1, 2, 3, 4, 49]
    with redis_server.client() as client:
        (turns,) = [key for key in client.scan_iter() if log.name.encode() in key and b"turns" in key]
        assert client.hlen(turns) == 2
    store.disconnect()


def test_what_is_committed_outlives_redis(own_server: RedisServer) -> None:
    log = own_server.log()
    store = RedisSessionStore(log, CLUSTER)
    store.open(SESSION)
    for index in range(20):
        append_turn(store, turn_of(index, index, [index]))
    own_server.kill()
    with pytest.raises(StoreError):
        append_turn(store, turn_of(20, 20, [20]))
    own_server.start()
    append_turn(store, turn_of(20, 20, [20]))
    assert history_of(store) == list(range(21))
    store.disconnect()


def test_a_redis_that_came_back_empty_is_not_written_to() -> None:
    """The ledger knows sessions that the empty log does not have."""
    server = RedisServer()
    try:
        store = RedisSessionStore(server.log(), CLUSTER)
        store.open(SESSION)
        server.kill()
        server.start()
        with pytest.raises(StoreError, match="emptied"):
            store.open(SESSION)
        store.disconnect()
    finally:
        server.stop()


def after_probes(timer: ManualClock, work: Callable[[], object]) -> None:
    """Does the work once the server is found again. On a busy machine that may take one of the longer probes."""
    for _ in range(2 * circuit_breaker.PATIENT_EVERY):
        timer.advance(circuit_breaker.REST_S)
        with suppress(StoreError):
            work()
            return
    raise AssertionError("it was not found back")


def test_a_frozen_redis_is_waited_for_once_and_its_return_is_seen(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call used to wait for Redis in turn, for two seconds each, and so did everybody who asked the controller."""
    monkeypatch.setattr(redis_log, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(circuit_breaker, "PROBE_S", 0.05)
    timer = ManualClock()
    store = RedisSessionStore(own_server.log(), CLUSTER, timer=timer)
    store.open(SESSION)
    own_server.pause()
    with pytest.raises(StoreError, match="Timeout"):
        append_turn(store, turn_of(0, 0, [1]))
    probes = 0
    for number in range(1000):
        if number % 250 == 0:
            timer.advance(circuit_breaker.REST_S)
            probes += 1
        with pytest.raises(StoreError, match="did not answer a moment ago"):
            append_turn(store, turn_of(0, 0, [1]))
    assert probes == 4
    own_server.go_on()
    after_probes(timer, lambda: append_turn(store, turn_of(0, 0, [1])))
    assert history_of(store) == [1], "whether or not it was written while nobody listened"
    store.disconnect()


def test_a_redis_that_was_unreachable_is_probed_with_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the probe were refused for lack of rights, the log would stay away forever."""
    monkeypatch.setattr(redis_log, "TIMEOUT_S", 0.3)
    monkeypatch.setenv(REDIS_PASSWORD, "secret")
    server = RedisServer("--requirepass", "secret")
    try:
        timer = ManualClock()
        store = RedisSessionStore(server.log(), CLUSTER, timer=timer)
        server.pause()
        with pytest.raises(StoreError, match="Timeout"):
            store.open(SESSION)
        server.go_on()
        after_probes(timer, lambda: list(store.load_all_entries()))
        store.disconnect()
    finally:
        server.stop()


def test_damage_is_noticed(
    redis_server: RedisServer, log: RedisLogSettings, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisSessionStore(log, CLUSTER)
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2], idempotency_key="k"))
    with redis_server.client() as client:
        keys = {
            key.split(b"}:")[1].split(b":")[0]: key for key in client.scan_iter() if log.name.encode() in key
        }
        for kind, reason in ((b"results", "what turn 0 answered"), (b"turns", "tokens of session 's'")):
            client.delete(keys[kind])
            with pytest.raises(StoreError, match=reason):
                store.load("s")
        for text in ("nothing", "{}", '{"kept": [], "entry": {"x": 1}}'):
            client.set(keys[b"session"], text)
            for read in (lambda: store.load("s"), lambda: store.find("s"), lambda: store.close("s")):
                with pytest.raises(StoreError, match="cannot be read"):
                    read()
            assert list(store.load_all_entries()) == []
        client.delete(keys[b"session"])
        assert list(store.load_all_entries()) == []
    assert caplog.text.count("session 's' is passed over") == 1
    store.disconnect()


def test_a_session_whose_key_is_gone_keeps_no_controller_from_starting_and_no_other_from_ending(
    log: RedisLogSettings,
) -> None:
    """The documents say that it cannot be used until its key is back."""
    clock = ManualClock()

    def start(cluster: str, *keys: int) -> Cluster:
        cipher = LogCipher([bytes([key]) * KEY_BYTES for key in keys], encrypts=True)
        store = RedisSessionStore(log, cluster, clock=clock, timer=clock, cipher=cipher)
        stores.callback(store.disconnect)
        cluster_of_store = Cluster(ClusterSettings(session_timeout_s=100.0), store, clock, clock)
        cluster_of_store.register_replica(ReplicaStatus("a", 1000, 1000))
        return cluster_of_store

    with ExitStack() as stores:
        start(CLUSTER, 1).open_session("lost", "", None, None)
        restarted = start(CLUSTER, 2)
        assert restarted.open_session("sound", "", None, None).fresh
        with pytest.raises(StoreError, match="under a key that KEDGE_LOG_KEYS does not have"):
            restarted.resolve("lost", False, "")
        clock.advance(1000)
        assert restarted.expire_idle() == ["sound"]
        assert [entry.session_id for entry in start(CLUSTER, 2, 1).sessions()] == ["lost"]


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction", "volatile-lru"])
def test_a_redis_that_may_drop_sessions_is_refused(policy: str) -> None:
    server = RedisServer("--maxmemory-policy", policy)
    try:
        if policy.startswith("allkeys"):
            with pytest.raises(StoreError, match=r"^cannot open .*allkeys-lru.*noeviction") as caught:
                RedisSessionStore(server.log(), CLUSTER)
            assert caught.value.param == "redis_url"
        else:
            RedisSessionStore(server.log(), CLUSTER).disconnect()
    finally:
        server.stop()


def test_something_else_in_its_place_is_refused(redis_server: RedisServer, log: RedisLogSettings) -> None:
    with redis_server.client() as client:
        client.lpush(f"kedge:{{{log.name}}}:layout", "x")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            RedisSessionStore(log, CLUSTER)


def test_a_log_of_the_former_layout_is_taken_over(redis_server: RedisServer, log: RedisLogSettings) -> None:
    """Its writer cannot know of claims, so it is fenced. Its sessions go to whichever cluster needs them first."""
    store = RedisSessionStore(log, CLUSTER)
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    store.disconnect()
    prefix = f"kedge:{{{log.name}}}:"
    with redis_server.client() as client:
        session = json.loads(client.get(f"{prefix}session:s"))
        del session["writer"]
        client.set(f"{prefix}session:s", json.dumps(session))
        client.delete(f"{prefix}writers", f"{prefix}alive:cluster")
        client.set(f"{prefix}layout", "1")
        client.set(f"{prefix}writer", "7")
        again = RedisSessionStore(log, CLUSTER)
        assert client.get(f"{prefix}writer") is None, "the former writer's number is gone"
    assert list(again.load_all_entries()) == []
    with pytest.raises(SessionTakenOver):
        append_turn(again, turn_of(1, 2, [3]))
    assert [entry.session_id for entry in again.changes().claimable] == ["s"]
    assert again.claim("s", "b").epoch == 2
    append_turn(again, turn_of(1, 2, [3], epoch=2))
    assert history_of(again) == [1, 2, 3]
    again.disconnect()


def test_an_opening_that_a_failover_lost_is_made_up_for(
    redis_server: RedisServer, log: RedisLogSettings
) -> None:
    former = RedisSessionStore(log, CLUSTER)
    former.open(SESSION)
    prefix = f"kedge:{{{log.name}}}:"
    with redis_server.client() as client:
        before = client.hget(f"{prefix}writers", CLUSTER)
        store = RedisSessionStore(log, CLUSTER)
        client.hset(f"{prefix}writers", CLUSTER, before)
    append_turn(store, turn_of(0, 0, [1]))
    with pytest.raises(StoreError, match="has taken it over"):
        append_turn(former, turn_of(1, 1, [2]))
    former.disconnect()
    store.disconnect()


def test_changes_whose_answers_are_lost_are_made_once(
    log: RedisLogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py may send such a script twice. The second time its guards fail."""
    store = RedisSessionStore(log, CLUSTER)
    once = redis_log.RedisLog.change_each
    told: list[Changes] = []

    def twice(self: redis_log.RedisLog, changes: Changes) -> list[bool]:
        told.append(changes)
        assert all(once(self, changes))
        return once(self, changes)

    monkeypatch.setattr(redis_log.RedisLog, "change_each", twice)
    assert store.open(SESSION) == SESSION
    append_turn(store, turn_of(0, 0, [1, 2], idempotency_key="k"))
    store.assign("s", "b", 2)
    append_turn(store, turn_of(1, 2, [3], epoch=2))
    assert store.fork("s", 2, replace(SESSION, session_id="child")).tokens == 2
    assert (history_of(store), store.load("s").turns) == ([1, 2, 3], 2)
    assert store.close("s")
    assert len(told) == 6, "none of them was planned again"
    store.disconnect()


@pytest.mark.parametrize("count", [1, 10, 300])
def test_turns_in_a_group_share_their_round_trips(
    log: RedisLogSettings, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """One trip reads what the turns go on from, one writes. Each turn used to have two trips of its own."""
    store = RedisSessionStore(log, CLUSTER)
    for number in range(count):
        store.open(replace(SESSION, session_id=f"s{number}"))
    trips: list[int] = []
    execute = redis.client.Pipeline.execute

    def counted(self: redis.client.Pipeline, *args: object, **options: object) -> object:
        trips.append(len(self.command_stack))
        return execute(self, *args, **options)

    monkeypatch.setattr(redis.client.Pipeline, "execute", counted)
    turns = [turn_of(0, 0, [number], session_id=f"s{number}", idempotency_key="k") for number in range(count)]
    assert store.append_turns(turns) == [None] * count
    assert trips == [count, 1]
    monkeypatch.undo()
    assert [history_of(store, f"s{number}") for number in range(count)] == [
        [number] for number in range(count)
    ]
    store.disconnect()


def test_of_a_group_only_those_turns_are_told_again_in_whose_way_others_came(
    log: RedisLogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cluster takes one of the sessions between reading and writing. The other turns are written once."""
    store, other = RedisSessionStore(log, CLUSTER), RedisSessionStore(log, "other")
    names = ("s", "t", "u")
    for name in names:
        store.open(replace(SESSION, session_id=name))
    honest = redis_log.RedisLog.change_each
    told: list[int] = []

    def interrupted(self: redis_log.RedisLog, changes: Changes) -> list[bool]:
        if not told:
            told.append(len(changes))
            other.claim("t", "b")
        else:
            told.append(len(changes))
        return honest(self, changes)

    monkeypatch.setattr(redis_log.RedisLog, "change_each", interrupted)
    outcomes = store.append_turns([turn_of(0, 0, [1], session_id=name) for name in names])
    assert [type(outcome) for outcome in outcomes] == [type(None), SessionTakenOver, type(None)]
    assert told == [3, 1], "the second is the claim"
    assert [history_of(store, name) for name in ("s", "u")] == [[1], [1]]
    assert history_of(other, "t") == []
    store.disconnect()
    other.disconnect()


def test_of_a_group_that_loses_its_answer_nobody_knows_and_repeating_it_changes_nothing(
    log: RedisLogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisSessionStore(log, CLUSTER)
    for name in ("s", "t"):
        store.open(replace(SESSION, session_id=name))
    honest = redis_log.RedisLog.change_each

    def lost(self: redis_log.RedisLog, changes: Changes) -> list[bool]:
        honest(self, changes)
        raise StoreError("no answer")

    group = [
        turn_of(0, 0, [1]),
        turn_of(0, 0, [1], session_id="t", epoch=5),
        turn_of(0, 0, [2], session_id="t"),
    ]
    monkeypatch.setattr(redis_log.RedisLog, "change_each", lost)
    told = [type(outcome) for outcome in store.append_turns(group)]
    assert told == [StoreError, StaleEpoch, StoreError]
    monkeypatch.undo()
    assert [type(outcome) for outcome in store.append_turns(group)] == [type(None), StaleEpoch, type(None)]
    assert (history_of(store), history_of(store, "t"), store.find("t").turns) == ([1], [2], 1)
    store.disconnect()


@pytest.mark.parametrize("change", ["append", "assign", "touch", "close", "fork", "open"])
def test_what_comes_between_reading_and_changing_is_not_overwritten(
    log: RedisLogSettings, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Another cluster takes the session, opens one of the same name, or closes one with a high epoch."""
    store, other = RedisSessionStore(log, CLUSTER), RedisSessionStore(log, "other")
    store.open(SESSION)
    honest = redis_log.RedisLog.change_each

    def interrupted(self: redis_log.RedisLog, between: Changes) -> list[bool]:
        monkeypatch.setattr(redis_log.RedisLog, "change_each", honest)
        if change == "open":
            other.open(replace(SESSION, session_id="new", epoch=5))
            other.close("new")
        else:
            other.claim("s", "b")
            append_turn(other, turn_of(0, 0, [7], epoch=2))
        return honest(self, between)

    monkeypatch.setattr(redis_log.RedisLog, "change_each", interrupted)
    if change == "open":
        assert store.open(replace(SESSION, session_id="new")).epoch == 6
    else:
        changes: dict[str, Callable[[], object]] = {
            "append": lambda: append_turn(store, turn_of(0, 0, [1])),
            "assign": lambda: store.assign("s", "c", 2),
            "touch": lambda: store.touch("s", 1.0),
            "close": lambda: store.close("s"),
            "fork": lambda: store.fork("s", 0, replace(SESSION, session_id="child")),
        }
        with pytest.raises(SessionTakenOver):
            changes[change]()
        assert (history_of(other), other.find("s").epoch, other.find("s").turns) == ([7], 2, 1)
        with pytest.raises(SessionNotFound):
            other.find("child")
    store.disconnect()
    other.disconnect()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock", "redis://host:x"])
def test_one_that_cannot_be_opened_is_named(url: str) -> None:
    with pytest.raises(StoreError, match=rf"^(cannot open )?session log: .*mine in Redis at {url}") as caught:
        RedisSessionStore(RedisLogSettings(url, "mine"), CLUSTER)
    assert caught.value.param == "redis_url"


def test_the_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer("--requirepass", "secret")
    try:
        for password in (None, "wrong"):
            if password is not None:
                monkeypatch.setenv(REDIS_PASSWORD, password)
            with pytest.raises(StoreError, match=r"(?i)auth|password"):
                RedisSessionStore(server.log(), CLUSTER)
        monkeypatch.setenv(REDIS_PASSWORD, "secret")
        RedisSessionStore(server.log(), CLUSTER).disconnect()
    finally:
        server.stop()
