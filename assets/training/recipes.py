"""Shapes and curricula of the embedded models."""

from dataclasses import dataclass

from transformers import LlamaConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Phase:
    """A phase of training: ``total_tokens`` tokens in rows of ``row_tokens``, ``batch_tokens`` in each step.

    ``drill_share`` of the rows are copying drill instead of dialogue, of the harder sort if ``narrow_drill``.
    ``far_share`` of the dialogues go in rounds of telling, chatting and asking.
    """

    row_tokens: int
    batch_tokens: int
    total_tokens: int
    drill_share: float = 0.0
    narrow_drill: bool = False
    far_share: float = 0.0

    @property
    def steps(self) -> int:
        return self.total_tokens // self.batch_tokens


@dataclass(frozen=True)
class Recipe:
    """Shape, learning rates and curriculum. Short rows come first, because copying is learned sooner on them."""

    directory: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    phases: tuple[Phase, ...]
    muon_rate: float = 0.01
    adam_rate: float = 0.003
    warmup_steps: int = 100
    decay_share: float = 0.3
    restarts: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def config(self, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def rate_factor(self, step: int) -> float:
        """The factor of the learning rate: warm-up, constant, then linear to zero. From a restart on it starts lower
        and only falls."""
        begin = max([0, *(restart for restart in self.restarts if restart <= step)])
        end = min([self.steps, *(restart for restart in self.restarts if restart > step)])
        left = (end - step) / (end - begin)
        highest = 0.7 * left if begin else min(1.0, left / self.decay_share)
        return min(highest, (step - begin + 1) / self.warmup_steps)

    def phase_at(self, step: int) -> Phase:
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise ValueError("the recipe has no such step")


RECIPES = {
    "chat": Recipe(
        "kedge-chat",
        hidden=256,
        intermediate=512,
        layers=4,
        heads=4,
        kv_heads=2,
        phases=(
            Phase(256, 4096, 1_024_000, drill_share=0.5),
            Phase(256, 4096, 1_024_000, drill_share=0.125),
            Phase(512, 4096, 819_200),
            Phase(1024, 8192, 4_096_000),
            Phase(2048, 8192, 1_638_400),
            Phase(2048, 8192, 983_040, drill_share=0.5, narrow_drill=True),
            Phase(2048, 8192, 1_146_880),
            Phase(2048, 8192, 1_392_640),
            Phase(2048, 8192, 3_276_800, far_share=0.7),
        ),
        restarts=(1400, 1660, 1830),
    ),
    "draft": Recipe(
        "kedge-chat-draft",
        hidden=96,
        intermediate=128,
        layers=2,
        heads=3,
        kv_heads=1,
        phases=(
            Phase(256, 4096, 1_024_000, drill_share=0.5),
            Phase(256, 4096, 1_638_400, drill_share=0.125),
            Phase(512, 4096, 819_200),
            Phase(1024, 8192, 819_200),
        ),
    ),
}
