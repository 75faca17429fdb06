"""Client of a JetStream server; imports only the stubs of the package."""

from collections.abc import Iterator, Sequence

from rl_speed.serving.jetstream import importing

with importing():
    import grpc
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc


class Refusal(RuntimeError):
    """The server could not be reached, or refused the request; the message has the reason."""


def ask(
    address: str, prompt: str | Sequence[int], max_tokens: int, timeout: float | None = None
) -> Iterator[list]:
    """Stream a response.

    Args:
      address: "host:port". prompt: a text, or token ids. max_tokens: most tokens of the response,
        at least 1.
      timeout: seconds for the whole response; None: no limit.

    Yields:
      For each piece a list over samples: the added text, or the added ids if the prompt is token
        ids.

    Raises:
      Refusal: no connection, or the server refused the request.
    """
    request = jetstream_pb2.DecodeRequest
    text = isinstance(prompt, str)
    content = (
        {"text_content": request.TextContent(text=prompt)}
        if text
        else {"token_content": request.TokenContent(token_ids=prompt)}
    )
    with grpc.insecure_channel(address) as channel:
        try:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            for response in stub.Decode(request(max_tokens=max_tokens, **content), timeout=timeout):
                yield [
                    sample.text if text else list(sample.token_ids)
                    for sample in response.stream_content.samples
                ]
        except grpc.RpcError as error:
            raise Refusal(f"{address}: {error.code().name}: {error.details()}") from None
