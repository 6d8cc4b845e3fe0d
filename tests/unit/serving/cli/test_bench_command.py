"""`kedge bench` against a server over real HTTP."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from serving.cli.main import app
from tests.unit.serving.openai_stub import Stub, running

SMALL = ("--sessions", "3", "--turns", "6", "--output-tokens", "4", "--warmup", "1", "--max-burst-share", "1")


def bench(stub: Stub, *options: str):
    return CliRunner().invoke(
        app, ["bench", "--url", stub.url, *SMALL, *options], env={"COLUMNS": "160"}, catch_exceptions=False
    )


def measure(stub: Stub, tmp_path, *options: str) -> dict:
    out = tmp_path / "out.json"
    result = bench(stub, "--json", str(out), *options)
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


def measured(stub: Stub) -> list[dict]:
    """The bodies of the measured turns, without the probes for prompt lengths and the warm-up session."""
    return stub.bodies[-18:]


def test_session_mode_sends_only_new_tokens_and_sees_them_cached(tmp_path):
    with running(Stub()) as stub:
        out = measure(stub, tmp_path, "--input-tokens", "5")
    assert {len(body["messages"]) for body in measured(stub)} == {1}
    assert out["summary"]["turns_ok"] == 18
    assert out["summary"]["output_tokens"] == 72
    assert out["summary"]["new_prompt_tokens_per_turn"] == 5
    # Of the 9 (t - 1) + 5 input tokens of turn t, 9 (t - 1) are cached.
    assert out["summary"]["cached_share"] == pytest.approx(135 / 165)
    assert len(set(stub.session_ids) - {None}) == 4
    assert set(stub.closed) == set(stub.session_ids) - {None}


def test_resend_mode_sends_the_whole_history(tmp_path):
    with running(Stub(keeps_sessions=False)) as stub:
        out = measure(stub, tmp_path, "--mode", "resend", "--concurrency", "1")
    lengths = [len(body["messages"]) for body in measured(stub)]
    assert lengths == [1, 3, 5, 7, 9, 11] * 3
    assert measured(stub)[1]["messages"][1] == {"role": "assistant", "content": " w0 w1 w2 w3"}
    assert set(stub.session_ids) == {None}
    assert stub.closed == []
    assert out["summary"]["new_prompt_tokens_per_turn"] == 16


def test_token_id_prompts_are_exactly_as_long_as_asked_and_in_the_vocabulary(tmp_path):
    options = ("--endpoint", "completions", "--prompt", "ids", "--input-tokens", "7", "--vocab-size", "40")
    with running(Stub()) as stub:
        measure(stub, tmp_path, *options)
    prompts = [body["prompt"] for body in measured(stub)]
    assert {len(prompt) for prompt in prompts} == {7}
    assert all(32 <= token_id < 40 for prompt in prompts for token_id in prompt)


def test_token_id_prompts_in_resend_mode_take_over_the_ids_of_the_answer(tmp_path):
    options = ("--endpoint", "completions", "--prompt", "ids", "--mode", "resend", "--concurrency", "1")
    with running(Stub()) as stub:
        measure(stub, tmp_path, *options)
    first, second = (body["prompt"] for body in measured(stub)[:2])
    assert second[:20] == [*first, 50, 51, 52, 53]
    assert len(second) == 16 + 4 + 16


def test_text_completions_in_resend_mode(tmp_path):
    with running(Stub()) as stub:
        measure(stub, tmp_path, "--endpoint", "completions", "--mode", "resend", "--concurrency", "1")
    first, second = (body["prompt"] for body in measured(stub)[:2])
    assert second.startswith(first + " w0 w1 w2 w3 ")


def test_same_seed_same_prompts_and_another_seed_others(tmp_path):
    def prompts(seed: str) -> list:
        with running(Stub()) as stub:
            measure(stub, tmp_path, "--seed", seed, "--concurrency", "1")
        return [body["messages"] for body in stub.bodies]

    first = prompts("1")
    assert prompts("1") == first
    assert prompts("2") != first


def test_table_shows_early_and_late_turns_rates_and_cached_share():
    with running(Stub()) as stub:
        result = bench(stub)
    for cell in (
        "TTFT all turns",
        "TTFT turns 2-5",
        "TTFT turns 6-6",
        "per token",
        "cached share",
        "18 / 0 / 0",
    ):
        assert cell in result.output


def test_json_holds_settings_machine_limits_and_one_row_per_turn(tmp_path):
    with running(Stub()) as stub:
        out = measure(stub, tmp_path, "--seed", "5")
    assert out["settings"]["seed"] == 5
    assert out["settings"]["model"] == "stub-model"
    assert out["machine"]["cores"] >= 1
    assert out["limits"] == {"burst_share": 1.0, "other_cores": 0.1, "client_late_s": 0.005}
    assert {(row["session"], row["turn"]) for row in out["turns"]} == {
        (s, t) for s in range(3) for t in range(1, 7)
    }
    assert all(row["ttft_s"] > 0 and row["output_tokens"] == 4 for row in out["turns"])


def test_a_server_s_process_that_is_not_there_is_told_before_the_measurement():
    """Its CPU use was 0, and that of the server counted as other processes'."""
    with running(Stub()) as stub:
        result = bench(stub, "--server-pid", str(os.getpid()), "--server-pid", str(2**40))
    assert (result.exit_code, stub.bodies) == (1, [])
    assert result.stderr == f"kedge bench: --server-pid: there is no process {2**40}\n"


