"""A checkpoint's tokenizer equals the one that AutoTokenizer loads, without the imports that only its model needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from serving.text.tokenizer_files import load_tokenizer
from tests.unit.serving.small_tokenizer import byte_level_tokenizer

EMBEDDED_MODEL = Path(__file__).parents[4] / "assets/models/kedge-chat"
TEXT = "My dog is called Rex.<|im_end|>\n<|im_start|>assistant\n où est le café? 🙂"
OF_MODELS = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "sympy",
    "transformers.models.llama.configuration_llama",
)


def checkpoint(directory: Path, config: dict[str, object], **names: object) -> Path:
    """Writes the small tokenizer beside a model's configuration. `names` change tokenizer_config.json; None removes a
    name."""
    byte_level_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "tokenizer_config.json"
    changed = json.loads(path.read_text()) | names
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    return directory


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2", "qwen2_moe", "some_model"])
@pytest.mark.parametrize(
    "class_name",
    [
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
        "LlamaTokenizerFast",
        "Qwen2TokenizerFast",
        "GPT2Tokenizer",
        None,
    ],
)
def test_it_is_the_tokenizer_that_transformers_chooses(
    tmp_path: Path, model_type: str, class_name: str | None
) -> None:
    path = checkpoint(tmp_path, {"model_type": model_type}, tokenizer_class=class_name)
    try:
        expected = AutoTokenizer.from_pretrained(path)
    except ValueError as refused:
        with pytest.raises(type(refused)):
            load_tokenizer(str(path))
        return
    loaded = load_tokenizer(str(path))
    assert loaded is not None
    assert type(loaded) is type(expected)
    assert loaded.encode(TEXT) == expected.encode(TEXT)
    assert loaded.chat_template == expected.chat_template
    assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(str(tmp_path)) is None


def test_it_imports_nothing_that_only_a_model_needs() -> None:
    """These imports used to be a third of the seconds of CPU time that the start of a replica took."""
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from serving.text.tokenizer_files import load_tokenizer;"
            f" load_tokenizer({str(EMBEDDED_MODEL)!r});"
            f" print([name for name in {OF_MODELS!r} if name in sys.modules])",
        ],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=True,
    )
    assert told.stdout.strip() == "[]"
