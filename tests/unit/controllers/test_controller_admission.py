from __future__ import annotations

import pytest

from controllers.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, admit_session
from controllers.errors import Overloaded


def test_sessions_up_to_the_limit() -> None:
    admit_session(9, 10)
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10, next_expiry_s=12.0)
    assert caught.value.retry_after_s == 12.0
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10)
    assert caught.value.retry_after_s == MAX_RETRY_AFTER_S
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10, next_expiry_s=0.0)
    assert caught.value.retry_after_s == MIN_RETRY_AFTER_S
