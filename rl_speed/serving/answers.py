"""Formats responses and errors as OpenAI's completions and chat completions, whole or streamed."""

import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rl_speed.policy.tokenizer import special_ids
from rl_speed.serving.batcher import Full, Response, Stopped, Token
from rl_speed.serving.requests import ChatRequest, Invalid, Request
from rl_speed.serving.text import REPLACEMENT, StoppedText

Added = dict[str, Any]


class Choice:
    """One response of a request, converted to text token by token.

    Args:
      tokenizer: a transformers tokenizer. asked: the request. response: the batcher's response.

    Attributes:
      index: index of the choice. count: tokens so far. finish: finish_reason once it has ended.
    """

    def __init__(self, tokenizer: Any, asked: Request, response: Response, index: int):
        self._tokenizer = tokenizer
        self._asked = asked
        self.response = response
        self._text = StoppedText(self._decode, asked.stops)
        # Special tokens have no text in which a stop could be found.
        special = special_ids(tokenizer) if asked.stops else ()
        self._stop_ids = {i for i in special if tokenizer.decode([i]) in asked.stops}
        self.index = index
        self.count = 0
        self.finish: str | None = None
        self._waiting: list[Token] = []  # tokens whose text was not returned yet
        self._offset = 0  # number of characters returned

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def push(self, token: Token) -> Added | None:
        """Returns what a token adds: "text", "logprobs", and "token_ids" if requested; None while
        its text is held back.
        """
        self.count += 1
        if token.id in self._stop_ids:
            token = dataclasses.replace(token, finish="stop")
        self._waiting.append(token)
        piece = "" if token.finish == "stop" else self._text.push(token.id)
        if token.finish:
            piece += self._text.end()
        self.finish = "stop" if self._text.stopped else token.finish
        if not piece and not self.finish:
            return None
        tokens = self._waiting
        self._waiting = []
        added: Added = {"text": piece, "logprobs": None}
        if self._asked.top is not None:
            added["logprobs"] = self._logprobs([t for t in tokens if t.finish != "stop"])
        if self._asked.return_token_ids:
            added["token_ids"] = [t.id for t in tokens]
        self._offset += len(piece)
        return added

    def _word(self, token: int) -> str:
        """Returns a token's text behind another token: some tokenizers drop the space with which a
        text begins.
        """
        before = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        start = self._tokenizer.decode(before)
        both = self._tokenizer.decode([*before, token])
        return both[len(start) :] if both.startswith(start) else self._tokenizer.decode([token])

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            word = self._word(token)
            if REPLACEMENT in word:  # part of a character
                word = self._tokenizer.convert_ids_to_tokens(token)
                return {"token": word, "logprob": value, "bytes": None}
            return {"token": word, "logprob": value, "bytes": list(word.encode())}

        tops = [[entry(*x) for x in token.top[: self._asked.top]] for token in tokens]
        words = [entry(token.id, token.logprob) for token in tokens]
        if isinstance(self._asked, ChatRequest):
            content = [word | {"top_logprobs": top} for word, top in zip(words, tops)]
            return {"content": content, "refusal": None}
        lengths = [0 if word["bytes"] is None else len(word["token"]) for word in words]
        return {
            "tokens": [word["token"] for word in words],
            "token_logprobs": [word["logprob"] for word in words],
            "top_logprobs": [_by_text(top) for top in tops],
            "text_offset": [self._offset + sum(lengths[:i]) for i in range(len(words))],
        }


def _by_text(top: list[dict[str, Any]]) -> dict[str, float]:
    """Returns log-probs by text; of tokens with one text the likeliest, which is first."""
    found: dict[str, float] = {}
    for word in top:
        found.setdefault(word["token"], word["logprob"])
    return found


class Answer:
    """The body of the answer to a request.

    Args:
      asked: the request. model: name of the model. choices: its responses. prompt_tokens: tokens of
        all its prompts.
    """

    def __init__(self, asked: Request, model: str, choices: Sequence[Choice], prompt_tokens: int):
        self._asked = asked
        self._choices = choices
        self._prompt_tokens = prompt_tokens
        self._chat = isinstance(asked, ChatRequest)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def _usage(self) -> dict[str, int]:
        drawn = sum(choice.count for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self._prompt_tokens + drawn,
        }

    async def whole(self, events: AsyncIterator[tuple[Choice, Added]]) -> dict[str, Any]:
        """Returns the whole answer, once all choices have ended."""
        pieces: list[list[Added]] = [[] for _ in self._choices]
        async for choice, added in events:
            pieces[choice.index].append(added)
        return self._head | {
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._choice(*each) for each in zip(self._choices, pieces)],
            "usage": self._usage(),
        }

    def _choice(self, choice: Choice, pieces: list[Added]) -> dict[str, Any]:
        made = {"index": choice.index, "finish_reason": choice.finish, "logprobs": None}
        text = "".join(piece["text"] for piece in pieces)
        if self._asked.top is not None:
            made["logprobs"] = {
                name: None if first is None else [x for p in pieces for x in p["logprobs"][name]]
                for name, first in pieces[0]["logprobs"].items()
            }
        if self._asked.return_token_ids:
            made["token_ids"] = [i for piece in pieces for i in piece["token_ids"]]
        said = {"role": "assistant", "content": text, "refusal": None}
        return made | ({"message": said} if self._chat else {"text": text})

    async def stream(self, events: AsyncIterator[tuple[Choice, Added]]) -> AsyncIterator[str]:
        """Yields server-sent events: the added text of choices, then an error if one ended a
        choice, then [DONE].
        """
        counts = self._asked.stream_options and self._asked.stream_options.include_usage
        kind = "chat.completion.chunk" if self._chat else "text_completion"

        def chunk(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
            body = self._head | {"object": kind, "choices": choices}
            return _event(body | ({"usage": usage} if counts else {}))

        if self._chat:
            first = {"role": "assistant", "content": ""}
            for choice in self._choices:
                yield chunk([{"index": choice.index, "delta": first, "finish_reason": None}])
        try:
            async for choice, added in events:
                text = added.pop("text")
                said = (
                    {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
                )
                yield chunk(
                    [{"index": choice.index, "finish_reason": choice.finish} | said | added]
                )
        except RuntimeError as error:
            yield _event(error_body(error))
        else:
            if counts:
                yield chunk([], self._usage())
        yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_status(error: Exception) -> int:
    """HTTP status of an error."""
    if isinstance(error, Invalid):
        return error.status
    return {Full: 429, Stopped: 503}.get(type(error), 500)


def error_body(error: Exception) -> dict[str, Any]:
    """Body of an error in OpenAI's format."""
    refused = isinstance(error, Invalid)
    kind = {400: "invalid_request_error", 429: "rate_limit_error"}
    return {
        "error": {
            "message": str(error),
            "type": kind.get(400 if refused else error_status(error), "server_error"),
            "param": error.param if refused else None,
            "code": error.code if refused else None,
        }
    }
