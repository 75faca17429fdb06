"""OpenAI's /v1/chat/completions and /v1/completions over HTTP: an ASGI application around a
`Batcher`, and a server that runs it.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rl_speed.policy import encode_prompt, load_tokenizer
from rl_speed.serving.batcher import Batcher, Events, Full, Response, Stopped, Token
from rl_speed.serving.engine import Engine
from rl_speed.serving.text import StoppedText

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    from rl_speed.serving.requests import ChatRequest, CompletionRequest, Invalid, Request, parse
except ImportError as error:
    raise ImportError(f"serving needs an extra: pip install 'rl_speed[serve]'; {error}") from error

_LOG = logging.getLogger(__name__)

MAX_BODY = 4 << 20  # bytes of a request
MAX_CHOICES = 128  # responses to one request


class Choice:
    """One response of a request, as text.

    Args:
      response: what the batcher draws. app: whose tokenizer decodes it. asked: the request.
      prompt: token ids.
    """

    def __init__(self, app: "App", asked: Request, response: Response):
        self._app, self._asked, self.response = app, asked, response
        self._text = StoppedText(app.decode, asked.stops)
        self.index, self.count, self.finish = response.tag[1], 0, None
        self._waiting: list[Token] = []  # tokens whose text was not returned
        self._offset = 0  # characters that were returned

    def push(self, token: Token) -> dict[str, Any] | None:
        """What a token adds to the choice, in the endpoint's form; None: nothing yet."""
        self.count += 1
        self._waiting.append(token)
        piece = "" if token.finish == "stop" else self._text.push(token.id)
        if token.finish:
            piece += self._text.end()
        if self._text.stopped:
            self._app.batcher.cancel(self.response)
        self.finish = "stop" if self._text.stopped else token.finish
        return self._add(piece) if piece or self.finish else None

    def _add(self, piece: str) -> dict[str, Any]:
        tokens, self._waiting = self._waiting, []
        added: dict[str, Any] = {"text": piece, "logprobs": None}
        if self._asked.top is not None:
            added["logprobs"] = self._logprobs([t for t in tokens if t.finish != "stop"])
        if self._asked.return_token_ids:
            added["token_ids"] = [token.id for token in tokens]
        self._offset += len(piece)
        return added

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        word, top = self._app.word, self._asked.top
        if isinstance(self._asked, ChatRequest):
            entry = lambda t, value: {
                "token": word(t),
                "logprob": value,
                "bytes": list(word(t).encode()),
            }
            return {
                "content": [
                    entry(t.id, t.logprob) | {"top_logprobs": [entry(*x) for x in t.top[:top]]}
                    for t in tokens
                ],
                "refusal": None,
            }
        words = [word(t.id) for t in tokens]
        starts = [self._offset + sum(map(len, words[:i])) for i in range(len(words))]
        return {
            "tokens": words,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{word(i): v for i, v in t.top[:top]} for t in tokens],
            "text_offset": starts,
        }


