"""Who may speak on the connections between front ends and replicas, and where replicas are to be found.

On one node they are files that only their user may open. Between nodes they are encrypted and both ends prove who they
are (CurveZMQ, https://rfc.zeromq.org/spec/26). Each replica has a key pair of its own, whose public half front ends
learn from the cluster controller. All front ends have the pair whose secret half is the cluster's: the controller tells
it only to processes of its Ray cluster.
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
        """`secret`: 32 bytes that nobody else knows."""
        encoded = z85.encode(secret)
        return cls(zmq.curve_public(encoded), encoded)
