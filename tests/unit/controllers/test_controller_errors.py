from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from controllers import errors
from controllers.errors import ControllerError, InvalidRewind, Overloaded, StoreError
from controllers.session_log.sqlite_store import SqliteSessionStore


def _subclasses(base: type[ControllerError]) -> list[type[ControllerError]]:
    return [base, *(found for sub in base.__subclasses__() for found in _subclasses(sub))]


@pytest.mark.parametrize("error_type", _subclasses(ControllerError))
def test_every_error_survives_pickling(error_type: type[ControllerError]) -> None:
    error = error_type("what happened", "field")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_type
    assert (copy.message, copy.param, copy.code, str(copy)) == (
        "what happened",
        "field",
        error_type.code,
        "what happened",
    )


def test_codes_are_distinct() -> None:
    """To clients, a class without a code of its own has the code of its base class."""
    codes = [error_type.code for error_type in _subclasses(ControllerError) if "code" in vars(error_type)]
    assert len(set(codes)) == len(codes)


def test_fixed_codes_and_defaults() -> None:
    assert errors.SessionNotFound.code == "session_not_found"
    assert errors.CapacityExceeded.code == "session_capacity_exceeded"
    assert InvalidRewind("no").param == "offset"
    assert errors.SessionExists("no").param is None
    assert errors.SessionTakenOver.code == "stale_epoch"


def test_overloaded_keeps_its_estimate() -> None:
    copy = pickle.loads(pickle.dumps(Overloaded("later", retry_after_s=2.5)))
    assert copy.retry_after_s == 2.5


def test_where_the_log_is_stays_in_the_server(tmp_path: Path) -> None:
    """Errors used to tell clients the path of the log's file or the address of its Redis."""
    path = tmp_path / "sessions.db"
    store = SqliteSessionStore(path)
    store.disconnect()
    with pytest.raises(StoreError) as caught:
        store.deployment()
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.message == "session log: it cannot be read or written"
    assert str(error) == f"{error.message} ({path}: Cannot operate on a closed database.)"
