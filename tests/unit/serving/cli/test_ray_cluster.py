"""A Ray cluster that runs anybody's code is refused, by whichever way `serve run` would find it. The tests ask a real
GCS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gcs_server import LOOPBACK, OWN, GcsServer
from ray._raylet import AuthenticationTokenLoader

from serving.cli.start.errors import StartError
from serving.cli.start.ray_cluster import answers, check_cluster

MAPPED_LOOPBACK = f"[::ffff:{LOOPBACK}]"
"""The loopback address in a form that Ray keeps. Ray replaces 127.0.0.1 with the machine's own address."""
NOBODY = "127.0.0.2:1"
TOKEN = "8f6e" * 8

HaveToken = Callable[[str | None], None]

needs_network = pytest.mark.skipif(OWN == LOOPBACK, reason="needs a network")


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[GcsServer]:
    server = GcsServer(OWN)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def open_here() -> Iterator[GcsServer]:
    server = GcsServer(LOOPBACK)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def with_token() -> Iterator[GcsServer]:
    server = GcsServer(OWN, token=TOKEN)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def left_by_ray_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the file to which `ray start` writes an address. The file does not exist, and the environment names
    no cluster either."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def have_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[HaveToken]:
    """A function that makes a token the user's. Ray remembers the first token that it found, so it is told to look
    again."""
    loader = AuthenticationTokenLoader.instance()
    with monkeypatch.context() as patched:

        def have(token: str | None) -> None:
            patched.setenv("HOME", "/nonexistent")
            patched.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
            patched.setenv("RAY_AUTH_TOKEN", token or "")
            loader.reset_cache()

        yield have
    loader.reset_cache()


def why_refused(address: str | None = None, **environ: str) -> str:
    with pytest.raises(StartError) as refused:
        check_cluster(address, environ)
    return str(refused.value)


def test_the_cluster_itself_says_whether_it_asks_for_a_token(
    open_to_all: GcsServer, with_token: GcsServer
) -> None:
    assert answers(open_to_all.at(OWN))
    assert not answers(with_token.at(OWN))
    assert not answers(with_token.at(OWN), "0000" * 8)
    assert answers(with_token.at(OWN), TOKEN)
    with pytest.raises(StartError, match=f"no Ray cluster answers at {NOBODY}"):
        answers(NOBODY)


@needs_network
@pytest.mark.parametrize("host", [OWN, LOOPBACK, MAPPED_LOOPBACK, "127.0.0.2", "localhost"])
def test_a_cluster_that_is_open_to_others_is_refused(open_to_all: GcsServer, host: str) -> None:
    why = why_refused(open_to_all.at(host))
    assert "asks for no token: it runs code of everybody who reaches it" in why
    assert "--allow-no-token" in why
    check_cluster(open_to_all.at(host), {}, allow_open=True)


@needs_network
def test_that_this_process_has_tokens_on_does_not_close_a_cluster(open_to_all: GcsServer) -> None:
    assert "asks for no token" in why_refused(open_to_all.at(OWN), RAY_AUTH_MODE="token")


@needs_network
def test_a_cluster_is_found_as_ray_finds_it(
    open_to_all: GcsServer, left_by_ray_start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not check_cluster(None, {}), "no cluster is there: Ray would start one"
    address = open_to_all.at(OWN)
    left_by_ray_start.write_text(address)
    assert f"the Ray cluster at {address} asks for no token" in why_refused()
    left_by_ray_start.write_text(NOBODY)
    monkeypatch.setenv("RAY_ADDRESS", open_to_all.at(LOOPBACK))
    assert f"the Ray cluster at {address} asks for no token" in why_refused()
    assert not check_cluster("local", {}), "Ray would start a new one, whatever is there"


def test_a_cluster_of_the_loopback_alone_needs_no_token(open_here: GcsServer) -> None:
    assert check_cluster(open_here.at(MAPPED_LOOPBACK), {})


def test_a_cluster_is_taken_that_takes_the_token_here(
    with_token: GcsServer, left_by_ray_start: Path, have_token: HaveToken
) -> None:
    address = with_token.at(OWN)
    have_token(TOKEN)
    check_cluster(address, {"RAY_AUTH_MODE": "token"})
    left_by_ray_start.write_text(address)
    check_cluster(None, {})  # Ray shows the token to a cluster that it finds by itself


@pytest.mark.parametrize("environ", [{}, {"RAY_AUTH_MODE": "disabled"}])
def test_ray_shows_no_token_to_a_cluster_that_is_named(
    with_token: GcsServer, have_token: HaveToken, environ: dict[str, str]
) -> None:
    have_token(TOKEN)
    for allow_open in (False, True):
        with pytest.raises(StartError, match="asks for a token, and RAY_AUTH_MODE=token is not set"):
            check_cluster(with_token.at(OWN), environ, allow_open=allow_open)


def test_without_the_clusters_token_nothing_is_started(with_token: GcsServer, have_token: HaveToken) -> None:
    have_token(None)
    assert "and there is none here" in why_refused(with_token.at(OWN), RAY_AUTH_MODE="token")
    have_token("0000" * 8)
    assert "asks for another token than the one here" in why_refused(
        with_token.at(OWN), RAY_AUTH_MODE="token"
    )


@needs_network
@pytest.mark.parametrize("mode", ["disabled", ""])
def test_a_cluster_that_would_start_without_tokens_is_refused(mode: str) -> None:
    assert f"with RAY_AUTH_MODE={mode} the Ray cluster that is to start" in why_refused(RAY_AUTH_MODE=mode)
    check_cluster(None, {"RAY_AUTH_MODE": mode}, allow_open=True)


@pytest.mark.parametrize("mode", ["token", "TOKEN"])
def test_a_cluster_that_starts_with_tokens_is_taken(mode: str) -> None:
    check_cluster(None, {"RAY_AUTH_MODE": mode})


def test_a_cluster_that_is_not_there_is_named(left_by_ray_start: Path) -> None:
    assert why_refused(NOBODY).startswith(f"no Ray cluster answers at {NOBODY} (UNAVAILABLE, ")
    left_by_ray_start.write_text(NOBODY)
    assert "left by the last `ray start` here" in why_refused()


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", ""])
def test_an_address_that_is_none_is_named(address: str) -> None:
    why = why_refused(address)
    assert why == f"Invalid address format: {address} (a Ray cluster is named by host:port of its GCS)"


def test_where_callers_need_a_certificate_no_token_is_asked_for() -> None:
    check_cluster(NOBODY, {"RAY_USE_TLS": "1"})
