"""Draw what theory says: SNR, Phi, sampling cost, bias, allocations, objectives, effective weights, optimal KL (a few seconds).

    python experiments/theory.py [--out=experiments/results/theory]         a PNG each, and table.md, which names them
"""

import sys
from pathlib import Path

from absl import app, flags

_OUT = flags.DEFINE_string("out", "experiments/results/theory", "Folder for the pictures and table.md.")


def main(argv):
    from rl_speed.config import command

    if len(argv) != 1:
        command.fail("usage: python experiments/theory.py [--out=FOLDER]")
    from rl_speed.studies.comparison import theory_figures

    try:
        written = theory_figures.draw(Path(_OUT.value), " ".join(["python experiments/theory.py", *sys.argv[1:]]))
    except OSError as error:
        command.fail(f"{error}; --out=FOLDER draws elsewhere")
    print("written to", *written)


if __name__ == "__main__":
    app.run(main)
