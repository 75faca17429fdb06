"""Benchmarks: ratios against a named reference that is measured in the same run.

    python experiments/bench.py sampler [--out=experiments/results/bench_sampler] [--repeats=5]     (about three minutes)

`sampler` compares the sampler with a lockstep batch sampler of the same width, and with Hugging Face `generate` where torch is
installed. Writes bench.json, table.txt, plot.png.
"""

import json
import os
import platform
import sys
import time
from pathlib import Path

from absl import app, flags

_OUT = flags.DEFINE_string("out", "experiments/results/bench_sampler", "Folder for the results.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of each; medians are reported.", lower_bound=1)
_SMALL = flags.DEFINE_bool("small", False, "A tiny policy, to see that the benchmark works.")
KNOWN = ("sampler",)


def main(argv):
    if len(argv) != 2 or argv[1] not in KNOWN:
        if len(argv) > 1:
            print(f"unknown benchmark: {' '.join(argv[1:])}", file=sys.stderr)
        print(f"usage: python experiments/bench.py BENCHMARK [flags]; benchmarks: {', '.join(KNOWN)}", file=sys.stderr)
        sys.exit(2)
    import jax
    import jaxlib
    import numpy as np

    from rl_speed.benchmark import hugging_face, sampler
    from rl_speed.training.setup import setup_jax

    setup_jax()
    load = os.getloadavg()[0]
    numbers = sampler.run(sampler.SMALL if _SMALL.value else sampler.STANDARD, _REPEATS.value,
                          lambda text: print(text, file=sys.stderr), hugging_face.available())
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    where = {"command": "python experiments/bench.py " + " ".join(sys.argv[1:]), "date": time.strftime("%Y-%m-%d"),
             "device": jax.devices()[0].device_kind, "processors": os.cpu_count(), "jax": jax.__version__,
             "jaxlib": jaxlib.__version__, "numpy": np.__version__, "python": platform.python_version(),
             "load_at_start": load, "repeats": _REPEATS.value}
    text = sampler.table(numbers)
    (out / "bench.json").write_text(json.dumps({**where, "met": sampler.verdicts(numbers), **numbers}) + "\n")
    header = (f"{where['command']}\n{where['date']}, {where['device']}, {where['processors']} processors, JAX {where['jax']}, "
              f"load {load:.1f} before it began")
    (out / "table.txt").write_text(f"{header}\n\n{text}\n")
    sampler.plot(numbers, out / "plot.png")
    print(text)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    app.run(main)
