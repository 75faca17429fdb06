"""Evaluate a policy: average@n, pass@k with intervals, by benchmark and by class; every response saved with its verdict.

    python experiments/evaluate.py                                         (the embedded policy on its test set; half a minute)
    python experiments/evaluate.py --model=HF_DIR --preset=speed --data=math500.jsonl,aime24.jsonl
    python experiments/evaluate.py --checkpoint=WORKDIR [--step=40] [--data=NAME=FILE --data=FILE ...]

--checkpoint is the workdir of a run, finished or under way (its newest whole checkpoint, asked as the run asks), a checkpoint in
it, or a policy that it exported. The same command again goes on where it was interrupted, with the very responses it would have
drawn. Writes responses.jsonl, evaluation.json, summary.json, table.md and plot.png to --out.
"""

import os
import sys
import time
from pathlib import Path

from absl import app, flags, logging

_MODEL = flags.DEFINE_string("model", "", "Hugging Face directory. Neither --model nor --checkpoint: the embedded policy.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "", "Workdir of a run, a checkpoint inside it, or an exported policy.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of the workdir. Default: the newest that is whole.", lower_bound=0)
_DATA = flags.DEFINE_multi_string("data", [], "FILE or NAME=FILE of questions and answers; several with commas between them, or "
                                  "the flag repeated. Default: the run's held-out questions, or the embedded task's.")
_PRESET = flags.DEFINE_string("preset", "", "A paper's settings: speed, band, ada or rpo (rl_speed/evaluation/settings.py). Flags "
                              "go before presets, presets before the run's own settings.")
_K = flags.DEFINE_list("k", None, "pass@k for these k. Default: 1,8,32, as far as --samples goes.")
_MESH = flags.DEFINE_string("mesh", None, "data=N,fsdp=N,tensor=N. Default: the run's, or one device.")
_OUT = flags.DEFINE_string("out", None, "Folder to write to. Default: WORKDIR/evaluation/PRESET_step_N, or "
                           "runs/evaluate/MODEL/PRESET.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Begin anew, whatever --out holds.")
_BAD_ROWS = flags.DEFINE_string("on_bad_row", "error", "Of a data file: 'error' ends here, 'skip' counts it.")
_QUESTION = flags.DEFINE_string("question_field", "", "Of data files that have it: the question's field, taken alone, or "
                                "several joined in this order, as body+question. Default: found.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a bar.")

# What settings.Settings takes; None: by preset, run or default.
_SETTINGS = [
    flags.DEFINE_integer("samples", None, "Responses to each question. Default 32."),
    flags.DEFINE_float("temperature", None, "Of sampling; 0 is greedy. Default 1."),
    flags.DEFINE_float("top_p", None, "Sample among the most probable tokens of this mass. Default 1: all."),
    flags.DEFINE_integer("top_k", None, "Sample among so many tokens. Default 0: all."),
    flags.DEFINE_integer("max_new", None, "Tokens of a response at most. Default 4096."),
    flags.DEFINE_integer("max_prompt_length", None, "Leave out questions whose prompts are longer, in tokens, and count them. "
                         "Default 0: none."),
    flags.DEFINE_string("prompt", None, "'chat', 'plain', a name of policy/prompt_formats.py, or a format with {question}. "
                        "Default: chat."),
    flags.DEFINE_string("instruction", None, "Put behind every question. Default: to reason and to box the answer."),
    flags.DEFINE_string("system", None, "System turn of prompts that go through the chat template. Default: the prompt's own."),
    flags.DEFINE_string("verifier", None, "math (Math-Verify), integer, exact (token by token), or a function of your "
                        "own, module:function. Default math."),
    flags.DEFINE_string("mode", None, "Where math and integer look for an answer: boxed, or free (anywhere). Default boxed."),
    flags.DEFINE_float("timeout_s", None, "Seconds of processor time that verifying a response may take. Default 5."),
    flags.DEFINE_float("stall_s", None, "Seconds of wall-clock time after which a verification that sleeps is given up. Default 0: "
                       "six times --timeout_s."),
    flags.DEFINE_integer("workers", None, "Processes that verify. Default: by processors."),
    flags.DEFINE_integer("slots", None, "Responses that are decoded at once, over all devices. Default 128."),
    flags.DEFINE_integer("questions_per_call", None, "Questions in a generation call. Default 0: eight responses a slot. A call is "
                         "what an interruption costs."),
    flags.DEFINE_integer("limit", None, "Only so many questions of each benchmark, the first ones. Default 0: all."),
    flags.DEFINE_integer("seed", None, "Of sampling. Default 0."),
    flags.DEFINE_string("compute_dtype", None, "float32 or bfloat16. Default: the run's, or float32."),
]


def settings_for(source, has_data):
    """(settings, tokenizer): what the flags, the preset and the policy come to."""
    from rl_speed.config import presets
    from rl_speed.config import EMBEDDED
    from rl_speed.evaluation import harness, settings
    from rl_speed.policy import load_tokenizer
    from rl_speed.training import build

    tokenizer = load_tokenizer(build.policy_directory(harness.make_config(settings.Settings(), source.directory)))
    given = {flag.name: flag.value for flag in _SETTINGS if flag.value is not None}
    given |= {} if _K.value is None else {"k": settings.parse_k(_K.value)}
    given |= {} if _MESH.value is None else settings.parse_mesh(_MESH.value)
    if source.config is not None:
        base = settings.of_config(source.config)
    elif source.directory == EMBEDDED or not has_data:
        base = settings.of_config(presets.embedded())
    else:
        base = {"workers": min(16, os.cpu_count() or 1)}
        if not (_PRESET.value or "prompt" in given):
            base["prompt"] = harness.default_prompt(tokenizer)
    return settings.resolve(base, _PRESET.value, given), tokenizer


def main(argv):
    if len(argv) > 1:
        raise ValueError(f"unexpected {' '.join(argv[1:])!r}: every argument is a --flag")

    # Imported here, so that --help is instant.
    import jax

    from rl_speed.evaluation import benchmarks, harness, report
    from rl_speed.evaluation.source import find_source, load_policy
    from rl_speed.evaluation.verdicts import Judge
    from rl_speed.training import build
    from rl_speed.runtime.setup import setup_jax
    from rl_speed.runtime.signals import stop_on_signals

    setup_jax()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells every detail of what it reads
    if _BAD_ROWS.value not in ("error", "skip"):
        raise ValueError(f"--on_bad_row must be error or skip; got {_BAD_ROWS.value!r}")
    source = find_source(_MODEL.value, _CHECKPOINT.value, _STEP.value)
    files = benchmarks.parse_specs(_DATA.value)
    settings, tokenizer = settings_for(source, bool(files))
    sets = harness.load_benchmarks(files, settings, tokenizer, source, _BAD_ROWS.value, _QUESTION.value)
    config = harness.make_config(settings, source.directory)
    mesh = build.build_mesh(config)
    policy, step = load_policy(source, config, mesh)
    of_step = f"_step_{step}" if step is not None else ""
    out = Path(_OUT.value) if _OUT.value else source.home / ((_PRESET.value or "default") + of_step)
    name = harness.describe_source(source, step)
    facts = {"command": "python experiments/evaluate.py " + " ".join(sys.argv[1:]), "date": time.strftime("%Y-%m-%d"),
             "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}", "processors": f"{os.cpu_count()} processors",
             "jax": f"JAX {jax.__version__}"}
    for b in sets:
        if b.fields:
            print(f"{b.name}: {b.fields}")
    print(f"{name}: {sum(len(b.prompts) for b in sets)} questions x {settings.samples} responses, into {out}", flush=True)
    with Judge(config, policy, [p for b in sets for p in b.prompts]) as judge, stop_on_signals() as stop:
        try:
            summary = harness.run(policy, sets, settings, mesh, judge, out, {**facts, "policy": name}, _OVERWRITE.value,
                                  lambda: bool(stop), _PROGRESS.value)
        except harness.Interrupted as error:
            # The run may have a newer checkpoint by then.
            again = f" (with --step={step})" if step is not None and _STEP.value is None else ""
            print(f"{error}{again}")
            sys.exit(128 + stop.received)
    told = {**facts, "how": f"{settings.samples} responses to a question, temperature {settings.temperature:g}, top-p "
            f"{settings.top_p:g}, at most {settings.max_new} tokens, verifier {settings.verifier} ({settings.mode}), seed "
            f"{settings.seed}, prompt {settings.prompt!r}" + f" and {settings.instruction!r}" * bool(settings.instruction)}
    files = report.write_results(summary, out, f"Evaluation of {name}", told)
    print("\n" + report.tables(summary) + "\nwritten to " + " ".join(map(str, [out / "responses.jsonl", *files])))


def guarded(argv):
    """`main`; what the user can mend is one line, exit 2."""
    from rl_speed.config import command

    try:
        main(argv)
    except KeyboardInterrupt:
        command.fail("interrupted at once; what was saved is whole, and the same command goes on from there", 130)
    except Exception as error:
        from rl_speed.runtime.checkpoint import CheckpointError
        from rl_speed.runtime.out_of_memory import explain, is_out_of_memory

        if is_out_of_memory(error):
            advice = ("turn down --slots or --max_new, or spread the weights with --mesh=fsdp=N; what was saved is whole, but these "
                      "belong to what an evaluation is: give another --out")
            command.fail(explain(error, [], advice), 1)
        if not isinstance(error, (ValueError, OSError, CheckpointError)):
            raise
        command.fail(str(error))


def parse(arguments):
    """As `app.run` does, but in one line, exit 2."""
    from rl_speed.config import command

    try:
        return flags.FLAGS(list(arguments))
    except flags.Error as error:
        command.fail(" ".join(str(error).split()))


if __name__ == "__main__":
    app.run(guarded, flags_parser=parse)
