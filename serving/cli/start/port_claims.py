"""Claims on ports where this process is going to have something listen. HAProxy listens seconds later, also where
another does: two starts that chose the same port would each get some of the calls."""

from __future__ import annotations

import errno
import socket
import sys


class PortClaims:
    """Held until this object goes, or the process ends in any way. A claim is a name of an abstract Unix socket, which
    Linux keeps apart for each network, as it does ports."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def claim(self, port: int, host: str = "") -> bool:
        """Whether nobody else on this machine has claimed the port of that host. A claim that fails for another reason
        says nothing of others."""
        if sys.platform != "linux":  # elsewhere there are no such names, and no HAProxy
            return True
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0kedge-port-{host}-{port}")
        except OSError as error:
            name.close()
            return error.errno != errno.EADDRINUSE
        self._held.append(name)
        return True
