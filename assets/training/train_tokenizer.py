"""Trains the byte-level BPE tokenizer that the chat model and its draft share.

Run from the repository root: ``python -m assets.training.train_tokenizer --out assets/models/kedge-chat``.
Every byte has a token, so that any text survives a round trip; digits stand alone.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from assets.training.dialogues import training_dialogue

VOCABULARY_SIZE = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]

# Rendering is incremental: each message only appends, and nothing depends on later messages.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool['function'] | tojson + '\\n' }}
    {%- endfor %}
    {{- 'A call:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- elif message['content'] is iterable %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'text' %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {%- set arguments = call['function']['arguments'] %}
        {%- if message['content'] or not loop.first %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
        {{- arguments if arguments is string else arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def corpus(dialogues: int, messages: int) -> Iterator[str]:
    """Training text: messages of the first ``dialogues`` seeds."""
    for seed in range(dialogues):
        for message in islice(training_dialogue(seed), messages):
            yield f"{message.role}\n{message.content}"


def train(dialogues: int = 6000, messages: int = 40) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    tokenizer.train_from_iterator(corpus(dialogues, messages), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Saves the files, without fields that only tell how this process loaded them."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="model directories to write to")
    arguments = parser.parse_args()
    tokenizer = train()
    for directory in arguments.out:
        save_tokenizer(tokenizer, directory)
        print(f"{len(tokenizer)} tokens -> {directory}")


if __name__ == "__main__":
    main()
