"""Settings: every key is checked, unknown ones are refused by name, and values reach the engine unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engine.memory import host_memory_bytes
from engine.settings import ExecutionSettings, ModelSettings, SpeculationSettings
from serving.settings.config import AppArgs, check_file, main, parse_args
from serving.settings.settings_paths import project_root, resolve_path, state_path
from serving.settings.strict_settings import SettingsError

MODEL = {"path": "assets/models/kedge-chat"}


@pytest.mark.parametrize(
    ("args", "key", "nearest"),
    [
        ({"model": MODEL, "cahce": {}}, "cahce", "cache"),
        ({"model": MODEL, "cache": {"page_sise": 16}}, "page_sise", "page_size"),
        ({"model": {**MODEL, "dtpye": "auto"}}, "dtpye", "dtype"),
        ({"model": MODEL, "replicas": {"num_replicas": 2}}, "num_replicas", "num_"),
        ({"model": MODEL, "replicas": {"autoscaling": {"max_replica": 2}}}, "max_replica", "max_replicas"),
        ({"model": MODEL, "controller": {"statedir": "x"}}, "statedir", "state_dir"),
        ({"model": MODEL, "speculation": {"methd": "ngram"}}, "methd", "method"),
        ({"model": MODEL, "speculation": {"draft_model": {"paht": "x"}}}, "paht", "path"),
        ({"model": MODEL, "scheduler": {"strict_books": True}}, "strict_books", "max_running"),
    ],
)
def test_unknown_key_is_refused_with_its_name_and_the_nearest(
    args: dict[str, object], key: str, nearest: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_args(args)
    assert f"unknown key {key!r}" in str(caught.value)
    assert nearest in str(caught.value)


def test_key_like_nothing_known_gets_the_list() -> None:
    with pytest.raises(SettingsError, match=r"known keys: path, name, load_format"):
        parse_args({"model": {**MODEL, "zzzz": 1}})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("cache", {"page_size": 0}),
        ("cache", {"page_size": 257}),
        ("cache", {"size_mib": "much"}),
        ("cache", {"window_ratio": 0}),
        ("cache", {"window_ratio": 1.5}),
        ("cache", {"host_mib": -1}),
        ("cache", {"host_share": 0}),
        ("cache", {"host_share": 1.0}),
        ("cache", {"disk_mib": -1}),
        ("cache", {"disk_path": ""}),
        ("cache", {"disk_path": "kv", "host_mib": 0, "disk_mib": 5}),
        ("cache", {"books": True}),
        ("speculation", {"method": "guess"}),
        ("speculation", {"method": "ngram", "max_draft_tokens": 0}),
        ("speculation", {"row_cost": -0.1}),
        ("scheduler", {"chunk_size": -1}),
        ("scheduler", {"chunk_size": 4096}),
        ("scheduler", {"max_batch_tokens": 256, "chunk_size": 512}),
        ("cache", {"page_size": True}),
        ("cache", {"page_size": "16"}),
        ("cache", {"page_size": 16.0}),
        ("cache", {"prefix_cache": "yes"}),
        ("cache", {"prefix_cache": 1}),
        ("sessions", {"idle_timeout_s": True}),
        ("sessions", {"idle_timeout_s": float("inf")}),
        ("controller", {"replica_timeout_s": 2.5}),
        ("controller", {"heartbeat_interval_s": 1e-9}),
        ("replicas", {"step_timeout_s": 0.001}),
        ("controller", {"heartbeat_interval_s": 2, "replica_timeout_s": 5}),
        ("controller", {"state_dir": ""}),
        ("controller", {"redis_url": "localhost:6379"}),
        ("controller", {"redis_url": "http://localhost"}),
        ("controller", {"redis_url": "redis://localhost:port/1"}),
        ("controller", {"redis_url": "redis://localhost:6379/kedge"}),
        ("controller", {"redis_url": "redis+sentinel://localhost:26379"}),
        ("controller", {"redis_url": "redis+sentinel://localhost:26379/"}),
        ("controller", {"redis_url": "redis+sentinel://localhost:26379,/mymaster"}),
        ("controller", {"redis_url": "redis+sentinel://localhost:port/mymaster"}),
        ("controller", {"redis_url": "redis+sentinel://localhost/mymaster/x"}),
        ("controller", {"redis_url": "redis+sentinel://localhost/mymaster?db=1"}),
        ("controller", {"redis_url": "redis+sentinel://me:secret@localhost/mymaster"}),
        ("controller", {"redis_wait_replicas": 1}),
        ("controller", {"redis_url": "redis://localhost", "redis_wait_replicas": -1}),
        ("controller", {"redis_url": "redis://localhost", "redis_wait_ms": 1000}),
        ("controller", {"full_sync": True, "redis_url": "redis://localhost"}),
        ("controller", {"redis_url": "redis://me:secret@localhost"}),
        ("controller", {"redis_url": "rediss://localhost?password=secret"}),
        ("model", {"path": ""}),
        ("model", {"path": "/no/such/model"}),
        ("model", {"path": "./no-such-model"}),
        ("model", {"path": "~/no-such-model"}),
        ("model", {"path": "~nobody-of-that-name/model"}),
        ("model", {"path": "assets/models/kedge-caht"}),
        ("model", {"path": "assets/models"}),
        ("model", {"path": "README.md"}),
        ("model", {**MODEL, "aliases": ["other", "kedge-chat"]}),
        ("model", {**MODEL, "name": "other", "aliases": ["other"]}),
        ("replicas", {"num_gpus": 1.5}),
        ("ingress", {"keep_alive_s": 1e-9}),
        ("sessions", {"sweep_interval_s": 1e-9}),
        ("metrics", {"audit_interval_s": 1e-9}),
        ("replicas", {"count": 0}),
        ("replicas", {"autoscaling": {}}),
        ("sessions", {"idle_timeout_s": 0}),
        ("model", {**MODEL, "dtype": "float8"}),
        ("cache", {"kv_dtype": "int8"}),
        ("cache", {"memory_share": 1}),
        ("execution", {"attention": "fast"}),
        ("execution", {"decode_steps": 0}),
        ("execution", {"tensor_parallel": 0}),
    ],
)
def test_bad_values_name_section_and_key(section: str, values: dict[str, object]) -> None:
    key = next(key for key in reversed(values))
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, section: values})
    assert f"args.{section}.{key}" in str(caught.value)


def test_a_heartbeat_alone_may_not_be_too_slow_for_the_default_timeout() -> None:
    with pytest.raises(
        SettingsError, match=r"args\.controller\.replica_timeout_s: 10 is less than 3 × heart"
    ):
        parse_args({"model": MODEL, "controller": {"heartbeat_interval_s": 4}})


def test_a_path_that_is_not_there_is_told_and_a_hub_id_is_taken() -> None:
    with pytest.raises(SettingsError, match=r"args\.model\.path: there is no directory '/no/such/model'"):
        parse_args({"model": {"path": "/no/such/model"}})
    for hub_id in ("gpt2", "Qwen/Qwen3-0.6B", "some-org/some_model.v1"):
        assert parse_args({"model": {"path": hub_id}}).model.settings().path == hub_id


def test_only_a_model_of_the_hub_has_revisions() -> None:
    assert parse_args({"model": {"path": "gpt2", "revision": "v1"}}).model.settings().revision == "v1"
    with pytest.raises(SettingsError, match=r"args\.model\.revision: .* is a directory"):
        parse_args({"model": {**MODEL, "revision": "v1"}})


def test_a_small_step_cuts_the_default_chunk() -> None:
    assert parse_args({"model": MODEL, "scheduler": {"max_batch_tokens": 256}})


def test_missing_model() -> None:
    with pytest.raises(SettingsError, match=r"args\.model: Field required"):
        parse_args({})


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, "cache": {"page_size": 0, "num_pages": 0}})
    assert "page_size" in str(caught.value)
    assert "num_pages" in str(caught.value)


def test_values_reach_the_engine() -> None:
    args = parse_args(
        {
            "model": {**MODEL, "dtype": "bfloat16", "num_threads": 3, "load_format": "dummy", "seed": 7},
            "cache": {"page_size": 1, "size_mib": 3},
            "scheduler": {"max_running": 5, "max_context_len": 99},
        }
    )
    settings = args.engine_settings()
    assert (settings.model.dtype, settings.model.num_threads, settings.model.seed) == ("bfloat16", 3, 7)
    assert (settings.cache.page_size, settings.cache.size_bytes) == (1, 3 * 1024 * 1024)
    assert (settings.scheduler.max_running, settings.scheduler.max_context_len) == (5, 99)
    assert args.model.model_id == "kedge-chat"


def test_cache_and_speculation_reach_the_engine() -> None:
    draft = {"path": "assets/models/kedge-chat-draft", "dtype": "float32", "num_threads": 1}
    speculation = {"method": "draft", "max_draft_tokens": 5, "ngram_size": 2, "row_cost": 0.3}
    args = parse_args(
        {
            "model": MODEL,
            "cache": {
                "window_ratio": 0.25,
                "host_mib": 3,
                "disk_mib": 5,
                "disk_path": "kv",
                "books": "strict",
            },
            "speculation": {**speculation, "draft_model": draft},
        }
    )
    settings = args.engine_settings()
    assert (settings.cache.window_ratio, settings.cache.host_size_bytes) == (0.25, 3 * 1024 * 1024)
    assert settings.cache.disk_size_bytes == 5 * 1024 * 1024
    assert settings.cache.disk_path == str(project_root() / "kv")
    assert settings.cache.books == "strict"
    draft_path = str(project_root() / "assets/models/kedge-chat-draft")
    draft_model = ModelSettings(draft_path, dtype="float32", num_threads=1)
    assert settings.speculation == SpeculationSettings("draft", 5, 2, draft_model, 0.3)


def test_host_memory_is_a_size_or_a_share_of_it() -> None:
    """A size that suits one machine is refused by a smaller one, and wasted on a larger one."""

    def size_bytes(**cache: float) -> int:
        return parse_args({"model": MODEL, "cache": cache}).engine_settings().cache.host_size_bytes

    assert size_bytes() == 512 * 2**20
    assert size_bytes(host_mib=0) == 0
    assert size_bytes(host_share=0.25) == host_memory_bytes() // 4
    with pytest.raises(
        SettingsError, match=r"args\.cache\.host_share: give a host_share or a host_mib, not both"
    ):
        size_bytes(host_mib=512, host_share=0.25)


def test_off_may_be_written_bare() -> None:
    """YAML reads a bare `off` as false."""
    values = yaml.safe_load(
        "{model: {path: x, tool_calls: off, reasoning: off, generation_config: off}, cache: {books: off},"
        " speculation: {method: off}, logs: {access: off}}"
    )
    settings = parse_args(values)
    model = settings.model
    assert (model.tool_calls, model.reasoning, model.generation_config) == ("off",) * 3
    assert (settings.cache.books, settings.speculation.method, settings.logs.access) == ("off",) * 3


@pytest.mark.parametrize("name", ["s", "__Host-stick", "!#$%&'*+-.^_`|~", "x" * 64])
def test_a_name_that_a_cookie_can_have(name: str) -> None:
    unnamed = {"affinity": {"user": True, "cookie": name}}
    affinity = parse_args({"model": MODEL, "sessions": {"unnamed": unnamed}}).sessions.unnamed.affinity
    assert (affinity.user, affinity.cookie) == (True, name)
    affinity = parse_args({"model": MODEL}).sessions.unnamed.affinity
    assert (affinity.user, affinity.cookie) == (False, None)


@pytest.mark.parametrize("name", ["", "a b", "a;b", "a=b", "a\n", "ä", "x" * 65, 7])
def test_a_name_that_no_cookie_can_have(name: object) -> None:
    with pytest.raises(SettingsError, match=r"args\.sessions\.unnamed\.affinity\.cookie: "):
        parse_args({"model": MODEL, "sessions": {"unnamed": {"affinity": {"cookie": name}}}})


@pytest.mark.parametrize(
    ("sessions", "reason"),
    [
        ({"unnamed": {"enabled": False, "durable": True}}, r"unnamed\.durable: .*needs enabled: true"),
        (
            {"max_timeout_s": 3600, "unnamed": {"idle_timeout_s": 3601, "durable": True}},
            "unnamed: .*idle_timeout_s: .*no more than max_timeout_s, which is 3600",
        ),
    ],
)
def test_conversations_that_cannot_be_durable(sessions: dict[str, object], reason: str) -> None:
    with pytest.raises(SettingsError, match=rf"args\.sessions\.{reason}"):
        parse_args({"model": MODEL, "sessions": sessions})
    kept = {"max_timeout_s": 3600, "unnamed": {"idle_timeout_s": 3600, "durable": True}}
    assert parse_args({"model": MODEL, "sessions": kept}).sessions.unnamed.durable


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"cache": {"kv_dtype": "fp8"}, "execution": {"attention": "torch"}}, "'torch' has no fp8"),
        (
            {"cache": {"kv_dtype": "fp8"}, "execution": {"attention": "flash"}},
            "cache.kv_dtype 'fp8' needs 'triton'",
        ),
        ({"cache": {"kv_dtype": "fp8"}, "model": {**MODEL, "device": "cpu"}}, "'fp8' needs a GPU"),
        ({"execution": {"attention": "cpu"}, "model": {**MODEL, "device": "cuda"}}, "is for processors"),
        ({"model": {**MODEL, "device": "cpu"}, "execution": {"attention": "flash"}}, "model.device is 'cpu'"),
        (
            {"model": {**MODEL, "dtype": "float32"}, "execution": {"attention": "flash"}},
            "model.dtype is 'float32'",
        ),
        ({"cache": {"page_size": 24}, "execution": {"attention": "flash"}}, "multiple of 16, not 24"),
        (
            {"model": {**MODEL, "keep_fp8": True, "device": "cuda"}, "execution": {"deterministic": True}},
            "deterministic has no products for model.keep_fp8",
        ),
        (
            {"execution": {"deterministic": True, "attention": "flash"}},
            "attention 'cpu' or 'triton', not 'flash'",
        ),
        ({"execution": {"deterministic": True, "linear": "torch"}}, "linear 'auto', not 'torch'"),
        ({"execution": {"deterministic": True, "tensor_parallel": 2}}, "tensor_parallel 1, not 2"),
        (
            {"model": {**MODEL, "keep_fp8": True, "device": "cpu"}},
            "keep_fp8 needs a GPU, model.device is 'cpu'",
        ),
        ({"model": {**MODEL, "keep_fp8": True, "dtype": "float32"}}, "model.dtype is 'float32'"),
        (
            {"model": {**MODEL, "keep_fp8": True}, "execution": {"linear": "torch"}},
            "linear 'auto', not 'torch'",
        ),
        (
            {"model": {**MODEL, "keep_fp8": True}, "execution": {"tensor_parallel": 2}},
            "tensor_parallel 1, not 2",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(args: dict[str, object], reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, **args})
    assert "args.execution: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        {"cache": {"kv_dtype": "fp8"}},
        {"cache": {"kv_dtype": "fp8"}, "execution": {"attention": "triton"}},
        {"cache": {"page_size": 32}, "execution": {"attention": "flash"}},
        {"cache": {"page_size": 1}, "execution": {"attention": "torch"}},
        {"speculation": {"method": "draft", "draft_model": MODEL}, "execution": {"tensor_parallel": 2}},
        {"execution": {"deterministic": True, "attention": "cpu"}, "model": {**MODEL, "device": "cpu"}},
        {"execution": {"deterministic": True}, "model": {**MODEL, "device": "cuda"}},
        {"execution": {"deterministic": True, "attention": "triton"}, "model": {**MODEL, "device": "cuda"}},
        {"model": {**MODEL, "keep_fp8": True, "device": "cuda", "dtype": "bfloat16"}},
    ],
)
def test_settings_that_agree_are_taken(args: dict[str, object]) -> None:
    assert parse_args({"model": MODEL, **args}).engine_settings()


def test_execution_reaches_the_engine() -> None:
    execution = {
        "attention": "torch",
        "graphs": False,
        "max_graph_tokens": 64,
        "overlap": False,
        "decode_steps": 4,
        "tensor_parallel": 2,
        "linear": "torch",
    }
    deterministic = parse_args({"model": MODEL, "execution": {"deterministic": True}}).engine_settings()
    assert deterministic.execution.deterministic
    cache = {"kv_dtype": "auto", "memory_share": 0.5}
    settings = parse_args({"model": MODEL, "execution": execution, "cache": cache}).engine_settings()
    assert settings.execution == ExecutionSettings("torch", False, 64, False, 4, 2, "torch")
    assert (settings.cache.memory_share, settings.cache.kv_dtype) == (0.5, "auto")


def test_a_section_at_fault_is_told_beside_what_contradicts_it() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, "cache": {"page_size": 0}, "execution": {"attention": "flash"}})
    assert "args.cache.page_size" in str(caught.value)


def test_settings_cannot_be_changed() -> None:
    args = AppArgs.model_validate({"model": MODEL})
    with pytest.raises(ValueError, match="frozen"):
        args.cache.page_size = 3  # type: ignore[misc]


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_path("configs") == str(project_root() / "configs")
    (tmp_path / "elsewhere").mkdir()
    assert resolve_path("elsewhere") == str(tmp_path / "elsewhere")
    assert resolve_path("some-org/some-model") == "some-org/some-model"
    assert state_path(".kedge", "a.setting") == project_root() / ".kedge"
    assert state_path(str(tmp_path), "a.setting") == tmp_path


@pytest.mark.parametrize("path", sorted((project_root() / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_good(path: Path) -> None:
    applications = check_file(str(path))
    assert applications


def test_default_config_is_two_replicas_on_loopback() -> None:
    document = yaml.safe_load((project_root() / "configs" / "cluster.yaml").read_text())
    (application,) = document["applications"]
    args = parse_args(application["args"])
    assert document["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert application["import_path"] == "serving.app:build"
    assert args.replicas.count == 2
    total_cpus = args.replicas.count * args.replicas.num_cpus + args.ingress.count * args.ingress.num_cpus
    assert total_cpus <= 2
    assert (args.model.path, args.model.num_threads) == ("assets/models/kedge-chat", 1)


def test_gpu_config_has_a_gpu_for_each_replica() -> None:
    document = yaml.safe_load((project_root() / "configs" / "cluster-gpu.yaml").read_text())
    (application,) = document["applications"]
    args = parse_args(application["args"])
    assert document["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert (args.model.device, args.replicas.num_gpus, args.execution.tensor_parallel) == ("cuda", 1, 1)
    assert (args.cache.num_pages, args.cache.size_mib) == (None, None), "the GPU's memory sizes the pool"
    assert args.scheduler.chunk_size <= args.scheduler.max_batch_tokens
    assert args.cache.page_size % 16 == 0, "flash-attention serves too"


def test_check_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump({"applications": [{"args": {"model": MODEL, "replicsa": {}}}]}))
    assert main([str(bad)]) == 2
    assert "unknown key 'replicsa'; did you mean 'replicas'?" in capsys.readouterr().err
    assert main([str(project_root() / "configs" / "cluster.yaml")]) == 0
    assert main([str(tmp_path / "absent.yaml")]) == 2
    assert main([]) == 2


GOOD_APPLICATION = "applications: [{args: {model: {path: assets/models/kedge-chat}}}]\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "'applications' is missing"),
        (b"- a\n- list\n", "'applications' is missing"),
        (b"http_options: {port: 8000}\n", "'applications' is missing"),
        (b"applications: []\n", "'applications' is missing"),
        (b"applications: {name: kedge}\n", "'applications' is missing"),
        (b"applications: [kedge]\n", "an entry that is no mapping"),
        (b"\xff\xfe\n", "not a text file"),
        (GOOD_APPLICATION.encode() * 2, "line 2: key 'applications' is there twice"),
        (b"applications:\n  - args:\n      model: {path: a, dtype: auto, path: b}\n", "line 3: key 'path'"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(
    text: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(text)
    assert main([str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{path}: ")
    assert reason in told
    assert told.count("\n") == 1


def test_a_merge_key_is_no_key_that_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "base: &model {path: assets/models/kedge-chat, num_threads: 1}\n"
        "applications: [{args: {model: {<<: *model, num_threads: 2}}}]\n"
    )
    assert [args.model.num_threads for args in check_file(str(path))] == [2]
