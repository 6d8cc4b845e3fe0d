"""What a proposer knows of a session from turn to turn. If that is outdated, only acceptance suffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.api import GenerateRequest, SamplingParams
from engine.request import LiveRequest
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.proposers import NOTHING, DraftModelProposer, NoProposer, Proposal
from engine.speculative.step_costs import StepCosts
from engine.stops import StopCriteria

COSTS = StepCosts(0.3, 0.1)
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


def live(
    new: list[int], history: list[int] | None = None, session: str | None = "s", name: str = "r"
) -> LiveRequest:
    history = history or []
    spec = GenerateRequest(name, new, SamplingParams(), history, len(history), session_id=session)
    return LiveRequest(spec, 0)


def accept(request: LiveRequest, tokens: list[int]) -> None:
    for token in tokens:
        request.accept(token)


def proposer(**settings: int) -> NgramProposer:
    return NgramProposer(3, 8, COSTS, **settings)


def turn(ngrams: NgramProposer, request: LiveRequest, output: list[int]) -> LiveRequest:
    ngrams.begin(request)
    accept(request, output)
    ngrams.commit(request)
    return request


def all_tokens(request: LiveRequest) -> list[int]:
    return list(request.tokens.slice(0, len(request.tokens)))


def test_ngrams_of_earlier_turns_are_proposed() -> None:
    ngrams = proposer()
    first = turn(ngrams, live([1, 2, *PHRASE]), [3, 4])
    second = live([5, 6], all_tokens(first))
    ngrams.begin(second)
    assert ngrams.propose(second, 8) == NOTHING
    accept(second, PHRASE[:3])
    expected = PHRASE[3:]
    got = ngrams.propose(second, 8).token_ids
    assert len(got) > 1
    assert list(got) == expected[: len(got)]
    assert ngrams.propose(second, 2).token_ids == got[:2]
    accept(second, PHRASE[3:5])
    ngrams.observe(second, 2, 2)
    assert ngrams.propose(second, 1).token_ids == (PHRASE[5],)


def test_wrong_proposals_pause_it() -> None:
    ngrams = proposer()
    request = live([*PHRASE, 1, 2])
    ngrams.begin(request)
    proposed = 0
    for word in range(60):
        accept(request, [*PHRASE[:3]])
        proposal = ngrams.propose(request, 8)
        proposed += len(proposal.token_ids)
        accept(request, [100 + word])
        if proposal.token_ids:
            ngrams.observe(request, len(proposal.token_ids), 0)
    assert 0 < proposed < 30


def test_nothing_is_proposed_past_the_end() -> None:
    ngrams, criteria = proposer(), StopCriteria(frozenset({PHRASE[4]}), 512, 1 + max(PHRASE))
    for stops, ignore_eos, count in ((set(), False, 2), (set(), True, 5), ({PHRASE[3]}, False, 1)):
        sampling = SamplingParams(stop_token_ids=frozenset(stops), ignore_eos=ignore_eos)
        request = LiveRequest(GenerateRequest("r", [*PHRASE, *PHRASE[:3]], sampling), 0)
        criteria.begin(request)
        ngrams.begin(request)
        ngrams.observe(request, 20, 20)
        assert ngrams.propose(request, 5).token_ids == tuple(PHRASE[3 : 3 + count])
        ngrams.commit(request)


def test_rollback_leaves_no_trace() -> None:
    ngrams = proposer()
    history = all_tokens(turn(ngrams, live([1, 2, 3]), [4, 5]))
    failed = live(PHRASE, history)
    ngrams.begin(failed)
    accept(failed, [6, 7])
    ngrams.rollback(failed)
    assert ngrams._indexed_tokens == len(history)
    again = live([8, *PHRASE[:3]], history)
    ngrams.begin(again)
    assert ngrams.propose(again, 8) == NOTHING


def test_first_turns_that_were_rolled_back_leave_nothing_behind() -> None:
    ngrams = proposer()
    for number in range(9):
        failed = live(PHRASE, session=f"s{number}", name=f"r{number}")
        ngrams.begin(failed)
        ngrams.rollback(failed)
    assert not ngrams._idle, "indexes without tokens would not count towards the limit"


def test_retraction_keeps_the_turn() -> None:
    ngrams = proposer()
    request = live([*PHRASE, 1])
    ngrams.begin(request)
    accept(request, PHRASE[:2])
    ngrams.begin(request)  # admitted again
    accept(request, PHRASE[2:3])
    assert ngrams.propose(request, 2).token_ids == tuple(PHRASE[3:5])


@pytest.mark.parametrize("changed", ["rewound", "longer elsewhere", "another history"])
def test_a_session_that_moved_on_without_it(changed: str) -> None:
    ngrams = proposer()
    old = all_tokens(turn(ngrams, live([1, 2, 3, *PHRASE]), [4, 5, 6]))
    history = {
        "rewound": old[:4],
        "longer elsewhere": [*old, 7, 8, 9, *range(30, 60)],
        "another history": list(range(200, 230)),
    }[changed]
    request = live([9, *history[:3]], history)
    ngrams.begin(request)
    proposal = ngrams.propose(request, 1)
    assert proposal.token_ids == tuple(history[3:4])
    ngrams.rollback(request)
    fresh = live([9, *PHRASE[:3]], history)
    ngrams.begin(fresh)
    assert ngrams.propose(fresh, 1).token_ids == ((PHRASE[3],) if changed == "longer elsewhere" else ())


def test_begin_costs_the_new_tokens() -> None:
    """Of a known session's history, only the last few tokens are read."""

    class Watched(list[int]):
        reads = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            part = super().__getitem__(key)
            Watched.reads += len(part) if isinstance(key, slice) else 1
            return part

    ngrams = proposer()
    history = all_tokens(turn(ngrams, live(list(range(5000))), []))
    request = live([1, 2, 3], Watched(history))
    Watched.reads = 0
    ngrams.begin(request)
    assert Watched.reads <= 16


