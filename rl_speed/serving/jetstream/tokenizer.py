"""JetStream's tokenizer interface over a Hugging Face tokenizer.

JetStream builds a SentencePiece tokenizer for any engine, adds the BOS token before every prompt,
and treats the pad token as a stop token. This is wrong for Hugging Face models: the tokenizer or
the chat template sets the start of a prompt, and the pad token is often an ordinary token.
"""

from typing import Any

import numpy as np

from rl_speed.policy import encode_prompt
from rl_speed.serving.engine import pad
from rl_speed.serving.jetstream.package import tokenizer_api


class PolicyTokenizer(tokenizer_api.Tokenizer):
    """Encodes prompts to padded ids, and decodes ids to text.

    Args:
      tokenizer: a transformers tokenizer. Do not share it between threads: encoding changes its
        state.
      end_tokens: ids that end a response. prompt: format of a prompt's text; see
        `policy.encode_prompt`.
      longest: most tokens of a prompt.
    """

    def __init__(self, tokenizer: Any, end_tokens: tuple[int, ...], prompt: str, longest: int):
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._prompt = prompt
        self._longest = longest

    def ids(self, text: str) -> list[int]:
        """Encodes a prompt to token ids, not padded."""
        return encode_prompt(self._tokenizer, text, self._prompt)

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Encodes a prompt to (padded ids i32[L], number of tokens). Ignores JetStream's keywords.

        Raises ValueError if the text has no tokens, or too many.
        """
        ids = self.ids(s)
        return pad(ids, self._longest), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Decodes ids to text. Decoding single tokens may give another text: see `TextStream`."""
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """The id with which `pad` fills."""
        return 0

    @property
    def eos_id(self) -> int:
        """The first of the end tokens."""
        return self._end_tokens[0]

    @property
    def bos_id(self) -> int:
        """The tokenizer's BOS token, or the pad token if there is none; `encode` never adds it."""
        bos = self._tokenizer.bos_token_id
        return self.pad_id if bos is None else bos

    @property
    def stop_tokens(self) -> set[int]:
        """All end tokens, and no others."""
        return set(self._end_tokens)
