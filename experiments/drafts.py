"""Make the task "drafts" (lab/comparison/drafts.py): questions, and a policy trained on
demonstrations; five minutes on two cores.

    python experiments/drafts.py --out=runs/drafts

Writes OUT/wide and OUT/repairable (train.jsonl, eval.jsonl), OUT/demonstrations.jsonl,
OUT/untrained and OUT/policy, Hugging Face directories. The same command again continues.
"""

from pathlib import Path

from absl import flags

from rl_speed.runtime import entry

_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)
_UPDATES = flags.DEFINE_integer("updates", 2500, "Optimizer steps.", lower_bound=1)


def main(_):
    from lab.comparison import drafts
    from rl_speed.sft.build import build
    from rl_speed.sft.config import SFTConfig

    out = Path(_OUT.value)
    if not (out / "untrained" / "tokenizer.json").exists():
        drafts.write(out)
    config = SFTConfig()
    config.model.path = str(out / "untrained")
    config.data.train = str(out / "demonstrations.jsonl")
    config.data.prompt = "{question}="
    config.examples.eval_share = 0.01
    config.optimizer.learning_rate = 3e-3
    config.training.steps = _UPDATES.value
    config.training.micro_tokens = 1024
    run = build(config, str(out / "policy"), str(out / "policy.run"))
    run.run()
    made = run.export(entry.shown_command())
    print(f"{made['parameters']:,} parameters, held-out loss {made['eval_loss']:.4f}: {run.out}")


if __name__ == "__main__":
    entry.run(main)
