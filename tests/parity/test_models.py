"""The native families against transformers, float32: prefill logits close, greedy tokens equal.

The runner is driven directly, with hand-made page tables: chunked prefill, mixed batches, batched decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from engine.api import SamplingParams
from engine.attention.torch_backend import TorchAttention
from engine.batch import BatchItem, ItemOutput, SampleSpec, ScheduledBatch
from engine.models.loader import LoadedModel, load_model
from engine.runner.kv_pool import KVPool, make_kv_pool
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ModelSettings

EMBEDDED = Path(__file__).parents[2] / "assets" / "models" / "kedge-chat"
VOCAB = 160
CONTEXT = 512
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0)

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-bfloat16": lambda: transformers.LlamaConfig(**SMALL),
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-biased": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-rope3": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama-linear": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LINEAR_ROPE),
    "llama-heads": lambda: transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, head_dim=24),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen3-biased": lambda: transformers.Qwen3Config(**SMALL, head_dim=32, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**{**SMALL, "num_key_value_heads": 1}, sliding_window=None),
}


@dataclass
class Peer:
    """A random model of one family, as transformers holds it and as saved."""

    model: Any
    directory: Path
    generated: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def generate(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self.generated:
            ids = torch.tensor([prompt])
            # Without a mask, generate takes tokens of the padding's id for padding.
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
            self.generated[key] = out[0, len(prompt) :].tolist()
        return self.generated[key]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    torch.manual_seed(7)
    config = CONFIGS[request.param]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from zero and from one, so that a forgotten bias or norm shows.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            if request.param == "llama-bfloat16":
                parameter.copy_(parameter.bfloat16())
    directory = tmp_path_factory.mktemp(request.param)
    sharded = {"max_shard_size": "100KB"} if request.param in ("llama", "qwen2") else {}
    model.save_pretrained(directory, **sharded)
    assert (directory / "model.safetensors.index.json").exists() == bool(sharded)
    return Peer(model, directory)


@pytest.fixture(scope="module")
def embedded() -> Peer:
    if not (EMBEDDED / "model.safetensors").is_file():
        pytest.skip("no embedded model here")
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    return Peer(model, EMBEDDED)


def load(peer: Peer) -> LoadedModel:
    return load_model(ModelSettings(path=str(peer.directory), device="cpu"))


def make_runner(loaded: LoadedModel, page_size: int, num_tokens: int) -> TorchRunner:
    pool = make_kv_pool(
        loaded.spec,
        CacheSettings(page_size=page_size, num_pages=-(-num_tokens // page_size)),
        loaded.dtype,
        loaded.device,
    )
    pool.kv_L2KSD.fill_(torch.nan)
    return TorchRunner(
        loaded.model, pool, TorchAttention(pool), loaded.spec.vocab_size, loaded.max_context_len
    )


def page_tables(count: int, page_size: int, scattered: bool) -> list[NDArray[np.int32]]:
    """Tables for `count` sequences of up to 160 tokens, out of a pool of twice that."""
    each = -(-160 // page_size)
    pages = np.arange(2 * count * each, dtype=np.int32)
    if scattered:
        pages = np.random.default_rng(3).permutation(pages)
    return [pages[2 * index * each : (2 * index + 1) * each] for index in range(count)]


@dataclass
class Stream:
    """One sequence driven by hand."""

    name: str
    tokens: list[int]
    pages: NDArray[np.int32]
    contiguous: bool
    prompt_len: int
    computed: int = 0

    def item(self, chunk: int) -> BatchItem:
        share = self.tokens[self.computed : self.computed + chunk]
        end = self.computed + len(share)
        spec = SampleSpec(GREEDY, end) if end == len(self.tokens) else None
        return BatchItem(self.name, share, self.computed, self.pages, self.contiguous, spec)

    def take(self, item: BatchItem, output: ItemOutput) -> None:
        self.computed += len(item.token_ids)
        self.tokens += output.token_ids

    @property
    def produced(self) -> list[int]:
        return self.tokens[self.prompt_len :]


def run_streams(runner: TorchRunner, streams: list[Stream], chunk: int) -> None:
    while active := [stream for stream in streams if len(stream.produced) < NEW_TOKENS]:
        items = [stream.item(chunk) for stream in active]
        for stream, item, output in zip(
            active, items, runner.execute(ScheduledBatch(items)).items, strict=True
        ):
            stream.take(item, output)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(0, VOCAB, length).tolist() for length in (1, 5, 33, 100)]


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_greedy_tokens_equal(peer: Peer, page_size: int, scattered: bool) -> None:
    """Prompts of different lengths end their prefill at different steps, so extends and decodes mix."""
    loaded = load(peer)
    texts = prompts()
    tables = page_tables(len(texts), page_size, scattered)
    streams = [
        Stream(str(index), list(text), table, not scattered, len(text))
        for index, (text, table) in enumerate(zip(texts, tables, strict=True))
    ]
    largest = (int(max(table.max() for table in tables)) + 1) * page_size
    run_streams(make_runner(loaded, page_size, largest), streams, chunk=13)
    for stream, text in zip(streams, texts, strict=True):
        assert stream.produced == peer.generate(text)


def test_embedded_model_equals(embedded: Peer) -> None:
    """Saved in bfloat16, computed in float32 by both."""
    loaded = load(embedded)
    random = np.random.default_rng(5)
    texts = [random.integers(3, loaded.spec.vocab_size, length).tolist() for length in (7, 60)]
    streams = [
        Stream(str(index), list(text), table, True, len(text))
        for index, (text, table) in enumerate(zip(texts, page_tables(2, 16, False), strict=True))
    ]
    run_streams(make_runner(loaded, 16, 16 * 40), streams, chunk=32)
    for stream, text in zip(streams, texts, strict=True):
        # generate ends at the end-of-text token, the runner does not.
        expected = embedded.generate(text)
        assert stream.produced[: len(expected)] == expected


def test_prefill_logits_close(peer: Peer) -> None:
    loaded = load(peer)
    tokens = prompts()[3]
    pool: KVPool = make_kv_pool(loaded.spec, CacheSettings(16, 8), loaded.dtype, loaded.device)
    runner = TorchRunner(loaded.model, pool, TorchAttention(pool), VOCAB, CONTEXT)
    item = BatchItem("a", tokens, 0, np.arange(8, dtype=np.int32), True, None, input_logprobs_from=0)
    item.top_input_logprobs = VOCAB
    scored = runner.execute(ScheduledBatch([item])).items[0].input_logprobs
    assert [entry.token_id for entry in scored] == tokens
    assert scored[0].logprob is None
    expected = torch.log_softmax(peer.logits(tokens), -1)
    for position, entry in enumerate(scored[1:]):
        got = torch.empty(VOCAB)
        got[[token for token, _ in entry.top]] = torch.tensor([value for _, value in entry.top])
        torch.testing.assert_close(got, expected[position], atol=2e-4, rtol=2e-4)
        assert entry.logprob == pytest.approx(float(got[entry.token_id]), abs=1e-6)