class App:
    """The application, of one served policy.

    Args:
      engine: compiled by `warm_up`. directory: with the tokenizer. name: of the model.
      prompt: how a chat becomes a prompt; "chat": the tokenizer's template, any turns. Other
        formats of `policy.encode_prompt` take one user turn.
      temperature, top_p: for requests that name none. queue: responses that may wait.
      on_crash: see `Batcher`.

    Attributes:
      asgi: the ASGI application. batcher: made on `start`.

    Raises:
      FileNotFoundError, ValueError: no tokenizer, or one without a chat template.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        name: str,
        prompt: str = "chat",
        temperature: float = 1.0,
        top_p: float = 1.0,
        queue: int = 256,
        on_crash: Callable[[], None] = lambda: None,
    ):
        self._engine, self.name, self._prompt = engine, name, prompt
        self._temperature, self._top_p = temperature, top_p
        self._tokenizer, self._created = load_tokenizer(directory), int(time.time())
        encode_prompt(self._tokenizer, "0", prompt)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.batcher = Batcher(engine, self._deliver, queue, on_crash)
        self.asgi = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/health", self.health),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )

    def decode(self, ids: list[int]) -> str:
        """Text of ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def word(self, token: int) -> str:
        """Text of one token, special ones by name."""
        return self._tokenizer.decode([token])

    async def models(self, http: HTTPRequest) -> JSONResponse:
        """The one model, as a list or by its name."""
        model = {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rl_speed",
            "max_model_len": self._engine.max_prefill_length + self._engine.config.max_new,
        }
        name = http.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        return JSONResponse(model) if name == self.name else _error(self._unknown(name))

    async def health(self, http: HTTPRequest) -> JSONResponse:
        """Status 200, or 503 where no more requests are served; how busy it is."""
        running, waiting = self.batcher.busy
        found: dict[str, Any] = {"status": "ok", "running": running, "waiting": waiting}
        try:
            self.batcher.check()
        except Exception as error:
            return JSONResponse(found | {"status": str(error)}, status_code=503)
        return JSONResponse(found)

    async def chat(self, http: HTTPRequest) -> Any:
        """POST /v1/chat/completions."""
        return await self._answer(http, ChatRequest)

    async def completions(self, http: HTTPRequest) -> Any:
        """POST /v1/completions."""
        return await self._answer(http, CompletionRequest)

    async def _answer(self, http: HTTPRequest, kind: type[Request]) -> Any:
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue = asyncio.Queue()
        try:
            asked = parse(kind, await _body(http))
            prompts = self._check(asked)
            responses = self._responses(asked, prompts, queue)
            self.batcher.submit(responses)
        except (Invalid, Full, Stopped, RuntimeError) as error:
            return _error(error)
        choices = [Choice(self, asked, response) for response in responses]
        answer = Answer(asked, self.name, choices, prompts)
        events = self._events(queue, choices)
        if asked.stream:
            return StreamingResponse(
                answer.stream(events),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache"},
            )
        return await _unless_left(http, answer.whole(events))

    async def _events(
        self, queue: asyncio.Queue, choices: list[Choice]
    ) -> AsyncIterator[tuple[Choice, dict[str, Any]]]:
        """(choice, what is added to it) until all have ended; frees the slots of those that have
        not where nobody reads on. Raises what ended the decoding of one.
        """
        try:
            going = len(choices)
            while going:
                index, event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                choice = choices[index]
                if choice.finish is None:
                    added = choice.push(event)
                    going -= choice.finish is not None
                    if added is not None:
                        yield choice, added
        finally:
            for choice in choices:
                self.batcher.cancel(choice.response)

    def _deliver(self, events: Events) -> None:
        def put() -> None:
            for response, event in events:
                queue, index = response.tag
                queue.put_nowait((index, event))

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads on
            self._loop.call_soon_threadsafe(put)

    def _unknown(self, name: str) -> Invalid:
        return Invalid(
            f"there is no model {name!r}; this server has {self.name!r}",
            "model",
            code="model_not_found",
            status=404,
        )

    def _check(self, asked: Request) -> list[list[int]]:
        """Prompts as token ids. Raises Invalid for what this server cannot hold."""
        if asked.model != self.name:
            raise self._unknown(asked.model)
        field = "prompt"
        try:
            if isinstance(asked, ChatRequest):
                field = "messages"
                prompts = [self._chat_ids([message.turn for message in asked.messages])]
            else:
                prompts = [
                    encode_prompt(self._tokenizer, p, "plain") if isinstance(p, str) else p
                    for p in asked.prompts
                ]
        except ValueError as error:
            raise Invalid(str(error), field, code="invalid_value") from None
        longest, vocab = self._engine.max_prefill_length, self._engine.model.vocab_size
        for ids in prompts:
            if not 1 <= len(ids) <= longest:
                raise Invalid(
                    f"the prompt has {len(ids)} tokens; this server takes 1 to {longest}",
                    field,
                    code="context_length_exceeded" if ids else "invalid_value",
                )
            for token in ids:
                if not 0 <= token < vocab:
                    raise Invalid(
                        f"token id {token} is none of 0 to {vocab - 1}", field, code="invalid_value"
                    )
        most, allowed = self._engine.config.max_new, min(MAX_CHOICES, self.batcher.room)
        if (asked.max_tokens or 0) > most:
            raise Invalid(
                f"max_tokens must be from 1 to {most}, got {asked.max_tokens}",
                "max_tokens",
                code="invalid_value",
            )
        if asked.n * len(prompts) > allowed:
            raise Invalid(
                f"{len(prompts)} prompts with n={asked.n} are {asked.n * len(prompts)} responses; "
                f"a request may have {allowed}",
                "n",
                code="invalid_value",
            )
        return prompts

    def _chat_ids(self, turns: list[dict[str, str]]) -> list[int]:
        roles = [turn["role"] for turn in turns]
        if roles not in (["user"], ["system", "user"]):
            raise ValueError(f"turns must be one of user behind at most one of system, got {roles}")
        system = turns[0]["content"] if len(turns) > 1 else ""
        return encode_prompt(self._tokenizer, turns[-1]["content"], self._prompt, system=system)

    def _responses(
        self, asked: Request, prompts: list[list[int]], queue: asyncio.Queue
    ) -> list[Response]:
        limit = asked.max_tokens or min(
            asked.default_tokens or self._engine.config.max_new, self._engine.config.max_new
        )
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        return [
            Response(
                prompt,
                limit,
                self._temperature if asked.temperature is None else asked.temperature,
                self._top_p if asked.top_p is None else asked.top_p,
                seed=seed,
                index=i * asked.n + j,
                logprobs=asked.top is not None,
                tag=(queue, i * asked.n + j),
            )
            for i, prompt in enumerate(prompts)
            for j in range(asked.n)
        ]


