"""Encodes conversations with the tokenizer's chat template, and marks the assistant's tokens."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from rl_speed.policy.tokenizer import DATE

# The tag with which a template marks the assistant's text, for transformers.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(
    tokenizer: Any, turns: Sequence[dict[str, Any]], first: int = 0
) -> tuple[list[int], list[bool]]:
    """Encodes a conversation up to the last assistant token.

    The token that closes an assistant turn counts as the assistant's; line breaks after it do not.
    If the template marks the assistant's text ({% generation %}), the marks are used. Otherwise the
    conversation is rendered without and with each assistant turn, and the difference is the
    assistant's text; earlier turns must be rendered the same in both. Each part is encoded
    separately, as the sampler encodes prompts and responses.

    Args:
      turns: dicts with "role" and "content".
      first: index of the first turn whose assistant text is marked.

    Returns:
      (token ids, for each token whether it is the assistant's).

    Raises:
      ValueError: the tokenizer has no chat template; the template refuses these turns, or renders
        earlier turns differently when more follow; a turn contains a special token; or there is no
        assistant turn.
    """
    template = tokenizer.chat_template and tokenizer.get_chat_template()
    if not template:
        raise ValueError(
            "conversations need a chat template, and this tokenizer has none: use a chat model's "
            "tokenizer, or set chat_template in its tokenizer_config.json"
        )
    _require_plain(tokenizer, turns)
    if _GENERATION.search(template) and tokenizer.is_fast:
        parts = _marked_parts(tokenizer, turns, first)
    else:
        parts = _parts(tokenizer, turns, first)
    ids = [token for part, _ in parts for token in part]
    learned = [flag for part, flag in parts for _ in part]
    if not any(learned):
        raise ValueError("there is no turn of the assistant to learn")
    end = len(learned) - learned[::-1].index(True)
    return ids[:end], learned[:end]


Parts = list[tuple[list[int], bool]]


def _marked_parts(tokenizer: Any, turns: Sequence[dict[str, Any]], first: int) -> Parts:
    whole = _render(
        tokenizer, turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    before = len(_encode(tokenizer, _render(tokenizer, turns[:first]))) if first else 0
    flags = zip(whole["input_ids"], whole["assistant_masks"])
    return [([token], bool(flag) and i >= before) for i, (token, flag) in enumerate(flags)]


def _parts(tokenizer: Any, turns: Sequence[dict[str, Any]], first: int) -> Parts:
    whole = _render(tokenizer, turns)
    parts = []
    at = 0
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant" or i < first:
            continue
        start = _render(tokenizer, turns[:i], add_generation_prompt=True) if i else ""
        end = _render(tokenizer, turns[: i + 1]) if i + 1 < len(turns) else whole
        if not (i and whole.startswith(end) and end.startswith(start)):
            raise ValueError(
                f"turn {i + 1}: the assistant's text cannot be located, because this tokenizer's "
                "chat template does not put a response directly after its prompt, or renders "
                "earlier turns differently when more follow. Mark the assistant's text in the "
                "template with {% generation %}, or use conversations whose only assistant turn "
                "is the last"
                if i
                else "turn 1 is the assistant's, but a prompt must come before it: start with a "
                "user turn"
            )
        written, behind = _up_to_its_end(tokenizer, _encode(tokenizer, end[len(start) :]))
        parts += [(_encode(tokenizer, whole[at : len(start)]), False), (written, True)]
        parts += [(behind, False)]
        at = len(end)
    return parts


def _up_to_its_end(tokenizer: Any, ids: list[int]) -> tuple[list[int], list[int]]:
    """Splits a turn's tokens after the token that closes it: (turn, white space after it)."""
    special = _special_tokens(tokenizer)
    ends = [i for i, token in enumerate(ids) if token in special]
    if not ends or tokenizer.decode(ids[ends[-1] + 1 :]).strip():
        return ids, []
    return ids[: ends[-1] + 1], ids[ends[-1] + 1 :]


def _require_plain(tokenizer: Any, turns: Sequence[dict[str, Any]]) -> None:
    for number, turn in enumerate(turns, start=1):
        for text in _special_tokens(tokenizer).values():
            if text in turn["content"]:
                raise ValueError(
                    f"turn {number} ({turn['role']}) contains the special token {text!r}, which "
                    "would be read as that token, such as a turn boundary; remove it"
                )


@functools.lru_cache(8)
def _special_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder.items()
    return {
        **dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)),
        **{number: token.content for number, token in added if token.special},
    }


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _render(tokenizer: Any, turns: Sequence[dict[str, Any]], **options: Any) -> Any:
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            list(turns),
            **{"tokenize": False, **options},
            date_string=DATE.strftime("%d %b %Y"),
            strftime_now=DATE.strftime,
        )
    except (jinja2.TemplateError, TypeError) as error:
        roles = [turn["role"] for turn in turns]
        raise ValueError(f"this tokenizer's chat template refuses {roles} turns: {error}") from None
