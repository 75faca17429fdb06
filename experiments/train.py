"""Train a policy with RL.

    python experiments/train.py --config=configs/embedded_speed_rloo.py --workdir=runs/speed_rloo
        [--config.section.field=value ...]

Running the same command again resumes from the newest checkpoint. The workdir then holds config.json, metrics.jsonl,
rollouts.jsonl, checkpoints/, plots/*.png, summary.json and policy/ (a Hugging Face directory).
"""

import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment: a file in configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is written, and resumed from.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_):
    # Imported here, so that --help is instant.
    from rl_speed.training.loop import Trainer
    from rl_speed.training.plots import plot_run
    from rl_speed.training.report import closing_summary
    from rl_speed.training.setup import setup_jax

    setup_jax()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells every detail of every save
    try:
        trainer = Trainer(_CONFIG.value, _WORKDIR.value)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        logging.error("%s", error)
        sys.exit(2)
    summary = trainer.run()
    plots = plot_run(Path(_WORKDIR.value))
    print(closing_summary(summary, Path(_WORKDIR.value), plots))


if __name__ == "__main__":
    app.run(main)