def test_sessions_do_not_see_each_other() -> None:
    ngrams = proposer()
    turn(ngrams, live(PHRASE, session="a"), [1])
    for session in ("b", None):
        request = live([2, *PHRASE[:3]], session=session, name=f"r{session}")
        ngrams.begin(request)
        assert ngrams.propose(request, 8) == NOTHING


def test_state_is_bounded_and_forgotten() -> None:
    ngrams = proposer(most_indexed_tokens=100)
    for number in range(10):
        turn(ngrams, live(list(range(30)), session=f"s{number}", name=f"r{number}"), [])
    assert ngrams._indexed_tokens == 90  # of the last three sessions
    turn(ngrams, live(list(range(30)), session=None), [])
    assert ngrams._indexed_tokens == 90
    ngrams.forget("s9")
    ngrams.forget("never seen")
    assert ngrams._indexed_tokens == 60
    turn(ngrams, live(list(range(500)), session="long"), [])
    assert ngrams._indexed_tokens == 0
    ngrams.commit(live([1]))  # was never admitted
    ngrams.rollback(live([1]))


def test_a_draft_model_is_asked_for_what_pays() -> None:
    drafts = DraftModelProposer(6, replace(COSTS, draft=0.1))
    request = live([1, 2, 3])
    drafts.begin(request)
    first = drafts.propose(request, 8)
    assert 0 < first.model_count <= 6
    assert drafts.propose(request, 1) == Proposal(model_count=1)
    for _ in range(6):
        accept(request, [4])
        drafts.observe(request, 3, 0)
    assert drafts.propose(request, 8).model_count == 0
    for _ in range(12):
        accept(request, [4, 4, 4, 4])
        drafts.observe(request, 3, 3)
    assert drafts.propose(request, 8).model_count == 6
    drafts.commit(request)
    drafts.rollback(request)
    following = live([5], name="next")
    drafts.begin(following)
    assert drafts.propose(following, 8).model_count == 6  # the session's length carries over
    drafts.rollback(following)
    drafts.forget("s")
    drafts.begin(following)
    assert drafts.propose(following, 8) == first
    alone = live([1], session=None, name="alone")
    drafts.begin(alone)
    drafts.commit(alone)


def test_a_draft_model_costs_more_to_ask() -> None:
    request = live([1, 2, 3])
    counts = []
    for draft_cost in (0.05, 0.3, 1.0):
        drafts = DraftModelProposer(8, replace(COSTS, draft=draft_cost))
        drafts.begin(request)
        for _ in range(20):
            drafts.observe(request, 5, 4)
        counts.append(drafts.propose(request, 8).model_count)
    assert counts[0] > counts[1] > counts[2] == 1  # one proposal, as a probe


def test_no_proposer_says_nothing() -> None:
    nobody = NoProposer()
    request = live([*PHRASE, *PHRASE])
    nobody.begin(request)
    assert nobody.propose(request, 8) == NOTHING
