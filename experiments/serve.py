"""Serve a policy with JetStream, over gRPC; and ask a server.

    pip install -e '.[jetstream]'                     the package google-jetstream 0.2.2, with
                                                      TensorFlow (2 GB)
    python experiments/serve.py                       the embedded policy, on localhost:9000
    python experiments/serve.py --ask='>3459....='    from another terminal: 459
    python experiments/serve.py --model=DIR --prompt=chat --slots=32 --temperature=0.7 --top_p=0.9

DIR is a Hugging Face directory, OWNER/NAME of the hub, or the workdir of a run: its exported
policy, or its newest checkpoint while it has none. Requests are those of JetStream's service
(`Decode`: text or token ids, and max_tokens; `HealthCheck`), answered as tokens are drawn. What
cannot be served is refused with INVALID_ARGUMENT and the reason. SIGINT or SIGTERM ends it: no new
requests, those under way end.
"""

import importlib
import signal
import socket
import threading

from absl import app, flags, logging

_MODEL = flags.DEFINE_string(
    "model", "embedded", "Hugging Face directory, workdir of a run, 'embedded' or 'scratchpad'."
)
_HOST = flags.DEFINE_string(
    "host", "localhost", "Address to listen on, or to ask; [::] listens on all interfaces."
)
_PORT = flags.DEFINE_integer(
    "port", 9000, "Port to listen on, or to ask.", lower_bound=1, upper_bound=65535
)
_ASK = flags.DEFINE_string(
    "ask", None, "Do not serve: ask the server at --host and --port to go on from this text."
)
_SLOTS = flags.DEFINE_integer("slots", 16, "Prompts that decode together.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Responses to each prompt.", lower_bound=1)
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
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the softmax; 0 is greedy.", lower_bound=0)
_TOP_K = flags.DEFINE_integer(
    "top_k", 0, "Keep the k likeliest tokens; 0 keeps all.", lower_bound=0
)
_TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "Keep the likeliest tokens of this mass together.", lower_bound=0, upper_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of all draws.")
_PROMPT = flags.DEFINE_string(
    "prompt",
    "plain",
    "How a text becomes a prompt: 'plain', 'chat' (the tokenizer's template, one user "
    "turn), another name of policy/prompt_formats.py or a format with {question}.",
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
    from rl_speed.serving import Refusal, ask

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


def build_engine():
    """The engine, compiled."""
    import jax

    from rl_speed.policy import encode_prompt, load_tokenizer
    from rl_speed.runtime.setup import setup_jax
    from rl_speed.sampling import SamplerConfig
    from rl_speed.serving import load_policy

    # What takes long comes after what may be wrong: the extra, the port, the model, the template.
    importlib.import_module("rl_speed.serving.client")
    host = _HOST.value.strip("[]")
    try:
        socket.create_server(
            (host, _PORT.value), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ).close()
    except OSError as error:
        raise OSError(f"cannot listen on {_HOST.value}:{_PORT.value}: {error.strerror}") from None
    setup_jax()
    policy = load_policy(_MODEL.value, _DTYPE.value, _END_TOKENS.value)
    encode_prompt(load_tokenizer(policy.directory), "0", _PROMPT.value)
    from rl_speed.serving import PolicyEngine

    half = min(1024, policy.model.max_position // 2)
    config = SamplerConfig(
        slots=_SLOTS.value * _SAMPLES.value,
        max_new=_NEW.value or half,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
    )
    engine = PolicyEngine(
        policy,
        config,
        _PREFILL.value or half,
        _SAMPLES.value,
        _PROMPT.value,
        jax.random.key(_SEED.value),
    )
    print(
        f"{policy.source}: compiling for {_SLOTS.value} slots, prompts up to "
        f"{engine.max_prefill_length} and responses up to {config.max_new} tokens",
        flush=True,
    )
    engine.warm_up()
    return engine


def serve():
    """Serve until a signal says to stop."""
    done = threading.Event()

    def stop(*_):
        done.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # the next one ends the process at once
            signal.signal(number, signal.SIG_DFL)

    engine = build_engine()
    from rl_speed.serving import Server

    server = Server(engine, _HOST.value, _PORT.value)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    where = "" if _HOST.value == "localhost" else f" --host={_HOST.value}"
    print(
        f"serving on {_HOST.value}:{server.port}; ask it with: python experiments/serve.py{where} "
        f"--port={server.port} --ask=TEXT --max_new={min(32, engine.config.max_new)}",
        flush=True,
    )
    done.wait()
    print("stopping", flush=True)
    server.stop(_GRACE.value)
    print("stopped", flush=True)


def main(_):
    from rl_speed.config.command import fail
    from rl_speed.runtime.checkpoint import CheckpointError

    logging.set_verbosity(logging.WARNING)
    try:
        serve() if _ASK.value is None else ask_server()
    except (ValueError, OSError, ImportError, CheckpointError) as error:
        fail(str(error))


if __name__ == "__main__":
    app.run(main)
