"""Text of a response while it is generated."""

from collections.abc import Callable, Iterable, Sequence

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
        self._window = []
        self._said = 0
        return new

    def _new(self) -> str:
        if not self._window:
            return ""
        said = self._decode(self._window[: self._said])
        text = self._decode(self._window)
        return (
            text[len(said) :] if text.startswith(said) else self._decode(self._window[self._said :])
        )


class StoppedText:
    """Text of a response up to the first of its stop strings, which is not part of it.

    Text that may be the beginning of a stop string is held back until it is known not to be.

    Args:
      decode: token ids -> text. stops: strings that end the response.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self._stream = TextStream(decode)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that a token adds; sets `stopped` where it completes a stop string."""
        return self._add(self._stream.push([token]))

    def end(self) -> str:
        """The text that was held back; none behind a stop string."""
        if self.stopped:
            return ""
        piece = self._add(self._stream.end())
        rest = self._held
        self._held = ""
        return piece + rest

    def _add(self, piece: str) -> str:
        text = self._held + piece
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            self.stopped = True
            return text[: min(found)]
        keep = max(
            (
                n
                for stop in self._stops
                for n in range(min(len(stop) - 1, len(text)), 0, -1)
                if text.endswith(stop[:n])
            ),
            default=0,
        )
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]
