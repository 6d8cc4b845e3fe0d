"""Keys for the connections between front ends and replicas.

On one node a connection is a socket file that only its user may open. Between nodes connections are encrypted and both
ends authenticate (CurveZMQ, https://rfc.zeromq.org/spec/26). Each replica has its own key pair, and front ends learn
its public key from the cluster controller. All front ends share one key pair. Its secret key is the cluster's link
secret, which the controller keeps in the session log and gives only to processes of its Ray cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils import z85


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair, in Z85 (https://rfc.zeromq.org/spec/32)."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> CurveKeys:
        return cls(*zmq.curve_keypair())

    @classmethod
    def of_secret(cls, secret: bytes) -> CurveKeys:
        """The key pair of this secret key, which is 32 bytes that nobody else knows."""
        encoded = z85.encode(secret)
        return cls(zmq.curve_public(encoded), encoded)