class Answer:
    """A request's answer in OpenAI's form, whole or as a stream of events."""

    def __init__(
        self, asked: Request, model: str, choices: list[Choice], prompts: list[list[int]]
    ):
        self._asked, self._choices, self._prompts = asked, choices, prompts
        self._chat = isinstance(asked, ChatRequest)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._prompts))
        completion = sum(choice.count for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    async def whole(self, events: AsyncIterator) -> JSONResponse:
        """The answer once all choices have ended."""
        pieces: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        try:
            async for choice, added in events:
                pieces[choice.index].append(added)
        except (Stopped, ArithmeticError, RuntimeError) as error:
            return _error(error)
        return JSONResponse(
            self._head
            | {
                "object": "chat.completion" if self._chat else "text_completion",
                "choices": [self._choice(*each) for each in zip(self._choices, pieces)],
                "usage": self._usage(),
            }
        )

    def _choice(self, choice: Choice, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        made = {"index": choice.index, "finish_reason": choice.finish, "logprobs": None}
        text = "".join(piece["text"] for piece in pieces)
        if self._asked.top is not None:
            parts = [piece["logprobs"] for piece in pieces]
            made["logprobs"] = {
                k: sum((part[k] for part in parts), []) if isinstance(v, list) else v
                for k, v in parts[0].items()
            }
        if self._asked.return_token_ids:
            made["token_ids"] = [i for piece in pieces for i in piece["token_ids"]]
        said = {"role": "assistant", "content": text, "refusal": None}
        return made | ({"message": said} if self._chat else {"text": text})

    async def stream(self, events: AsyncIterator) -> AsyncIterator[str]:
        """Server-sent events: what is added to choices as it comes, then [DONE]."""
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
                said = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
                more = {"index": choice.index, "finish_reason": choice.finish}
                yield chunk([more | said | added])
        except (Stopped, ArithmeticError, RuntimeError) as error:
            yield _event(_error_body(error))
        else:
            if counts:
                yield chunk([], self._usage())
        yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _error_body(error: Exception) -> dict[str, Any]:
    refused = isinstance(error, Invalid)
    kind = "invalid_request_error" if refused else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": "rate_limit_error" if isinstance(error, Full) else kind,
            "param": error.param if refused else None,
            "code": error.code if refused else None,
        }
    }


def _error(error: Exception) -> JSONResponse:
    status = {Full: 429, Stopped: 503}.get(type(error), 500)
    return JSONResponse(
        _error_body(error),
        status_code=error.status if isinstance(error, Invalid) else status,
        headers={"Retry-After": "1"} if status in (429, 503) else None,
    )


async def _http_error(http: HTTPRequest, error: HTTPException) -> JSONResponse:
    message = f"{http.method} {http.url.path}: {error.detail}"
    return _error(Invalid(message, None, code="http_error", status=error.status_code))


async def _server_error(http: HTTPRequest, error: Exception) -> JSONResponse:
    return _error(RuntimeError(f"{type(error).__name__}: {error}"))


async def _body(http: HTTPRequest) -> bytes:
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise Invalid(
                f"the body is longer than {MAX_BODY} bytes", None, code="too_large", status=413
            )
    return bytes(body)


async def _unless_left(http: HTTPRequest, answering: Any) -> Any:
    """The answer, unless the client leaves before it is there."""

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(answering), asyncio.ensure_future(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect()
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


class Server:
    """The application behind an HTTP server in a thread of its own, listening once it is made.

    Args:
      make: from a callback for crashes to an `App`. host, port: where to listen; port 0 takes a
        free one. on_crash: called where decoding fails; the server answers 500 from then on.

    Attributes:
      port: where it listens. app: what it serves.

    Raises:
      OSError: the address cannot be had; nothing is left running.
    """

    def __init__(self, app: Callable[[], App], host: str = "localhost", port: int = 0):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host.strip("[]"), port), family=family)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        self.port = self._socket.getsockname()[1]
        self.app = app()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app.asgi, log_config=None, access_log=False, lifespan="off", http="h11"
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self, grace: float = 10.0) -> None:
        """Take no more requests, give those under way `grace` seconds to end, and end the rest
        with an error of their own.
        """
        self._server.should_exit = True
        self._thread.join(grace)
        self.app.batcher.stop()
        self._thread.join(grace)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
