"""Tokenizers of the embedded tasks: one token per character, made with `tokenizers`, kept as a
Hugging Face directory.
"""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

PAD = "<|pad|>"
END = "<|end|>"
# The first two of every vocabulary.
PAD_ID = 0
END_ID = 1

# The prompt of a question: there is no chat template.
TEMPLATE = "{question}="


def embedded_directory(policy: str = "embedded") -> pathlib.Path:
    """The Hugging Face directory of a shipped policy and its tokenizer."""
    return pathlib.Path(__file__).resolve().parent.parent / "assets" / policy


def build_tokenizer(vocabulary: Sequence[str], longest: int) -> Any:
    """A transformers tokenizer over a vocabulary, for sequences up to `longest` tokens.

    It is a byte-level BPE without merges: transformers 5 opens the tokenizer of every "qwen2"
    directory with its own Qwen2 pipeline, in which another kind would encode differently.
    Characters outside the vocabulary vanish.
    """
    import tokenizers
    import transformers

    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )


def save_tokenizer(directory: str | os.PathLike, tokenizer: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json, which AutoTokenizer opens without network."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "Qwen2Tokenizer"}
    # Qwen2's default for missing tokens is "<|endoftext|>", which would be added to the vocabulary.
    settings |= {"bos_token": None, "unk_token": PAD}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
