"""The embedded task's own tokenizer: one token a character, made with `tokenizers`,
kept as a Hugging Face directory.
"""

import json
import os
import pathlib
from typing import Any

from rl_speed.data.chain import FILL, TABLES

PAD, END = "<|pad|>", "<|end|>"
VOCABULARY = (PAD, END, *"0123456789", *TABLES, FILL, "=")
PAD_ID, END_ID = VOCABULARY.index(PAD), VOCABULARY.index(END)

# How a question becomes a prompt: there is no chat template.
TEMPLATE = "{question}="


def embedded_directory() -> pathlib.Path:
    """The shipped policy with its tokenizer, a Hugging Face directory."""
    return pathlib.Path(__file__).resolve().parent.parent / "assets" / "embedded"


def build_tokenizer() -> Any:
    """A transformers tokenizer over `VOCABULARY`.

    It is a byte-level BPE without merges, because transformers 5 opens the tokenizer of every
    "qwen2" directory with its own Qwen2 pipeline, whatever the directory says: a tokenizer of
    another kind would encode differently there and in transformers 4. As in any such tokenizer
    without an unknown token, characters outside the vocabulary vanish.
    """
    import tokenizers
    import transformers

    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(VOCABULARY)}, merges=[])
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
        model_max_length=64,
    )


def save_tokenizer(directory: str | os.PathLike) -> None:
    """Writes tokenizer.json and tokenizer_config.json,
    which AutoTokenizer opens without network.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    # Qwen2's own default for what is missing is "<|endoftext|>", which would be added to the
    # vocabulary.
    settings |= {"bos_token": None, "unk_token": PAD}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
