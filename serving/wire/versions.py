"""Which versions of front ends, replicas and controllers understand each other.

Versions beside each other do: see controllers/wire_record.py for how their records are read. What is further apart is
refused by name before it is misread.
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
    """What to tell a caller who speaks version `theirs`; None if it is understood here."""
    if abs(theirs - WIRE_VERSION) <= 1:
        return None
    return ErrorInfo(
        503,
        VERSION_MISMATCH,
        f"The {whose} speaks version {theirs} of Kedge's wire, and this replica version {WIRE_VERSION}: only versions "
        "beside each other work together. Deploy the versions in between one after the other.",
    )
