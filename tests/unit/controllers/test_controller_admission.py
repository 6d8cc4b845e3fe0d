from __future__ import annotations

import pytest

from controllers.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    admit_session,
    admit_timeout,
    admit_to_tenant,
)
from controllers.errors import InvalidTimeout, Overloaded
from controllers.ownership import TenantUse
from controllers.settings import ClusterSettings


def test_sessions_up_to_the_limit() -> None:
    admit_session(9, 10)
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10, expires_in_s=12.0)
    assert caught.value.retry_after_s == 12.0
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10)
    assert caught.value.retry_after_s == MAX_RETRY_AFTER_S
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10, expires_in_s=0.0)
    assert caught.value.retry_after_s == MIN_RETRY_AFTER_S


def test_a_tenant_has_a_limit_of_its_own() -> None:
    admit_to_tenant(TenantUse(99, 99), ClusterSettings())
    settings = ClusterSettings(tenant_sessions=2, tenant_history_tokens=10)
    admit_to_tenant(TenantUse(1, 10), settings)
    admit_to_tenant(TenantUse(1, 4), settings, copied_tokens=6)
    for use, copied in ((TenantUse(2, 0), 0), (TenantUse(1, 11), 0), (TenantUse(1, 4), 7)):
        with pytest.raises(Overloaded) as caught:
            admit_to_tenant(use, settings, copied_tokens=copied)
        assert caught.value.retry_after_s == MAX_RETRY_AFTER_S


def test_nobody_idles_longer_than_the_operator_allows() -> None:
    settings = ClusterSettings(max_timeout_s=60.0)
    for timeout_s in (None, 60.0):
        admit_timeout(timeout_s, settings)
    with pytest.raises(InvalidTimeout, match="60 s at most, not for 1e") as caught:
        admit_timeout(1e9, settings)
    assert caught.value.param == "timeout_s"
