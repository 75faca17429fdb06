"""JetStream's orchestrator and gRPC server around an engine, safe against client input.

In JetStream 0.2.2 the threads that prefill, generate and detokenize kill the process (SIGKILL) on
any exception. So every request is tokenized and checked before it reaches them, and refused with
INVALID_ARGUMENT if it cannot be served. Text is decoded here from the returned ids, because
JetStream decodes each token separately, which breaks characters that span several tokens.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from rl_speed.serving.jetstream.engine import PolicyEngine
from rl_speed.serving.jetstream.package import (
    jetstream_pb2,
    jetstream_pb2_grpc,
    orchestrator,
    server_lib,
)
from rl_speed.serving.text import TextStream

Request = jetstream_pb2.DecodeRequest
Response = jetstream_pb2.DecodeResponse


class Driver(orchestrator.Driver):
    """JetStream's driver, for requests that are already token ids."""

    def _process_prefill_content(
        self, request: Any, tokenizer: Any, is_bos: bool, max_prefill_length: int
    ) -> tuple[np.ndarray, int]:
        # JetStream's own method would add a BOS token before the ids.
        return self._prefill_engines[0].pad(request.prefill_content), len(request.prefill_content)

    def _generate_thread(self, idx: int) -> None:
        while True:
            try:
                return super()._generate_thread(idx)
            except AssertionError:
                # "We must have some requests inserted": the detokenizing thread closed the last
                # response just after this thread had looked. All slots are free, so a restart loses
                # nothing.
                if (
                    self._generate_slots[idx].qsize()
                    < self._generate_engines[idx].max_concurrent_decodes
                ):
                    raise


class Servicer(orchestrator.LLMOrchestrator):
    """JetStream's service, with checks of requests. It has its own tokenizer for text.

    Args:
      driver: driver of `engine`.
    """

    def __init__(self, driver: Driver, engine: PolicyEngine):
        super().__init__(driver)
        self._engine = engine
        self._tokenizer = engine.build_tokenizer(engine.get_tokenizer())

    def prompt(self, request: Request) -> list[int]:
        """Returns the token ids of a request's prompt.

        Raises ValueError with the invalid field of the request.
        """
        engine = self._engine
        kind = request.WhichOneof("content")
        if kind is None:
            raise ValueError("the request must have text_content or token_content")
        if request.session_cache:
            raise ValueError("session_cache is not supported: give the whole prompt")
        if not 1 <= request.max_tokens <= engine.config.max_new:
            raise ValueError(
                f"max_tokens must be between 1 and {engine.config.max_new}, got "
                f"{request.max_tokens}"
            )
        if kind == "text_content":
            text = request.text_content.text
            ids = self._tokenizer.ids(text)
            if not ids:
                raise ValueError(
                    f"the text {text[:40]!r} encodes to no tokens; send one that is not empty"
                )
        else:
            ids = list(request.token_content.token_ids)
            bad = [t for t in ids if not 0 <= t < engine.model.vocab_size]
            if not ids or bad:
                raise ValueError(
                    f"token ids must be between 0 and {engine.model.vocab_size - 1}, got {bad[0]}"
                    if bad
                    else "token_content has no token_ids"
                )
        if len(ids) > engine.max_prefill_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; this server takes at most "
                f"{engine.max_prefill_length}"
            )
        return ids

    async def Decode(
        self, request: Request, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[Response]:
        """Yields the response's tokens as they are drawn, with text if the prompt is text.

        An invalid request is refused with INVALID_ARGUMENT; without a context it raises ValueError.
        """
        try:
            ids = self.prompt(request)
        except ValueError as error:
            if context is None:
                raise
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        as_text = request.HasField("text_content")
        asked = Request(
            token_content=Request.TokenContent(token_ids=ids),
            max_tokens=request.max_tokens,
            priority=request.priority,
        )
        texts = [TextStream(self._tokenizer.decode) for _ in range(self._engine.samples_per_slot)]
        try:
            async for response in super().Decode(asked, context):
                if as_text:
                    for sample, text in zip(response.stream_content.samples, texts):
                        sample.text = text.push(sample.token_ids)
                yield response
        except CancelledError:  # the client disconnected
            return
        rest = [text.end() for text in texts]
        if as_text and any(rest):
            sample = Response.StreamContent.Sample
            yield Response(
                stream_content=Response.StreamContent(samples=[sample(text=text) for text in rest])
            )


class Server(server_lib.JetStreamServer):
    """JetStream's server, which listens once it is created.

    It replaces JetStream's constructor, which binds every interface, shares the port with other
    listeners, and leaves its thread running if binding fails.

    Args:
      engine: engine to serve; the first requests compile it unless `warm_up` did.
      host, port: address to listen on; port 0 takes a free one. credentials: gRPC server
        credentials; None: insecure.

    Attributes:
      port: the port it listens on.

    Raises:
      OSError: the address is not available; no thread is left running.
    """

    def __init__(
        self, engine: PolicyEngine, host: str = "localhost", port: int = 0, credentials: Any = None
    ):
        self._executor = ThreadPoolExecutor(max(engine.max_concurrent_decodes, 64))
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._loop_thread = threading.Thread(
            target=self._loop.run_forever, name="grpc", daemon=True
        )
        self._loop_thread.start()
        self._driver = None
        try:
            self._grpc_server = self._run(self._make())
            self.port = self._grpc_server.add_secure_port(
                f"{host}:{port}", credentials or grpc.insecure_server_credentials()
            )
        except RuntimeError:
            self._close()
            raise OSError(
                f"cannot listen on {host}:{port}: the port is in use, or the address is not of "
                "this machine; choose another --host or --port"
            ) from None
        params = [engine.load_params()]
        self._driver = Driver(
            [engine], [engine], params, params, interleaved_mode=True, jax_padding=False
        )
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(
            Servicer(self._driver, engine), self._grpc_server
        )
        self.start()

    async def _make(self) -> grpc.aio.Server:
        return grpc.aio.server(self._executor, options=[("grpc.so_reuseport", 0)])

    def _run(self, task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    def stop(self, grace: float = 10.0) -> None:
        """Accept no more requests, end active ones after `grace` seconds, and release all
        resources.
        """
        # JetStream stops its threads first, and then clients wait for responses that never come.
        self._run(self._grpc_server.stop(grace))
        self._driver.stop()
        self._close()

    def _close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()
        self._executor.shutdown(wait=False)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
