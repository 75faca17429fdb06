"""Supervised fine-tuning: the cold start before RL.

The policy that ships with the package was made by (about three minutes on two cores):

    python experiments/sft.py --out=rl_speed/assets/embedded

which trains a new policy on demonstrations of the embedded task. On data of your own, starting from a Hugging Face directory:

    python experiments/sft.py --model=HF_DIR --data=FILE.jsonl --prompt='{question}\n' --out=DIR
        (rows with "question" and "solution", or with "answer" as in GSM8K)
"""

import json
import sys
from pathlib import Path

from absl import app, flags, logging

_OUT = flags.DEFINE_string("out", None, "Hugging Face directory to write.", required=True)
_MODEL = flags.DEFINE_string("model", "", "Hugging Face directory to start from; empty makes a new embedded policy.")
_DATA = flags.DEFINE_string("data", "", "JSONL of questions and solutions; empty is the embedded task's demonstrations.")
_PROMPT = flags.DEFINE_string("prompt", "{question}=", "'chat', 'plain' or a format with {question}.")
_STEPS = flags.DEFINE_integer("steps", 2600, "Updates.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 128, "Examples per update.", lower_bound=1)
_MICRO = flags.DEFINE_integer("micro_batches", 1, "Pieces an update's gradient is added up from; must divide --batch.",
                              lower_bound=1)
_LENGTH = flags.DEFINE_integer("max_length", 1024, "Tokens; longer examples are dropped and counted (with --data).")
_RATE = flags.DEFINE_float("learning_rate", None, "Peak learning rate; decays to 0 on a cosine. Default: 3e-3 for a new "
                           "policy, 1e-5 for one that --model gives.")
_DECAY = flags.DEFINE_float("weight_decay", 0.01, "Of matrices.")
_SEED = flags.DEFINE_integer("seed", 0, "Of initial weights and data order.")
_EVERY = flags.DEFINE_integer("eval_every", 250, "Updates between evaluations.")


def embedded_parts(seed):
    """(params, model, tokenizer, batches, evaluation batches) of the embedded task."""
    import tempfile

    import jax

    from rl_speed.data import DEFAULT_SPEC, chain
    from rl_speed.data.embedded_tokenizer import END_ID, VOCABULARY, save_tokenizer
    from rl_speed.policy import ModelConfig, encode_prompt, init, load_tokenizer
    from rl_speed.training import sft

    model = ModelConfig(vocab_size=len(VOCABULARY), width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=192,
                        max_position=64)
    with tempfile.TemporaryDirectory() as directory:
        # Through the files, so that training encodes exactly as every later user of the directory does.
        save_tokenizer(directory)
        (Path(directory) / "config.json").write_text(json.dumps(model.to_hf()))
        tokenizer = load_tokenizer(directory)
    spec = DEFAULT_SPEC
    length = spec.max_prompt_tokens + spec.max_response_tokens

    def batch(split, first, count):
        shown = (chain.demonstration(spec, seed, i, split) for i in range(first, first + count))
        return sft.build_batch([sft.Example(encode_prompt(tokenizer, question, _PROMPT.value),
                                            tokenizer.encode(written) + [END_ID] * ends) for question, written, ends in shown],
                               length)

    def batches():
        first = 0
        while True:
            yield batch("demo", first, _BATCH.value)
            first += _BATCH.value

    return init(model, jax.random.key(seed)), model, tokenizer, batches(), [batch("demo_eval", 0, 512)]


def file_parts(path, directory, seed):
    """The same from a file and a model directory; one example in twenty (at most 200) is held out."""
    from rl_speed.data import load_rows
    from rl_speed.policy import encode_prompt, end_token_ids, load_hf, load_tokenizer
    from rl_speed.training import sft

    params, model = load_hf(directory)
    tokenizer = load_tokenizer(directory)
    # What the tokenizer calls its end; a generation config may list others, which only stop the sampler.
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end_token_ids(directory, tokenizer)[0]
    rows, _ = load_rows(path)
    examples = [sft.Example(encode_prompt(tokenizer, row.question, _PROMPT.value),
                            [*tokenizer.encode(row.solution or row.answer, add_special_tokens=False), end]) for row in rows]
    examples, dropped = sft.keep_short(examples, _LENGTH.value)
    if dropped:
        logging.warning("%d examples longer than %d tokens were dropped", dropped, _LENGTH.value)
    held = max(1, min(200, len(examples) // 20))
    length = max(map(len, examples))
    batches = (sft.build_batch(e, length) for e in sft.shuffled_epochs(examples[held:] or examples, _BATCH.value, seed))
    return params, model, tokenizer, batches, [sft.build_batch(examples[:held], length)]


def main(_):
    import jax

    from rl_speed.policy import num_params, save_hf
    from rl_speed.training import sft
    from rl_speed.training.optimizer import OptimizerConfig, make_optimizer
    from rl_speed.training.progress import progress_bar
    from rl_speed.training.setup import setup_jax

    setup_jax()
    if bool(_MODEL.value) != bool(_DATA.value):
        logging.error("give --model and --data together, or neither for the embedded policy")
        sys.exit(2)
    try:
        parts = file_parts(_DATA.value, _MODEL.value, _SEED.value) if _DATA.value else embedded_parts(_SEED.value)
    except (ValueError, FileNotFoundError) as error:
        logging.error("%s", error)
        sys.exit(2)
    params, model, tokenizer, batches, held_out = parts
    rate = _RATE.value if _RATE.value is not None else (1e-5 if _MODEL.value else 3e-3)
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=rate, warmup_steps=min(100, _STEPS.value // 10), schedule="cosine",
                        total_steps=_STEPS.value, weight_decay=_DECAY.value, b2=0.98), params)
    bar = progress_bar(_STEPS.value, "sft")
    last = {}

    def report(metrics):
        last.update(metrics)
        bar.update()
        bar.set_postfix_str("  ".join(f"{name} {last[name]:.3f}" for name in ("loss", "eval_loss") if name in last),
                            refresh=False)

    params = sft.train(params, model, optimizer, batches, held_out,
                       sft.SFTConfig(_STEPS.value, _MICRO.value, eval_every=_EVERY.value), report)
    bar.close()
    command = "python experiments/sft.py " + " ".join(sys.argv[1:])
    made = {"command": command, "parameters": num_params(model), "loss": last["loss"], "eval_loss": last["eval_loss"],
            "jax": jax.__version__}
    save_hf(_OUT.value, params, model, tokenizer, extra={"made_by.json": made})
    print(f"{num_params(model):,} parameters, held-out loss {last['eval_loss']:.4f} nats a token; saved to {_OUT.value}")


if __name__ == "__main__":
    app.run(main)
