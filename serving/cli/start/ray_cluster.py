"""Which Ray cluster `serve run` would use, and whether it runs code of everybody who reaches it.

Ray's processes on a machine with a network listen on every interface, and run what they are sent. With tokens
(RAY_AUTH_MODE=token) they ask everybody who calls for the cluster's token first. Whether they do is asked of the
cluster itself: the environment of this process says nothing about one that was started elsewhere.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from serving.cli.start.errors import StartError

PATIENCE_S = 5.0
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call that needs nothing but a token, where there is one: an empty request is a good one."""

FOUND = " The address is RAY_ADDRESS, or was left by the last `ray start` here (`ray stop` takes it back)."


def refuse_open_cluster(address: str | None, environ: Mapping[str, str]) -> None:
    """Raises StartError where `serve run --address ADDRESS` (None: without `--address`) would serve on a cluster that
    asks for no token and that other machines reach, and where no cluster answers."""
    if environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # every caller needs a certificate then
    cluster = _cluster_at(address)
    if cluster is None:
        _refuse_to_start_open(environ)
        return
    try:
        is_open = not asks_for_token(cluster)
    except StartError as error:
        raise StartError(f"{error}{'' if address else FOUND}") from error
    if is_open and _others_reach(cluster):
        raise StartError(
            f"the Ray cluster at {cluster} asks for no token: it runs code of everybody who reaches it. Start it with"
            " tokens (docs/operations.md, 'A cluster of your own'), or serve on it nevertheless with --allow-no-token"
        )


def asks_for_token(address: str) -> bool:
    """Whether the GCS at host:port refuses a call without a token. Raises StartError if there is none."""
    import grpc  # here, like Ray below: every command would start more slowly

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=PATIENCE_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            reason = f"{error.code().name}, {error.details()}"
            raise StartError(f"no Ray cluster answers at {address} ({reason}).") from error
    return False


def _cluster_at(address: str | None) -> str | None:
    """host:port of the GCS that `serve run` would connect to, as Ray itself finds it: at `address`, else at
    RAY_ADDRESS, else that of the last `ray start` on this machine. None where a cluster is to be started."""
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


def _others_reach(address: str) -> bool:
    """Whether the GCS without tokens at host:port listens on more than the loopback. One that answers there may answer
    at the machine's own address, too."""
    from ray._private import services

    host, port = services.parse_address(address)
    if not _is_loopback(host):
        return True
    own = services.get_node_ip_address()
    if _is_loopback(own):
        return False
    try:
        return not asks_for_token(services.build_address(own, port))
    except StartError:
        return False


def _is_loopback(host: str) -> bool:
    """Whether every address of that name is one of the loopback's."""
    return all(_address(str(found[4][0])).is_loopback for found in socket.getaddrinfo(host, None))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address that is written as one of IPv6 (::ffff:127.0.0.1) as what it is."""
    address = ipaddress.ip_address(text.split("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
