"""Which versions of front ends, replicas and controllers work together.

Neighbouring versions do: controllers/wire_record.py says how they read each other's records. Versions that are further
apart are refused with an error that names both, before anything is misread.
"""

from __future__ import annotations

from controllers.wire_record import WIRE_VERSION
from serving.wire.errors import unavailable
from serving.wire.turns import ErrorInfo

VERSION_MISMATCH = "version_mismatch"
"""A 503 that ends with the update: all front ends and replicas are then of one version."""

UNKNOWN_CALL = unavailable(
    "This replica is of another version than the front end, and does not know this call. Deploy both anew.",
    VERSION_MISMATCH,
)


def mismatch(theirs: int) -> ErrorInfo | None:
    """The error for a front end of version `theirs`; None if this version works with it."""
    if abs(theirs - WIRE_VERSION) <= 1:
        return None
    return unavailable(
        f"The front end speaks version {theirs} of Kedge's wire, and this replica version {WIRE_VERSION}: only "
        "versions beside each other work together. Deploy the versions in between one after the other.",
        VERSION_MISMATCH,
    )
