"""Which versions of front ends, replicas and controllers work together.

Neighbouring versions do: controllers/wire_record.py says how they read each other's records. Versions that are further
apart are refused with an error that names both, before anything is misread.
"""

from __future__ import annotations

from controllers.wire_record import WIRE_VERSION
from serving.wire.turns import ErrorInfo

VERSION_MISMATCH = "version_mismatch"


UNKNOWN_CALL = ErrorInfo(
    503,
    VERSION_MISMATCH,
    "This replica is of another version than the front end, and does not know this call. Deploy both anew.",
)


def mismatch(theirs: int, whose: str) -> ErrorInfo | None:
    """The error for a caller of version `theirs`; None if this version works with it."""
    if abs(theirs - WIRE_VERSION) <= 1:
        return None
    return ErrorInfo(
        503,
        VERSION_MISMATCH,
        f"The {whose} speaks version {theirs} of Kedge's wire, and this replica version {WIRE_VERSION}: only versions "
        "beside each other work together. Deploy the versions in between one after the other.",
    )
