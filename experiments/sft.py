"""Supervised fine-tuning: the cold start before RL.

The policy that ships with the package was made by (about three minutes on two cores):

    python experiments/sft.py --out=rl_speed/assets/embedded

which trains a new policy on demonstrations of the embedded task. On data of your own, starting from a Hugging Face directory:

    python experiments/sft.py --model=Qwen2.5-0.5B --data=gsm8k/train.jsonl --eval_data=gsm8k/test.jsonl --out=runs/sft
    python experiments/sft.py --model=Qwen2.5-3B --data=distilled.jsonl --preset=band --dtype=bfloat16 --remat --micro_rows=1
        --out=runs/cold_start     (Bae et al.: rate 5e-6, 5 epochs, 25 warm-up steps, batches of 21; the rest of it is ours)

Rows have "question" (or "problem") with "answer" and "solution", or a worked "answer" as in GSM8K. The loss is on the solution
and its end token. A batch is --batch examples, packed into few rows of --max_length tokens, each attending to itself alone: what
is learned is the same, up to rounding, with and without --pack, in any number of pieces, on any mesh.

OUT is at the end a directory that transformers opens. The run itself is in --workdir: metrics.jsonl, tensorboard/, config.json,
loss.png, checkpoints/. The same command again goes on where it stopped, with the same numbers; SIGTERM and Ctrl-C save first.

    what        --out --workdir --model --data --preset
    rows        --prompt --on_bad_row --question_field --max_length --pack
    held out    --eval_data (--eval_question_field) or --eval_share, --eval_every --eval_samples --eval_temperature
    training    --epochs or --steps, --batch --learning_rate --warmup_steps --schedule --weight_decay --max_grad_norm --seed
    machine     --dtype --remat --micro_rows --head_chunk --mesh_data --mesh_fsdp --mesh_tensor --checkpoint_every
                --tensorboard
"""

import dataclasses
import sys

from absl import app, flags, logging

_I, _F, _S, _B, _E = (flags.DEFINE_integer, flags.DEFINE_float, flags.DEFINE_string, flags.DEFINE_bool, flags.DEFINE_enum)

_S("out", None, "Hugging Face directory to write at the end; replaced where it exists.", required=True)
_S("workdir", "", "Folder of the run; by default OUT.run with --data, none without.")
_S("model", "", "Hugging Face directory to start from; empty makes a new embedded policy.")
_S("data", "", "JSON lines of questions and solutions; empty is the embedded task's demonstrations.")
_PRESET = _E("preset", None, ["band"], "A paper's settings, for flags that are not given.")

_S("prompt", None, "'chat', 'plain' or a format with {question}. Default: chat; {question}= without --data.")
_E("on_bad_row", "error", ["error", "skip"], "Whether a bad row, or one without a solution, ends the run or is counted.")
_S("question_field", "", "The question's field, taken alone, or several joined in this order, as body+question. Default: found.")
_S("eval_question_field", "", "Likewise, of --eval_data. Default: --question_field, where it has that.")
_I("max_length", 1024, "Tokens of a row; longer examples are dropped and counted (with --data).", lower_bound=2)
_B("pack", True, "Several examples in a row (with --data).")

_S("eval_data", "", "Held-out rows; empty holds out --eval_share.")
_F("eval_share", 0.05, "Share of the questions to hold out, by a hash of their text; 0 holds out none.")
_I("eval_every", 250, "Updates between evaluations; 0: before the first and after the last.", lower_bound=0)
_I("eval_samples", 0, "Answers to sample for each held-out question, judged by math-verify; 0: loss only.", lower_bound=0)
_F("eval_temperature", 0.0, "At which answers are sampled; 0 is greedy.", lower_bound=0.0)

_I("steps", None, "Updates. Default: 2600 for the embedded policy, else by epochs.", lower_bound=1)
_I("epochs", None, "Times that every example is shown, exactly. Default: 3.", lower_bound=1)
_I("batch", 128, "Examples per update.", lower_bound=1)
_F("learning_rate", None, "Peak learning rate. Default: 3e-3 for a new policy, 1e-5 for one that --model gives.", lower_bound=0.0)
_I("warmup_steps", None, "Updates of linear warm-up. Default: a tenth of all, at most 100.", lower_bound=0)
_E("schedule", "cosine", ["cosine", "linear", "constant"], "After warm-up; the first two fall to 0.")
_F("weight_decay", 0.01, "Of matrices.", lower_bound=0.0)
_F("max_grad_norm", 1.0, "Global norm that gradients are clipped to; 0 is off.", lower_bound=0.0)
_I("seed", 0, "Of initial weights and data order.")

_I("checkpoint_every", 200, "Updates between checkpoints; 0: at the end alone.", lower_bound=0)
_B("tensorboard", True, "Write the metrics for TensorBoard, too, in --workdir/tensorboard.")
_E("dtype", "float32", ["float32", "bfloat16"], "Of activations and matrix products; weights are float32.")
_B("remat", False, "Compute layers again in the backward pass instead of keeping activations.")
_I("micro_rows", 0, "Rows whose activations are held at a time; 0: all of a batch.", lower_bound=0)
_I("head_chunk", 0, "Tokens whose logits are held at a time; 0: about 2^27 logits.", lower_bound=0)
_I("mesh_data", 1, "Devices that hold copies of the weights.", lower_bound=1)
_I("mesh_fsdp", 1, "Devices that split rows and weights.", lower_bound=1)
_I("mesh_tensor", 1, "Devices that split layers.", lower_bound=1)


def fail_if_out_of_memory(settings, error, layout=None):
    """End with the numbers that matter then; other errors pass."""
    from rl_speed.config import command
    from rl_speed.runtime.out_of_memory import is_out_of_memory
    from rl_speed.sft.build import explain_out_of_memory

    if not is_out_of_memory(error):
        raise error
    command.fail(explain_out_of_memory(settings, error, layout), status=1)


def main(_):
    from jax.errors import JaxRuntimeError

    from rl_speed.config import command
    from rl_speed.runtime.checkpoint import CheckpointError
    from rl_speed.runtime.setup import setup_jax
    from rl_speed.sft.build import PRESETS, Settings, build
    from rl_speed.runtime.signals import Stopped

    setup_jax()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells every detail of every save
    given = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Settings)}
    chosen = PRESETS.get(_PRESET.value, {})
    given |= {name: value for name, value in chosen.items() if not flags.FLAGS[name].present}
    if flags.FLAGS["steps"].present and not flags.FLAGS["epochs"].present:
        given["epochs"] = None  # of a preset
    settings = None
    try:
        settings = Settings(**given)
        run = build(settings)
    except (ValueError, OSError, CheckpointError) as error:
        command.fail(str(error))
    except JaxRuntimeError as error:
        fail_if_out_of_memory(settings, error)
    try:
        run.trainer.run()
    except Stopped as stopped:
        print(stopped)
        sys.exit(stopped.exit_status)
    except FloatingPointError as error:
        command.fail(str(error), status=1)
    except JaxRuntimeError as error:
        fail_if_out_of_memory(settings, error, run.layout)
    finally:
        run.close()
    made = run.save("python experiments/sft.py " + " ".join(sys.argv[1:]))
    held = "" if made["eval_loss"] is None else f"held-out loss {made['eval_loss']:.4f} nats a token; "
    print(f"{made['parameters']:,} parameters, {held}saved to {run.settings.out}")


if __name__ == "__main__":
    app.run(main)
