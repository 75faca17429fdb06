"""Text of a response while it is generated."""

from collections.abc import Callable, Iterable

# What decoders put in place of bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"


class TextStream:
    """Token ids in, the text they add out: pieces that together are `decode` of all ids.

    One token need not be text of its own. A character may be spread over several, which are held
    back until it is whole; and a decoder may treat the first token otherwise (sentencepiece strips
    its space), hence a window of tokens is decoded, the tokens of the last piece along with
    what is new.

    One decoder revises what it has said: byte fallback (Llama 2) makes a whole run of bytes
    unreadable where the last of them is wrong. Characters that were whole when they were
    returned stay.

    Args:
      decode: token ids -> text.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._said = 0  # tokens at the start of the window whose text was returned

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens add, without what may still change."""
        return "".join(map(self._push, ids))

    def _push(self, token: int) -> str:
        self._window.append(token)
        new = self._new()
        if not new or new.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._said :]
        self._said = len(self._window)
        return new

    def end(self) -> str:
        """What was held back: tokens that ended inside a character."""
        new = self._new()
        self._window, self._said = [], 0
        return new

    def _new(self) -> str:
        if not self._window:
            return ""
        said, text = self._decode(self._window[: self._said]), self._decode(self._window)
        return (
            text[len(said) :] if text.startswith(said) else self._decode(self._window[self._said :])
        )
