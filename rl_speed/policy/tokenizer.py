"""Tokenizers and prompts, from a local directory:
the only place that speaks to transformers' tokenizers.
"""

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_speed.policy.hf import read_json
from rl_speed.policy.prompt_formats import prompt_format

# What chat templates that write today's date into a prompt (Llama 3) get instead, the day that
# Llama's falls back to: the same question must be the same prompt tomorrow.
DATE = datetime.datetime(2024, 7, 26)


def load_tokenizer(directory: str | os.PathLike) -> Any:
    """The tokenizer of a directory, never from the network.

    tokenizer.json, or vocab.json and merges.txt, with tokenizer_config.json.

    Raises:
      FileNotFoundError: no such directory, or no tokenizer in it.
    """
    import transformers

    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: no such directory (a tokenizer is read from a local directory)"
        )
    has = lambda name: (directory / name).exists()
    if not (
        has("tokenizer.json") or has("tokenizer.model") or (has("vocab.json") and has("merges.txt"))
    ):
        raise FileNotFoundError(
            f"{directory} holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt"
        )
    return transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def prompt_encoder(tokenizer: Any, template: str, system: str = "") -> Callable[[str], list[int]]:
    """What turns a question into the token ids that the policy is to see.

    Chat templates bring their special tokens along, BOS included: their text is encoded as it is.
    Other prompts get what the tokenizer puts before a text (Llama's BOS), unless they begin with it
    already, and never what it would put behind: a prompt has not ended.

    Args:
      template: a name of `prompt_formats.PROMPTS` ("chat", "plain", "qwen_math_cot", ...), or a
        format string with {question}, in which other braces are doubled.
      system: the system turn, instead of the format's own.

    Raises:
      ValueError: no chat template, one that takes no system turn, a system turn without a chat
        template, or a format without {question}.
    """
    form = prompt_format(template)
    system = system or form.system or ""
    if form.chat and not tokenizer.chat_template:
        raise ValueError(
            f"config.data.prompt is {template!r}, but this tokenizer has no chat template; use a "
            "format string such as 'Question: {question}\\nAnswer:'"
        )
    if system and not form.chat:
        raise ValueError(
            "config.data.system needs a prompt that goes through the chat template; "
            f"config.data.prompt={template!r} does not: write the text into it"
        )
    bare = lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    before = [] if form.chat else added_before(tokenizer)

    def encode(question: str) -> list[int]:
        text = form.user.replace("{question}", question)
        if form.chat:
            text = _chat(tokenizer, text, system, template)
        if form.opening and not text.rstrip().endswith(form.opening.rstrip()):
            text += form.opening
        ids = bare(text)
        return ids if ids[: len(before)] == before else before + ids

    return encode


def encode_prompt(tokenizer: Any, question: str, template: str, system: str = "") -> list[int]:
    """`prompt_encoder` for one question."""
    return prompt_encoder(tokenizer, template, system)(question)


def added_before(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text: Llama's BOS, nothing for Qwen."""
    probe = "1"
    bare, full = (
        list(tokenizer.encode(probe, add_special_tokens=special)) for special in (False, True)
    )
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return full[:start]


def _chat(tokenizer: Any, user: str, system: str, template: str) -> str:
    import jinja2

    turns = [{"role": "system", "content": system}] if system else []
    try:
        # As text: of token ids, transformers 4 returns a list and transformers 5 a mapping.
        return tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": user}],
            add_generation_prompt=True,
            tokenize=False,
            date_string=DATE.strftime("%d %b %Y"),
            strftime_now=DATE.strftime,
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(
            "this tokenizer's chat template refuses a prompt of "
            f"{[t['role'] for t in turns] + ['user']} turns (config.data.prompt={template!r}): "
            f"{error}"
        ) from None


def end_token_ids(directory: str | os.PathLike, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: those of generation_config.json (one or a list) and the tokenizer's
    own end token.

    Raises:
      ValueError: there is none.
    """
    ends: list[int] = []
    path = Path(directory) / "generation_config.json"
    if path.exists():
        found: int | Sequence[int] | None = read_json(path).get("eos_token_id")
        if not (
            found is None
            or isinstance(found, int)
            or isinstance(found, list)
            and all(isinstance(t, int) for t in found)
        ):
            raise ValueError(
                f"{path}: eos_token_id must be a token id or a list of them, got {found!r}"
            )
        ends += [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    if not ends:
        raise ValueError(
            f"{directory}: neither generation_config.json nor the tokenizer names an end token"
        )
    return tuple(dict.fromkeys(int(t) for t in ends))
