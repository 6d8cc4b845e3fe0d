"""Finds the Ray cluster that `serve run` would use, and checks whether it runs code of everybody who reaches it.

Ray's processes on a machine with a network listen on every interface and run the code that they are sent. With tokens
(RAY_AUTH_MODE=token) they first ask every caller for the cluster's token. The check asks the cluster itself: the
environment of this process says nothing about a cluster that was started elsewhere.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from serving.cli.start.errors import StartError

PATIENCE_S = 5.0
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call that needs nothing but the token, if tokens are on; an empty request is valid."""

FOUND = " The address is RAY_ADDRESS, or was left by the last `ray start` here (`ray stop` takes it back)."


def check_cluster(address: str | None, environ: Mapping[str, str], *, allow_open: bool = False) -> bool:
    """Whether there is a cluster for `serve run --address ADDRESS` (None: without `--address`); without one it starts
    one. Raises StartError if it would not reach that cluster, or, unless `allow_open`, if the cluster asks for no token
    and other machines reach it."""
    cluster = _cluster_at(address)
    if environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return cluster is not None  # every caller needs a certificate then
    if cluster is None:
        if not allow_open:
            _refuse_to_start_open(environ)
        return False
    try:
        is_open = answers(cluster)
    except StartError as error:
        raise StartError(f"{error}{'' if address else FOUND}") from error
    if not is_open:
        _check_own_token(cluster, address, environ)
    elif not allow_open and _others_reach(cluster):
        raise StartError(
            f"the Ray cluster at {cluster} asks for no token: it runs code of everybody who reaches it. Start it with"
            " tokens (docs/operations/cluster.md), or serve on it nevertheless with --allow-no-token"
        )
    return True


def answers(address: str, token: str | None = None) -> bool:
    """Whether the GCS at host:port answers a call with this token, or without one. False means that it asks for a
    token. Raises StartError if there is no GCS."""
    import grpc  # imported here, like Ray below, so that other commands start fast

    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=PATIENCE_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            reason = f"{error.code().name}, {error.details()}"
            raise StartError(f"no Ray cluster answers at {address} ({reason}).") from error
    return True


def _cluster_at(address: str | None) -> str | None:
    """host:port of the GCS that `serve run` would connect to, found as Ray finds it: at `address`, else at RAY_ADDRESS,
    else at the address of the last `ray start` on this machine. None if `serve run` would start a cluster."""
    from ray._private import services

    try:
        found: str | None = services.canonicalize_bootstrap_address(address)
    except (ValueError, ConnectionError) as error:
        raise StartError(f"{error} (a Ray cluster is named by host:port of its GCS)") from error
    return found


def _refuse_to_start_open(environ: Mapping[str, str]) -> None:
    """Ray turns tokens on for a cluster that `serve run` starts, unless RAY_AUTH_MODE says otherwise."""
    from ray._private import services

    mode = environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token" and not _is_loopback(services.get_node_ip_address()):
        raise StartError(
            f"with RAY_AUTH_MODE={mode} the Ray cluster that is to start would run code of everybody who reaches it."
            " Unset it, or serve nevertheless with --allow-no-token"
        )


def _check_own_token(cluster: str, address: str | None, environ: Mapping[str, str]) -> None:
    """Raises StartError unless Ray would send the cluster its token. For a named cluster it does so only with
    RAY_AUTH_MODE=token."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # it is compiled

    found = (address or environ.get("RAY_ADDRESS") or "auto") == "auto"
    if environ.get("RAY_AUTH_MODE", "token" if found else "").lower() != "token":
        raise StartError(f"the Ray cluster at {cluster} asks for a token, and RAY_AUTH_MODE=token is not set")
    loader = AuthenticationTokenLoader.instance()
    places = "RAY_AUTH_TOKEN, else the file of RAY_AUTH_TOKEN_PATH, else ~/.ray/auth_token"
    if not loader.has_token(ignore_auth_mode=True):
        raise StartError(f"the Ray cluster at {cluster} asks for a token, and there is none here ({places})")
    if not answers(cluster, loader.get_raw_token(ignore_auth_mode=True)):
        raise StartError(f"the Ray cluster at {cluster} asks for another token than the one here ({places})")


def _others_reach(address: str) -> bool:
    """Whether the GCS without tokens at host:port listens on more than the loopback interface. A GCS that answers there
    may also answer at the machine's own address."""
    from ray._private import services

    host, port = services.parse_address(address)
    if not _is_loopback(host):
        return True
    own = services.get_node_ip_address()
    if _is_loopback(own):
        return False
    try:
        return answers(services.build_address(own, port))
    except StartError:
        return False


def _is_loopback(host: str) -> bool:
    """Whether every address of that name is a loopback address."""
    return all(_address(str(found[4][0])).is_loopback for found in socket.getaddrinfo(host, None))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address; an IPv4 address in IPv6 form (::ffff:127.0.0.1) is returned as IPv4."""
    address = ipaddress.ip_address(text.split("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
