"""The committed models: `transformers` loads them unchanged, and they have the promised sizes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from assets.training.evaluate_recall import MODEL, Ruler, cases, contains_value, hold, summary
from assets.training.recipes import RECIPES, Phase, Recipe
from assets.training.talkers import LocalTalk
from assets.training.team import Team
from assets.training.train_model import Trainer

MODELS = Path(__file__).parents[3] / "assets" / "models"
CHAT, DRAFT = MODELS / "kedge-chat", MODELS / "kedge-chat-draft"


def _load(directory: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def chat() -> LlamaForCausalLM:
    return _load(CHAT)


def test_parameter_counts(chat: LlamaForCausalLM) -> None:
    draft = _load(DRAFT)
    assert 2_000_000 < chat.num_parameters() < 4_000_000
    assert draft.num_parameters() * 8 < chat.num_parameters()


@pytest.mark.parametrize("directory", [CHAT, DRAFT])
def test_files(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 8192
    generation = GenerationConfig.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert config["eos_token_id"] == generation.eos_token_id == tokenizer.eos_token_id
    assert generation.do_sample is False
    assert sum(path.stat().st_size for path in directory.iterdir()) < 8_000_000
    for path in directory.glob("*.json"):
        assert "/work" not in path.read_text()


@pytest.mark.parametrize("name", ["chat", "draft"])
def test_the_recipe_is_what_is_committed(name: str) -> None:
    recipe = RECIPES[name]
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    wanted = recipe.config(tokenizer).to_dict()
    committed = json.loads((MODELS / recipe.directory / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "rope_parameters", "vocab_size"):
        assert committed[key] == wanted[key]


def test_talking_turn_by_turn_is_talking_at_once(chat: LlamaForCausalLM) -> None:
    """The evaluation's local session, turn by turn, gives what `generate` gives for the whole history."""
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    messages: list[dict[str, str]] = []
    with LocalTalk(chat, tokenizer, None) as talk:
        for user in ("My dog is called Rex.", "What is 2 plus 3?", "What is my dog called?"):
            reply = talk.say(user)
            messages.append({"role": "user", "content": user})
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            output = chat.generate(**inputs, max_new_tokens=120)
            new = output[0, inputs["input_ids"].shape[1] :]
            assert tokenizer.decode(new, skip_special_tokens=True) == reply
            messages.append({"role": "assistant", "content": reply})


def test_the_evaluation_picks_cases_that_are_far_enough() -> None:
    ruler = Ruler(AutoTokenizer.from_pretrained(CHAT))
    source = cases(ruler, 0, 10, 500)
    for _ in range(20):
        case = next(source)
        assert case.asked_turn - case.stated_turn >= 10
        assert ruler.tokens(case, case.references) >= 500


class _Parrot:
    """A session that gives these replies: the generator's, or wrong ones."""

    def __init__(self, replies: list[str]) -> None:
        self.replies = replies

    def __enter__(self) -> "_Parrot":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, user: str) -> str:
        assert user
        return self.replies.pop(0)


def test_the_evaluation_counts_right_and_wrong() -> None:
    ruler = Ruler(AutoTokenizer.from_pretrained(CHAT))
    source = cases(ruler, 0, 10, 500)
    chosen = [next(source) for _ in range(4)]
    right = [hold(case, lambda _, c=case: _Parrot(list(c.references)), ruler) for case in chosen]
    wrong = [hold(case, lambda _, c=case: _Parrot(["No."] * len(c.references)), ruler) for case in chosen[:1]]
    figures = summary(right + wrong)
    assert figures["dialogues"] == 5
    assert figures["recall"] == 0.8
    assert figures["min_turns"] >= 10


@pytest.mark.parametrize(
    ("reply", "value", "right"),
    [
        ("Your dog is called Rex.", "Rex", True),
        ("Your dog is called Rexa.", "Rex", False),
        ("Your PIN is 14821.", "4821", False),
        ("The code is blue-otter.", "otter", False),
        ("The keys are in the red box.", "the red box", True),
    ],
)
def test_a_value_counts_only_as_a_whole(reply: str, value: str, right: bool) -> None:
    assert contains_value(reply, value) is right


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Two steps give the same weights as one step and one resumed step."""
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    recipe = Recipe("tiny", 16, 16, 1, 2, 1, (Phase(32, 64, 640),), warmup_steps=1)
    whole = Trainer(recipe, tokenizer, tmp_path, Team())
    losses = [whole.train_step(), whole.train_step()]
    half = Trainer(recipe, tokenizer, tmp_path, Team())
    assert half.train_step() == losses[0]
    half.save_checkpoint()
    resumed = Trainer(recipe, tokenizer, tmp_path, Team())
    resumed.resume()
    assert resumed.train_step() == losses[1]
    assert resumed.tokens_seen == 128
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rates_warm_up_and_fall_to_nothing() -> None:
    recipe = RECIPES["chat"]
    assert recipe.rate_factor(0) < 0.05
    assert recipe.rate_factor(recipe.steps // 3) == 1.0
    assert recipe.rate_factor(recipe.steps - 1) < 0.01
    assert recipe.phase_at(0).row_tokens < recipe.phase_at(recipe.steps - 1).row_tokens
    assert MODEL.name == recipe.directory
