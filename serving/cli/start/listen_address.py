"""An address where `kedge serve` is to take calls, and whether it is free."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from serving.cli.start.errors import StartError
from serving.cli.start.port_claims import PortClaims

ANY_PORT = 0
"""The system chooses one when somebody listens."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where calls are to be taken, and the setting that says so."""

    setting: str
    host: str
    port: int

    def check_free(self, claims: PortClaims) -> None:
        """Claims the address. Raises StartError if somebody listens there, which Ray would report in hundreds of lines,
        or is going to. Any other reason why this process cannot listen there says nothing of Ray's."""
        try:
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self.host, self.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(
                    f"{self.setting}: another server, maybe an earlier kedge, listens at {self.host}:{self.port}."
                    " Stop it, or set another port"
                ) from error
        if self.port != ANY_PORT and not claims.claim(self.port, self.host):
            raise StartError(
                f"{self.setting}: another kedge, which may only be starting, has {self.host}:{self.port}."
                " Stop it, or set another port"
            )
