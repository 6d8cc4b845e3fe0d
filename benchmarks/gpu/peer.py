"""transformers' continuous batching as the peer in the session load: same weights, whole history every turn.

Legend: N query tokens of all sequences, T key tokens of all sequences, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from benchmarks.gpu.engines import Bench
from benchmarks.gpu.turns import Event, Plan
from engine.models.tensor_shapes import tensor_shapes

FLASH_NAME = "paged|torch_flash"
PAGE_TOKENS = 64
"""Its default is 256. Smaller pages let a turn share its history almost to the end, which favours transformers."""

POLL_S = 0.5
STOP_S = 30.0


class PeerUnavailable(RuntimeError):
    """This kind of attention is not available with the transformers and torch of this machine."""


def ways(device: torch.device) -> list[str]:
    """The kinds of attention to run, the best first. `sdpa` needs a mask over the keys of all sequences together."""
    if device.type != "cuda":
        return ["sdpa", "torch-flash"]
    with contextlib.suppress(ImportError):
        import_module("flash_attn")
        return ["flash_attention_2"]
    return ["torch-flash", "torch-flash without graphs"]


class Peer:
    """A Side of the load (benchmarks/gpu/turns.py)."""

    name = "transformers"

    def __init__(self, bench: Bench, plan: Plan, way: str) -> None:
        self._bench, self._plan, self._way = bench, plan, way
        self._manager: Any = None
        self._seen: dict[str, int] = {}

    def prepare(self) -> None:
        """To be called before `running`. Raises PeerUnavailable."""
        if self._way.startswith("torch-flash"):
            register_flash(self._bench.device)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Runs the manager; yields a description of how it runs."""
        model = self._model()
        config = self._settings()
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        captures = self._bench.device.type == "cuda" and "without graphs" not in self._way
        context = model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=captures, timeout=STOP_S
        )
        with context as manager:
            self._manager = manager
            used = manager.continuous_batching_config
            yield (
                f"transformers {transformers.__version__}, {model.config._attn_implementation}, "
                f"CUDA graphs {used.use_cuda_graph}, async batching {used.use_async_batching}, "
                f"prefix sharing {used.allow_block_sharing}, pages of {self._page_tokens} tokens"
            )
            manager.stop(block=True, timeout=STOP_S, hard_stop=True)  # does not wait for what is in flight
        self._manager = None
        del model
        self._bench.close()

    def submit(self, name: str, history: Sequence[int], new: Sequence[int], count: int) -> None:
        self._seen[name] = 0
        self._manager.add_request(
            [*history, *new], request_id=name, max_new_tokens=count, streaming=True, eos_token_id=-1
        )

    def events(self, limit_s: float) -> list[Event]:
        """What came since the last call; waits up to `limit_s` for the first. Raises RuntimeError if it died."""
        end_s = time.perf_counter() + limit_s
        while (left_s := end_s - time.perf_counter()) > 0:
            output = self._manager.get_result(timeout=min(POLL_S, left_s))
            if output is not None:
                return [self._event(output)]
            if not self._manager.is_running():
                raise RuntimeError(
                    f"transformers stopped: {self._manager.background_thread_status.fatal_error}"
                )
        return []

    def _event(self, output: Any) -> Event:
        if output.error is not None:
            raise RuntimeError(f"transformers: {output.error}")
        seen, tokens = self._seen[output.request_id], output.generated_tokens
        self._seen[output.request_id] = len(tokens)
        return Event(output.request_id, time.perf_counter(), tuple(tokens[seen:]), output.is_finished())

    @property
    def _page_tokens(self) -> int:
        if self._bench.device.type != "cuda":
            return 16
        return 256 if self._way == "flash_attention_2" else PAGE_TOKENS

    def _settings(self) -> Any:
        known = inspect.signature(ContinuousBatchingConfig).parameters
        size = "page_size" if "page_size" in known else "block_size"
        options: dict[str, Any] = {size: self._page_tokens, "allow_block_sharing": True}
        options["max_requests_per_batch"] = self._plan.sessions + 1
        if self._bench.device.type != "cuda":
            tokens = 2 * self._plan.longest * self._plan.sessions
            options |= {"num_blocks": -(-tokens // self._page_tokens), "max_batch_tokens": 256}
        if self._way.startswith("torch-flash"):
            options["max_blocks_per_request"] = 0  # it has no kernel for the block table
        if self._way.endswith("without graphs"):
            options |= {"use_cuda_graph": False, "use_async_batching": True}
        return ContinuousBatchingConfig(**options)

    def _model(self) -> Any:
        """A model with the same weights as the engines."""
        config = transformers.AutoConfig.for_model(**self._bench.config)
        with torch.device(self._bench.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=self._bench.dtype).eval()
        source, parameters = self._bench.weights(), dict(model.named_parameters())
        if odd := set(parameters) ^ set(tensor_shapes(self._bench.spec)):
            raise RuntimeError(f"weights differ in names: {sorted(odd)[:3]}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(source.take(name))
        if self._way.startswith("torch-flash"):
            model.config._attn_implementation = FLASH_NAME
        else:
            paged = "paged|" if self._way == "sdpa" and takes_read_index() else ""
            model.set_attn_implementation(paged + self._way)
        return model


def takes_read_index() -> bool:
    """Whether the cache gathers keys and values by index before attention, as in transformers 5.17."""
    return "read_index" in inspect.signature(PagedAttentionCache.update).parameters


def register_flash(device: torch.device) -> None:
    """Gives transformers torch's own flash kernel, for machines without a flash-attn package. Without it continuous
    batching attends over a mask of all sequences together. Raises PeerUnavailable."""
    if not takes_read_index():
        raise PeerUnavailable(f"transformers {transformers.__version__} gathers keys in another way")
    if device.type == "cuda":
        check_flash(device)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(FLASH_NAME, flash_forward)


def flash_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface for packed sequences: takes query [1, H, N, D], returns [1, N, H, D]."""
    del attention_mask
    key_TKD, value_TKD = arguments["cache"].update(
        key_states=key, value_states=value, layer_idx=module.layer_idx,
        read_index=arguments["read_index"], write_index=arguments["write_index"],
    )  # fmt: skip
    query_NHD = query.transpose(1, 2).squeeze(0).contiguous()
    starts = (arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"])
    longest = (arguments["max_seqlen_q"], arguments["max_seqlen_k"])
    attend = torch_flash if query.is_cuda else one_by_one
    return attend(query_NHD, key_TKD, value_TKD, starts, longest, module.scaling).unsqueeze(0), None


def torch_flash(
    query_NHD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
) -> Tensor:
    """Causal with the ends aligned: a sequence's last query sees all its keys."""
    return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
        query_NHD, key_TKD.contiguous(), value_TKD.contiguous(), *(start.int() for start in starts),
        *longest, 0.0, True, False, scale=scale,
    )[0]  # fmt: skip


def one_by_one(
    query_NHD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],  # noqa: ARG001
    scale: float,
) -> Tensor:
    """The same as `torch_flash`, slowly, on any device."""
    out_NHD = torch.zeros_like(query_NHD)
    rows, keys = starts[0].tolist(), starts[1].tolist()
    for index in range(len(rows) - 1):
        few, many = slice(rows[index], rows[index + 1]), slice(keys[index], keys[index + 1])
        query_len, key_len = few.stop - few.start, many.stop - many.start
        if query_len <= 0:
            continue
        mask = torch.ones(query_len, key_len, dtype=torch.bool, device=query_NHD.device)
        out_NHD[few] = sdpa(
            query_NHD[few].transpose(0, 1)[None], key_TKD[many].transpose(0, 1)[None],
            value_TKD[many].transpose(0, 1)[None], mask.tril(key_len - query_len), scale=scale, enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
    return out_NHD


def check_flash(device: torch.device) -> None:
    """Raises PeerUnavailable if the kernel is missing, or aligns or groups heads differently than expected."""
    generator = torch.Generator(device).manual_seed(5)
    starts = tuple(
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 3, 4, 70], [0, 40, 90, 170])
    )

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, 64, device=device, generator=generator).bfloat16()

    arguments = (draw(70, 8), draw(170, 2), draw(170, 2), starts, (66, 80), 0.125)
    try:
        found = torch_flash(*arguments).float()  # type: ignore[arg-type]
    except RuntimeError as error:
        raise PeerUnavailable(f"torch's flash kernel: {error}") from error
    expected = one_by_one(*arguments).float()  # type: ignore[arg-type]
    error_share = float((found - expected).norm() / expected.norm())
    if not error_share < 0.02:
        raise PeerUnavailable(f"torch's flash kernel is off by {error_share:.3g}")
