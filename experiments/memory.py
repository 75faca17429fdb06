r"""Does screening with memory save what the simulation says?

Runs with and without it, and pass rates measured along one of them.

    python experiments/compare.py --config=configs/embedded.py --seeds=0,1,2 --pass_rate_samples=0 \
        --workdir=runs/memory \
        --methods=speed_rloo,speed_rloo@data.order=memory,speed_rloo@data.order=memory@data.rest=0.25
    for s in 20 40 60 80 100 120; do             (one run, resumed; its policy after every 20 steps)
        python experiments/train.py --config=configs/embedded.py --config.evaluation.every=0 \
            --config.training.steps=$s --workdir=runs/memory_curves/run \
            && cp -r runs/memory_curves/run/policy runs/memory_curves/policy$s; done
    for s in 0 20 40 60 80 100 120; do
        python experiments/pass_rates.py --config=configs/embedded.py --split=train --samples=32 \
            --out=runs/memory_curves/step$s --config.model.path=$([ $s = 0 ] && echo embedded \
                || echo runs/memory_curves/policy$s); done
    python experiments/memory.py --runs=runs/memory --curves=runs/memory_curves \
        --out=experiments/results/memory --methods=...
            (those of the first command, plain screening first)

The last takes seconds, the others 20 minutes on two cores. Writes table.md, table.json and
memory.png to --out.
"""

from pathlib import Path

from absl import flags

from rl_speed.runtime import entry

_RUNS = flags.DEFINE_string("runs", None, "Workdir of experiments/compare.py.", required=True)
_CURVES = flags.DEFINE_string(
    "curves", None, "Folder with stepN/pass_rates.json of the training prompts.", required=True
)
_METHODS = flags.DEFINE_list(
    "methods", ["speed_rloo", "speed_rloo@data.order=memory"], "Of the runs; the first is plain."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of the runs.")
_TARGETS = flags.DEFINE_list(
    "targets", ["0.48", "0.51", "0.53", "0.54", "0.55", "0.56", "0.564"], "Held-out accuracies."
)
_EVERY = flags.DEFINE_integer(
    "every", 20, "Steps between the rows of the second table.", lower_bound=1
)
# Not runs/memory: that is the comparison's workdir above, which has a table.md of its own.
_OUT = flags.DEFINE_string("out", "runs/memory_table", "Folder for the table and the picture.")


def main(_):
    from lab.comparison import memory

    print(
        *memory.compare(
            Path(_RUNS.value),
            Path(_CURVES.value),
            Path(_OUT.value),
            _METHODS.value,
            entry.numbers("seeds", _SEEDS.value),
            entry.numbers("targets", _TARGETS.value, float),
            _EVERY.value,
            entry.shown_command(),
        ),
        sep="\n",
    )


if __name__ == "__main__":
    entry.run(main)
