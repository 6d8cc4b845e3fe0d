"""Sessions after a change of the model: they go on if their tokens mean the same, else they are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controllers.records import ModelFingerprint, TurnRecord
from controllers.served_model import ServedModel
from controllers.tokens import encode_tokens, unpack_tokens
from serving.wire.turns import TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, running_rig, tokens_of

MODEL = ServedModel(ModelFingerprint("tokenizer-a", "weights-a", "template-a"), VOCAB_SIZE)


def changed(**parts: str | None) -> ServedModel:
    return replace(MODEL, fingerprint=replace(MODEL.fingerprint, **parts))


async def begin(rig: Rig) -> list[int]:
    """Runs a turn of session "s" on `rig`. Returns the history."""
    epoch = rig.open_session("s")
    output = tokens_of(await rig.run(call([1, 2, 3], "s"), epoch))
    return [1, 2, 3, *output]


async def go_on(rig: Rig, former: Rig) -> list[TurnEvent]:
    """Runs the session's next turn on `rig`, which has taken the place of the lost replica `former`."""
    cluster = former.controller.cluster
    cluster.report_unreachable(former.replica_id, True)
    cluster.register_replica(rig.heartbeats.status())
    return await rig.run(call([4], "s"), cluster.resolve("s", False, "").epoch)


@pytest.mark.parametrize(
    "model",
    [changed(weights="weights-b"), changed(template=None), replace(MODEL, vocab_size=VOCAB_SIZE + 24)],
)
async def test_a_session_goes_on_with_another_model_of_its_tokenizer(
    tmp_path: Path, model: ServedModel
) -> None:
    async with running_rig(tmp_path, model=MODEL) as former:
        history = await begin(former)
        assert former.controller.cluster._store.load("s").model == MODEL.fingerprint
        async with running_rig(tmp_path, controller=former.controller, replica_id="b", model=model) as rig:
            output = tokens_of(await go_on(rig, former))
            assert output == null_generate([*history, 4], 8, VOCAB_SIZE)
            assert former.controller.cluster._store.load("s").model == model.fingerprint


async def test_a_session_of_another_tokenizer_is_refused_by_name_and_stays(tmp_path: Path) -> None:
    """Such a session used to get an answer to a text that nobody wrote: the same ids meant other tokens."""
    async with running_rig(tmp_path, model=MODEL) as former:
        history = await begin(former)
        cluster = former.controller.cluster
        model = changed(tokenizer="tokenizer-b")
        async with running_rig(tmp_path, controller=former.controller, replica_id="b", model=model) as rig:
            (event,) = await go_on(rig, former)
            assert event.error is not None
            assert (event.error.status, event.error.code) == (409, "model_changed")
            assert "another tokenizer (tokenizer-a) than that of the model served now (tokenizer-b)" in (
                event.error.message
            )
            assert "Open another session, or deploy the model" in event.error.message
            await rig.books_are_empty()
            assert unpack_tokens(cluster._store.load("s").history).tolist() == history
        async with running_rig(tmp_path, controller=former.controller, replica_id="c", model=MODEL) as rig:
            cluster.report_unreachable("b", True)
            assert tokens_of(await go_on(rig, former)) == null_generate([*history, 4], 8, VOCAB_SIZE)


async def test_ids_outside_the_vocabulary_never_reach_the_model(tmp_path: Path) -> None:
    """The history of a log without a recorded model may come from any model. On a GPU such an id breaks the device for
    all."""
    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        tokens = encode_tokens([1, VOCAB_SIZE])
        rig.controller.cluster.commits.commit([TurnRecord("s", epoch, 0, 0, tokens, 1)])
        steps = rig.engine.stats().steps
        (event,) = await rig.run(call([4], "s"), epoch)
        assert event.error is not None
        assert (event.error.status, event.error.code) == (409, "model_changed")
        assert f"token id {VOCAB_SIZE} in its history" in event.error.message
        assert rig.engine.stats().steps == steps
        rig.controller.cluster.commits.commit(
            [TurnRecord("s", epoch, 1, 0, encode_tokens([VOCAB_SIZE - 1]), 1)]
        )
        assert tokens_of(await rig.run(call([4], "s"), epoch))


async def test_a_session_of_another_model_can_be_closed(tmp_path: Path) -> None:
    async with running_rig(tmp_path, model=MODEL) as former:
        await begin(former)
        model = changed(tokenizer="tokenizer-b")
        async with running_rig(tmp_path, controller=former.controller, replica_id="b", model=model) as rig:
            await go_on(rig, former)
            assert not await rig.host.close("s", 1), "it is not held here: the controller closes it"
            assert former.controller.cluster.close_session("s", "")
