"""The Triton backend as engines use it: what it refuses, what it plans from shapes alone, and a model that runs on
it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention import triton_backend
from engine.attention.interface import AttentionBackend, AttentionUnavailable
from engine.attention.tables import ItemAttention
from engine.attention.tiles import AttentionTiles, TileShape, default_tiles
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.batch import ScheduledBatch
from engine.kernels.decoder_ops import TritonOps
from engine.models.loader import load_model
from engine.models.ops import TorchOps
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ModelSettings
from tests.parity.streams import VOCAB, Stream, page_tables, poisoned_pool
from tests.unit.engine.attention.stage import DEVICE, Shape, make_stage

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "use_sliding_window": True,
    "sliding_window": 12,
    "max_window_layers": 1,
    "dtype": "float32",
}
FEW_TOKENS = 5


def pool_of(dim: int = 16, dtype: torch.dtype = torch.float32, fp8: bool = False) -> KVPool:
    settings = CacheSettings(4, 8, kv_dtype="fp8" if fp8 else "auto")
    return make_kv_pool(KVLayout(2, dim, (None,)), settings, dtype, DEVICE)


def test_it_can_be_captured() -> None:
    attention = TritonAttention(pool_of())
    assert attention.captures(1)
    assert attention.captures(512)


def test_pools_it_cannot_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttentionUnavailable, match="heads of 320"):
        TritonAttention(pool_of(320))
    with pytest.raises(AttentionUnavailable, match="float64"):
        TritonAttention(pool_of(dtype=torch.float64))
    monkeypatch.setattr(triton_backend, "compute_capability", lambda _: 80)
    TritonAttention(pool_of())
    with pytest.raises(AttentionUnavailable, match=r"capability 8\.9, not 8\.0"):
        TritonAttention(pool_of(fp8=True))
    monkeypatch.setattr(triton_backend, "compute_capability", lambda _: 89)
    TritonAttention(pool_of(fp8=True))


def test_tiles_are_checked() -> None:
    narrow, wide = TileShape(16, 32, 4, 2, 8), TileShape(64, 32, 4, 2, 2)
    for shapes in ((), (wide, narrow), (TileShape(8, 32, 4, 2, 8),), (TileShape(16, 48, 4, 2, 8),)):
        with pytest.raises(ValueError, match="powers of two"):
            AttentionTiles(shapes)
    with pytest.raises(ValueError, match="max_splits"):
        AttentionTiles((narrow,), max_splits=6)
    tiles = AttentionTiles((narrow, wide))
    assert [tiles.shape(rows) for rows in (1, 16, 17, 64, 4096)] == [narrow, narrow, wide, wide, wide]
    assert [AttentionTiles((narrow, wide), 48).least_split(shape) for shape in (narrow, wide)] == [48, 128]


@pytest.mark.parametrize("capability", [None, 80, 89, 90, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
def test_there_are_tiles_for_all_pools(dim: int, dtype: torch.dtype, capability: int | None) -> None:
    tiles = default_tiles(dim, dtype, capability)
    assert tiles.shape(1).block_m == 16, "decodes waste no more than they must"


def test_default_tiles_are_right() -> None:
    for shape in (Shape(((1, 40), (70, 70)), 16, dim=64), Shape(((9, 40), (1, 3)), 16, dtype=torch.bfloat16)):
        want = make_stage(shape, 0).expected()
        stage = make_stage(shape, 0)
        got = stage.got(TritonAttention(stage.pool))
        tolerance = 2e-5 if shape.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_padding_launches_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has room for as many items as rows. A program that finds nothing to do takes time as well."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(triton_backend, "paged_attention", Kernel())
    stage = make_stage(Shape(((64, 4096),), 16, padding_items=63), 0)
    tiles = AttentionTiles((TileShape(16, 16, 4, 2, 8), TileShape(32, 16, 4, 2, 2)))
    stage.got(TritonAttention(stage.pool, tiles, multiprocessors=132))
    assert grids == [(8 * 132,), (2 * 132,)], "no launch has more than the card has room for"


@pytest.mark.parametrize("heads_first", [False, True])
def test_queries_may_be_strided(heads_first: bool) -> None:
    """Native models pass slices of one fused matrix. The bridge passes heads before rows."""
    shape = Shape(((3, 20), (1, 5)), scale=0.25)
    stage = make_stage(shape, 1)
    want = stage.expected()
    if heads_first:
        stage.q = stage.q.transpose(0, 1).contiguous().transpose(0, 1)
        stage.kv = stage.kv.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    else:
        fused = torch.cat((stage.q, stage.kv.flatten(1, 2)), 1)
        stage.q, stage.kv = (
            fused[:, : shape.heads],
            fused[:, shape.heads :].view(shape.rows, 2, -1, shape.dim),
        )
    torch.testing.assert_close(stage.got(TritonAttention(stage.pool)), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("page_size", "fused"), [(3, False), (16, False), (16, True)])
def test_a_model_gives_the_same_tokens_as_on_the_cpu_backend(
    tmp_path: Path, page_size: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps have chunked prefill, decodes beside extends, and a layer with a sliding window. With `fused`, keys are
    written as they are rotated."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = ModelSettings(str(tmp_path), load_format="dummy", dtype="float32", seed=5)
    produced = []
    for triton in (False, True):
        loaded = load_model(settings, ops=TritonOps() if triton and fused else TorchOps())
        assert loaded.layout.windows == (None, 12)
        pool = poisoned_pool(loaded, page_size, 4 * -(-160 // page_size))
        tables = page_tables(2, page_size, True), page_tables(2, page_size, True, seed=4)
        attention: AttentionBackend = TorchAttention(pool)
        if triton and fused:
            monkeypatch.delattr(triton_backend, "write_rows")  # the fused way does not need this launch
        if triton:
            attention = ItemAttention(TritonAttention(pool), loaded.device)
        runner = TorchRunner(loaded.model, pool, attention, loaded.vocab_size, loaded.max_context_len)
        streams = [
            Stream(str(index), list(range(3, 3 + length)), pages, False, length, window_pages)
            for index, (length, pages, window_pages) in enumerate(zip((9, 30), *tables, strict=True))
        ]
        while active := [stream for stream in streams if len(stream.produced) < FEW_TOKENS]:
            items = [stream.item(13) for stream in active]
            outputs = runner.execute(ScheduledBatch(items)).items
            for stream, item, output in zip(active, items, outputs, strict=True):
                stream.take(item, output)
                stream.forget(pool)
        produced.append([stream.produced for stream in streams])
    assert produced[0] == produced[1]