@pytest.mark.parametrize("where", ["absent/out.json", "."])
def test_a_file_that_cannot_be_written_is_told_before_the_measurement(tmp_path, where):
    with running(Stub()) as stub:
        result = bench(stub, "--json", str(tmp_path / where))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"kedge bench: --json: {tmp_path / where} cannot be written: ")
    assert result.stderr.count("\n") == 1
    assert stub.bodies == []


def test_failed_turns_end_their_session_and_are_counted(tmp_path):
    with running(Stub(breaks_off=True)) as stub:
        options = ("--warmup", "0", "--prompt", "ids", "--endpoint", "completions")
        result = bench(stub, *options, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 1
    assert "3 of 18 turns failed, so 15 more were not sent" in result.stderr
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert (summary["turns_ok"], summary["turns_failed"], summary["turns_skipped"]) == (0, 3, 15)
    assert summary["errors"] == {"stream ended before the turn did": 3}
    assert summary["rejected"] == ["no turn succeeded"]


@pytest.mark.parametrize(("options", "status"), [((), 1), (("--allow-failed-turns",), 0)])
def test_failed_turns_among_others_fail_the_run_unless_they_are_allowed(options, status):
    with running(Stub(breaks_off_at=9)) as stub:
        load = ("--warmup", "0", "--prompt", "ids", "--endpoint", "completions", "--max-other-cores", "99")
        result = bench(stub, *load, *options)
    assert "1 × stream ended before the turn did" in result.output
    assert result.exit_code == status, result.output
    assert ("1 of 18 turns failed" in result.stderr) is (status == 1)


def test_a_server_that_ignores_sessions_is_found_out():
    with running(Stub(keeps_sessions=False)) as stub:
        result = bench(stub)
    assert result.exit_code == 1
    assert "does not keep sessions" in result.output


def test_an_error_reply_says_what_the_server_said():
    with running(Stub(fails_with=400)) as stub:
        result = bench(stub)
    assert result.exit_code == 1
    assert "HTTP 400: stub says no" in result.output


def test_lumps_of_tokens_are_noted_and_rates_still_count_tokens(tmp_path):
    with running(Stub(tokens_per_chunk=2)) as stub:
        summary = measure(stub, tmp_path)["summary"]
    assert summary["tokens_per_chunk"] == 2
    assert summary["output_tokens"] == 72
    assert any("2.0 tokens come per chunk" in note for note in summary["notes"])


def test_a_server_without_usage_is_counted_by_chunks(tmp_path):
    with running(Stub(reports_usage=False)) as stub:
        summary = measure(stub, tmp_path, "--mode", "resend")["summary"]
    assert summary["output_tokens"] == 72
    assert summary["cached_share"] is None
    assert any("no usage" in note for note in summary["notes"])


def test_bursts_are_counted_and_judged():
    with running(Stub(token_delay_s=0.0)) as stub:
        result = bench(stub, "--output-tokens", "200", "--turns", "1", "--max-burst-share", "0.0001")
    assert result.exit_code in (0, 3)
    assert ("REJECTED" in result.output) is (result.exit_code == 3)
    assert "bursts (" in result.output


def test_chat_cannot_be_sent_as_token_ids():
    with running(Stub()) as stub:
        result = bench(stub, "--prompt", "ids")
    assert result.exit_code == 1
    assert "--endpoint completions" in result.output
