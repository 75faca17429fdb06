"""Serve a policy over HTTP, as OpenAI's API.

    pip install 'rl_speed[serve]'                     starlette, uvicorn, pydantic
    python experiments/serve.py                       the embedded policy, on localhost:8000
    curl localhost:8000/v1/completions -d \\
        '{"model": "embedded", "prompt": ">3459....=", "temperature": 0}'
    python experiments/serve.py --model=DIR --prompt=chat --slots=32 --max_prefill_length=2048

DIR is a Hugging Face directory, OWNER/NAME of the hub, or the workdir of a run: its exported
policy, or its newest checkpoint while it has none. The server answers /v1/chat/completions,
/v1/completions (both stream), /v1/models and /health; rl_speed/serving/README.md lists what a
request may have. What cannot be served gets a status 4xx and the reason. SIGINT or SIGTERM ends it:
no new requests, those under way end.

    python experiments/serve.py --protocol=jetstream --temperature=0
    python experiments/serve.py --protocol=jetstream --ask='>3459....='     elsewhere: 459

serves with JetStream over gRPC instead (pip install 'rl_speed[jetstream]', the package
google-jetstream 0.2.2, with TensorFlow, 2 GB). JetStream was archived by its authors.
"""

import importlib
import signal
import socket
import sys
import threading

from absl import app, flags, logging

_PROTOCOL = flags.DEFINE_enum(
    "protocol", "openai", ["openai", "jetstream"], "OpenAI's API over HTTP, or JetStream's gRPC."
)
_MODEL = flags.DEFINE_string(
    "model", "embedded", "Hugging Face directory, workdir of a run, 'embedded' or 'scratchpad'."
)
_NAME = flags.DEFINE_string(
    "name", None, "openai: what requests call the model. Default: --model, as it is given."
)
_HOST = flags.DEFINE_string(
    "host", "localhost", "Address to listen on, or to ask; [::] listens on all interfaces."
)
_PORT = flags.DEFINE_integer(
    "port", 8000, "Port to listen on, or to ask.", lower_bound=1, upper_bound=65535
)
_ASK = flags.DEFINE_string(
    "ask",
    None,
    "jetstream: do not serve; ask the server at --host and --port to go on from this text.",
)
_SLOTS = flags.DEFINE_integer("slots", 16, "Responses that decode together.", lower_bound=1)
_QUEUE = flags.DEFINE_integer(
    "queue", 256, "openai: responses that may wait for a slot; beyond, status 429.", lower_bound=1
)
_SAMPLES = flags.DEFINE_integer(
    "samples", 1, "jetstream: responses to each prompt, of --slots prompts.", lower_bound=1
)
_PREFILL = flags.DEFINE_integer(
    "max_prefill_length",
    None,
    "Tokens of the longest prompt. Default: half of the policy's positions, at most 1024.",
    lower_bound=1,
)
_NEW = flags.DEFINE_integer(
    "max_new",
    None,
    "Tokens of the longest response; with --ask, to ask for (32). Default: as for "
    "--max_prefill_length.",
    lower_bound=1,
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    1.0,
    "Temperature of the softmax, 0 is greedy; openai: of requests that name none.",
    lower_bound=0,
)
_TOP_K = flags.DEFINE_integer(
    "top_k", 0, "Keep the k likeliest tokens; 0 keeps all.", lower_bound=0
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    1.0,
    "Keep the likeliest tokens of this mass together; openai: of requests that name none.",
    lower_bound=0,
    upper_bound=1,
)
_SEED = flags.DEFINE_integer("seed", 0, "jetstream: seed of all draws.")
_PROMPT = flags.DEFINE_string(
    "prompt",
    None,
    "How a chat, or with jetstream a text, becomes a prompt: 'chat' (the tokenizer's template), "
    "'plain', another name of policy/prompt_formats.py or a format with {question}. Default: "
    "'chat' where the tokenizer has a template, else 'plain'.",
)
_END_TOKENS = flags.DEFINE_string(
    "end_tokens",
    "",
    "Tokens that end a response beside those that the model's files name, with commas between "
    "them: <|im_end|>.",
)
_DTYPE = flags.DEFINE_enum(
    "compute_dtype", "float32", ["float32", "bfloat16"], "Of activations and the KV cache."
)
_GRACE = flags.DEFINE_float(
    "grace", 10.0, "Seconds that requests under way are given when the server ends.", lower_bound=0
)


