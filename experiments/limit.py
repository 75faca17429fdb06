r"""What can be gained by choosing prompts: a comparison on an embedded task beside what a policy
that is a table predicts, and every method's share of what an oracle gains (minutes, CPU).

    python experiments/compare.py --config=configs/embedded.py:rloo,scratchpad \
        --methods=rloo,speed_rloo,forecast_rloo,oracle_rloo --seeds=0,1,2 --workdir=runs/scratchpad
    python experiments/limit.py --comparison=runs/scratchpad/table.json --out=runs/limit

Writes table.md, table.json and limit.png to --out.
"""

from pathlib import Path

from absl import flags

from rl_speed.runtime import entry

_COMPARISON = flags.DEFINE_string(
    "comparison",
    "experiments/results/scratchpad/all/table.json",
    "table.json of experiments/compare.py on an embedded task, with rloo among the methods.",
)
_TARGETS = flags.DEFINE_list(
    "targets", ["0.5", "0.6", "0.7", "0.8"], "Held-out accuracies to reach."
)
_OUT = flags.DEFINE_string("out", "runs/limit", "Folder for the table and the picture.")


def main(_):
    from lab import limit

    try:
        targets = [float(text) for text in _TARGETS.value]
    except ValueError:
        targets = []
    if not targets or not all(0 < target <= 1 for target in targets):
        raise ValueError(
            "targets must be accuracies above 0 and up to 1, with commas between, got "
            f"{','.join(_TARGETS.value)!r}"
        )
    print(
        *limit.compare(Path(_COMPARISON.value), targets, Path(_OUT.value), entry.shown_command()),
        sep="\n",
    )


if __name__ == "__main__":
    entry.run(main)
