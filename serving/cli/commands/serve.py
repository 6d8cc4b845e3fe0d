"""`kedge serve`: runs Ray Serve's `serve run` on a config file, after checking its settings and the Ray cluster."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from serving.cli.commands.failure import one_line_errors
from serving.cli.start.environment import Proxy, default_proxy, serve_environment
from serving.cli.start.errors import StartError
from serving.cli.start.listen_address import ListenAddress
from serving.cli.start.operating_system import check_system
from serving.cli.start.port_claims import PortClaims
from serving.cli.start.ray_cluster import check_cluster
from serving.cli.start.readiness import Expected, answers_already, expected_of, say_when_ready

if TYPE_CHECKING:
    from serving.settings.config import AppArgs
    from serving.settings.settings_file import ServeFile

ADDRESS_HELP = (
    "host:port of the Ray cluster to serve on. The default is RAY_ADDRESS; without it, the cluster that `ray start`"
    " started on this machine; without that, kedge starts a cluster here, with a token."
)
PROXY_HELP = (
    "The HTTP proxy of a cluster that kedge starts here: HAProxy, which ray\\[serve] installs on Linux, or Ray Serve's"
    " own proxy, which is slower. The default is HAProxy if it is installed."
)
ALLOW_HELP = (
    "Serve also on a Ray cluster that asks for no token. Whoever can reach such a cluster can run code on it."
)

WHAT_CONFIG_IS = (
    "CONFIG is a file of settings, such as configs/cluster.yaml; a model is named in it, under model.path"
)


def serve(
    config: Annotated[Path, typer.Argument(help="The config file, for example configs/cluster.yaml.")],
    address: Annotated[str | None, typer.Option(help=ADDRESS_HELP)] = None,
    proxy: Annotated[Proxy | None, typer.Option(help=PROXY_HELP, show_default=False)] = None,
    allow_no_token: Annotated[bool, typer.Option("--allow-no-token", help=ALLOW_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Check the settings and the Ray cluster, then serve in the foreground (`serve run`). Ctrl-C or SIGTERM stops it.

    When the server is ready, one line tells its address, the model, the number of replicas and the seconds that it
    took. Exit status: 1 if nothing was started, else that of `serve run`.
    """
    began_s = time.monotonic()
    environ = dict(os.environ)  # what the user has set, before it is changed here and by Ray
    claims = PortClaims()  # held as long as `serve run` runs
    with one_line_errors("serve"):
        check_system(sys.platform)
        file, applications = _checked(config)
        expected = expected_of(file, applications[0], began_s, as_json=as_json)
        addresses = _addresses(file, applications)
        executables = Path(sys.executable).parent
        # Before anything imports Ray, which reads it then.
        taken = {each.port for each in addresses}
        chosen = proxy or default_proxy(environ)
        os.environ.update(serve_environment(environ, executables, chosen, claims, taken))
        if not check_cluster(address, environ, allow_open=allow_no_token):
            # On a cluster that is there, this deployment may replace one that listens.
            for each in addresses:
                each.check_free(claims)
            _check_keys(environ, applications)
        serve_main = _serve_main()
        _check_keys_of_ray(config)
        _say_when_ready(expected)
    _connect(address)
    serve_main(["run", str(config)], prog_name="serve")


def _checked(config: Path) -> tuple[ServeFile, list[AppArgs]]:
    """Checks the settings as `python -m serving.settings.config` does. Raises StartError."""
    import yaml  # imported here, so that other commands start fast

    from serving.settings.config import check_applications
    from serving.settings.settings_file import read_file
    from serving.settings.strict_settings import SettingsError

    try:
        file = read_file(str(config))
        return file, check_applications(file)
    except OSError as error:
        reason = f"{config} cannot be read: {error.strerror}. {WHAT_CONFIG_IS}"
        raise StartError(reason) from error
    except (SettingsError, yaml.YAMLError) as error:
        raise StartError(f"{config}: {error}") from error


def _addresses(file: ServeFile, applications: list[AppArgs]) -> list[ListenAddress]:
    """Where calls are to be taken, by Ray Serve and for operators."""
    ingresses = [each.ingress for each in applications]
    return [
        ListenAddress("http_options.port", file.http_host, file.http_port),
        *(
            ListenAddress("args.ingress.operator_port", each.operator_host, each.operator_port)
            for each in ingresses
            if each.operator_port is not None
        ),
    ]


def _check_keys(environ: Mapping[str, str], applications: list[AppArgs]) -> None:
    """Checks the keys of callers and of the session log, which a cluster that is started here takes from this
    environment and machine: its front ends and its controller would try to start again and again, and calls would wait
    for them. Raises StartError."""
    from controllers.errors import StoreError
    from controllers.session_log.log_cipher import LogCipher
    from controllers.settings import LOG_KEYS
    from serving.keys import KeyRing
    from serving.settings.strict_settings import SettingsError

    encrypted = any(each.controller.encrypted for each in applications)
    try:
        LogCipher.parse(environ.get(LOG_KEYS, ""), encrypts=encrypted)
        for each in applications:
            KeyRing(environ, each.ingress.keys_path)
    except (StoreError, SettingsError) as error:
        raise StartError(str(error)) from error


def _say_when_ready(expected: Expected) -> None:
    if not answers_already(expected):
        say_when_ready(expected)
        return
    note = f"kedge serve: {expected.url} answers already; `serve status` tells when this deployment is there"
    Console(stderr=True, soft_wrap=True).print(note, markup=False, highlight=False)


def _serve_main() -> Callable[..., Any]:
    """What Ray Serve's command `serve` runs. It runs in this process, which has imported Ray for the checks: a process
    of its own would do that again. Raises StartError if it is not installed."""
    try:
        from ray.serve.scripts import cli
    except ImportError as error:
        raise StartError(f"`serve run` cannot be run: {error}; it comes with ray[serve]") from error
    main: Callable[..., Any] = cli.main
    return main


def _check_keys_of_ray(config: Path) -> None:
    """Checks the keys that are Ray Serve's own as `serve run` does, which answers with a traceback. Raises
    StartError."""
    import yaml
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    from serving.settings.strict_settings import faults

    try:
        ServeDeploySchema.model_validate(yaml.safe_load(config.read_bytes()))
    except ValidationError as error:
        raise StartError(f"{config}: {'; '.join(faults(error))}") from error


def _connect(address: str | None) -> None:
    """Connects to the Ray cluster, or starts it, with what `serve run` gives `ray.init`, and then takes SIGTERM, which
    service managers send. `ray.init` leaves it to a handler that prints a stack and aborts the process; as Ctrl-C it
    has `serve run` shut down."""
    import ray

    ray.init(address=address, namespace="serve")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