def ask_server():
    """Print a response as it comes; several samples once they are whole."""
    from rl_speed.config.command import fail
    from rl_speed.serving.jetstream.client import Refusal, ask

    whole = []
    try:
        for pieces in ask(f"{_HOST.value}:{_PORT.value}", _ASK.value, _NEW.value or 32):
            whole = [a + b for a, b in zip(whole or [""] * len(pieces), pieces)]
            if len(pieces) == 1:
                print(pieces[0], end="", flush=True)
    except Refusal as refusal:
        fail(str(refusal))
    print() if len(whole) == 1 else print(
        "\n".join(f"[{i}] {text}" for i, text in enumerate(whole))
    )


def load():
    """The policy, how it is sampled, and its prompt format.

    What takes long comes after what may be wrong: the extra, the port, the model, the template.
    """
    from rl_speed.policy import encode_prompt, load_tokenizer
    from rl_speed.runtime.setup import setup_jax
    from rl_speed.sampling import SamplerConfig
    from rl_speed.serving import load_policy

    home = {"openai": "http", "jetstream": "jetstream.client"}[_PROTOCOL.value]
    importlib.import_module(f"rl_speed.serving.{home}")
    host = _HOST.value.strip("[]")
    try:
        socket.create_server(
            (host, _PORT.value), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ).close()
    except OSError as error:
        raise OSError(f"cannot listen on {_HOST.value}:{_PORT.value}: {error.strerror}") from None
    setup_jax()
    policy = load_policy(_MODEL.value, _DTYPE.value, _END_TOKENS.value)
    tokenizer = load_tokenizer(policy.directory)
    prompt = _PROMPT.value or ("chat" if tokenizer.chat_template else "plain")
    encode_prompt(tokenizer, "0", prompt)
    half = min(1024, policy.model.max_position // 2)
    samples = _SAMPLES.value if _PROTOCOL.value == "jetstream" else 1
    config = SamplerConfig(
        slots=_SLOTS.value * samples,
        max_new=_NEW.value or half,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
    )
    longest = _PREFILL.value or half
    print(
        f"{policy.source}: compiling for {_SLOTS.value} slots, prompts up to {longest} and "
        f"responses up to {config.max_new} tokens, prompts written as {prompt!r}",
        flush=True,
    )
    return policy, config, longest, prompt


def openai_server(on_crash):
    """The HTTP server, and what to print of it."""
    from rl_speed.serving import Engine
    from rl_speed.serving.http import App, Server

    policy, config, longest, prompt = load()
    engine = Engine(policy, config, longest)
    engine.warm_up()
    name = _NAME.value or _MODEL.value
    served = App(
        engine,
        policy.directory,
        name,
        prompt=prompt,
        temperature=config.temperature,
        top_p=config.top_p,
        queue=_QUEUE.value,
        on_crash=on_crash,
    )
    server = Server(served, _HOST.value, _PORT.value)
    return server, f"serving {name!r} on http://{_HOST.value}:{server.port}/v1"


def jetstream_server():
    """JetStream's server, and what to print of it."""
    import jax

    policy, config, longest, prompt = load()
    from rl_speed.serving.jetstream.engine import PolicyEngine
    from rl_speed.serving.jetstream.server import Server

    engine = PolicyEngine(
        policy,
        config,
        longest,
        samples_per_slot=_SAMPLES.value,
        prompt=prompt,
        key=jax.random.key(_SEED.value),
    )
    engine.warm_up()
    server = Server(engine, _HOST.value, _PORT.value)
    where = "" if _HOST.value == "localhost" else f" --host={_HOST.value}"
    return server, (
        f"serving on {_HOST.value}:{server.port}; ask it with: python experiments/serve.py "
        f"--protocol=jetstream{where} --port={server.port} --ask=TEXT "
        f"--max_new={min(32, config.max_new)}"
    )


def serve():
    """Serve until a signal says to stop; exit status 1 where decoding failed."""
    done, crashed = threading.Event(), threading.Event()

    def stop(*_):
        done.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # the next one ends the process at once
            signal.signal(number, signal.SIG_DFL)

    def crash():
        crashed.set()
        done.set()

    openai = _PROTOCOL.value == "openai"
    server, said = openai_server(crash) if openai else jetstream_server()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(said, flush=True)
    done.wait()
    print("stopping", flush=True)
    server.stop(_GRACE.value)
    print("stopped", flush=True)
    if crashed.is_set():
        sys.exit(1)


def main(_):
    from rl_speed.config.command import fail
    from rl_speed.runtime.checkpoint import CheckpointError

    logging.set_verbosity(logging.WARNING)
    try:
        if _ASK.value is not None and _PROTOCOL.value != "jetstream":
            fail("--ask needs --protocol=jetstream; an OpenAI server is asked with curl")
        serve() if _ASK.value is None else ask_server()
    except (ValueError, OSError, ImportError, CheckpointError) as error:
        fail(str(error))


if __name__ == "__main__":
    app.run(main)
