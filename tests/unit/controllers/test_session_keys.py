"""A session's key says whose it is. No id and no tenant makes the key of another tenant's session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.errors import SessionNotFound
from controllers.session_keys import id_in, session_key, tenant_in

SOME = st.text("ab \n", max_size=5)
"""Tenants and ids, most of which nobody may have."""


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_key_says_whose_it_is(tenant: str) -> None:
    key = session_key(tenant, "diary")
    assert (tenant_in(key), id_in(key)) == (tenant, "diary")
    assert session_key(tenant, key) == key


@pytest.mark.parametrize(
    ("tenant", "session_id"),
    [
        ("", "acme diary"),
        ("", " diary"),
        ("other", "acme diary"),
        ("other", "other acme diary"),
        ("other acme", "diary"),
        ("other acme", "other acme diary"),
    ],
)
def test_an_id_with_a_space_is_no_sessions(tenant: str, session_id: str) -> None:
    """The tenant without a name used to get acme's session for the id "acme diary"."""
    with pytest.raises(SessionNotFound, match="contains a space"):
        session_key(tenant, session_id)


@given(SOME, SOME)
def test_no_key_is_another_tenants(tenant: str, session_id: str) -> None:
    try:
        key = session_key(tenant, session_id)
    except SessionNotFound:
        assert " " in tenant + session_id
    else:
        assert (tenant_in(key), id_in(key)) == (tenant, id_in(session_id))
