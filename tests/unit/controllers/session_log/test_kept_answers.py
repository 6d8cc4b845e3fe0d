from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controllers.session_log.kept_answers import CALL_KEY, KEPT_ANSWERS, is_clients, outdated


@given(st.lists(st.booleans(), max_size=40))
def test_the_last_of_each_kind_stay(clients: list[bool]) -> None:
    keys = [f"mine-{at}" if named else f"{CALL_KEY}{at:032x}" for at, named in enumerate(clients)]
    gone = outdated(keys)
    stay = [at for at in range(len(keys)) if at not in gone]
    for kind in (True, False):
        alike = [at for at, named in enumerate(clients) if named is kind]
        assert [at for at in stay if clients[at] is kind] == alike[-KEPT_ANSWERS:]
    assert not keys or len(keys) - 1 in stay, "the last turn's answer is always there"


def test_a_clients_key_may_look_much_like_it() -> None:
    for key in (
        "call-",
        "call-1",
        "try-again",
        "",
        CALL_KEY + "0" * 31,
        CALL_KEY + "0" * 33,
        f"my {CALL_KEY}" + "0" * 32,
    ):
        assert is_clients(key)
