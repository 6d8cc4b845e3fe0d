"""A byte-level BPE tokenizer with a ChatML template, and a SentencePiece-like one. Both are made in milliseconds."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_ID = 0
START_ID = 1
BOS_ID = 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "My dog is called Rex. What is my dog called? Rex is a good dog, and he likes the park.",
    "The code word is blue seven. Count on from three: four five six seven eight nine ten.",
    "Grüße aus Köln, où est le café? 你好，世界。 Привет, мир! 🙂🙃",
] * 20


def byte_level_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer. END_ID ends an answer; by default BOS_ID begins a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_end|>", "<|im_start|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|begin|>", chat_template=template
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return fast


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: U+2581 for spaces, byte fallback, and a dropped space at the beginning."""
    characters = sorted({char.replace(" ", "\u2581") for text in CORPUS[:2] for char in text} | {"\u2581"})
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
