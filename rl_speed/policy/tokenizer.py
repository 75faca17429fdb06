"""Tokenizers and prompts, from a local directory: the only place that speaks to transformers' tokenizers."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_tokenizer(directory: str | os.PathLike) -> Any:
    """The tokenizer of a directory, never from the network.

    tokenizer.json, or vocab.json and merges.txt, with tokenizer_config.json.

    Raises:
      FileNotFoundError: no such directory, or no tokenizer in it.
    """
    import transformers

    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory (a tokenizer is read from a local directory)")
    if not any((directory / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise FileNotFoundError(f"{directory} holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt")
    return transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def encode_prompt(tokenizer: Any, question: str, template: str) -> list[int]:
    """Token ids of a question as the policy is to see it.

    Args:
      template: "chat" (the tokenizer's chat template, one user turn, ready for the answer), "plain" (the question alone),
        or a format string with {question}, in which other braces are doubled.

    Raises:
      ValueError: no chat template, or a format without {question}.
    """
    if template == "chat":
        if not tokenizer.chat_template:
            raise ValueError("config.data.prompt is 'chat', but this tokenizer has no chat template; use a format string such "
                             "as 'Question: {question}\\nAnswer:'")
        # transformers 5 returns a mapping where transformers 4 returned the ids.
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                             tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))
    if template == "plain":
        return list(tokenizer.encode(question))
    if "{question}" not in template:
        raise ValueError(f"the prompt template {template!r} is neither 'chat' nor 'plain' and has no {{question}}")
    return list(tokenizer.encode(template.format(question=question)))


def end_token_ids(directory: str | os.PathLike, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: those of generation_config.json (one or a list) and the tokenizer's own end token.

    Raises:
      ValueError: there is none.
    """
    ends: list[int] = []
    path = Path(directory) / "generation_config.json"
    if path.exists():
        found: int | Sequence[int] | None = json.loads(path.read_text()).get("eos_token_id")
        ends += [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    if not ends:
        raise ValueError(f"{directory}: neither generation_config.json nor the tokenizer names an end token")
    return tuple(dict.fromkeys(int(t) for t in ends))
