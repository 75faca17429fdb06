"""Benchmarks: ratios against a named reference that is measured in the same run.

    python experiments/bench.py sampler [--out=experiments/results/bench_sampler] [--repeats=5]     (about three minutes)
    python experiments/bench.py verifiers [--out=experiments/results/bench_verifiers] [--repeats=9]   (half a minute)

`sampler` compares the sampler with a lockstep batch sampler of the same width, and with Hugging Face `generate` where torch is
installed. `verifiers` compares the in-loop sampler with a Python verifier and with math-verify to the same with a JAX verifier.
Writes bench.json and table.txt, `sampler` also plot.png.
"""

import json
import os
import platform
import sys
import time
from pathlib import Path

from absl import app, flags

_OUT = flags.DEFINE_string("out", "", "Folder for the results; experiments/results/bench_BENCHMARK by default.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of each; medians are reported.", lower_bound=1)
_SMALL = flags.DEFINE_bool("small", False, "A tiny policy, to see that the benchmark works.")
KNOWN = ("sampler", "verifiers")


def main(argv):
    if len(argv) != 2 or argv[1] not in KNOWN:
        if len(argv) > 1:
            print(f"unknown benchmark: {' '.join(argv[1:])}", file=sys.stderr)
        print(f"usage: python experiments/bench.py BENCHMARK [flags]; benchmarks: {', '.join(KNOWN)}", file=sys.stderr)
        sys.exit(2)
    import jax
    import jaxlib
    import numpy as np

    from rl_speed.benchmark import hugging_face, sampler, verifiers
    from rl_speed.training.setup import setup_jax

    setup_jax()
    load = os.getloadavg()[0]
    say = lambda text: print(text, file=sys.stderr)
    if argv[1] == "sampler":
        numbers = sampler.run(sampler.SMALL if _SMALL.value else sampler.STANDARD, _REPEATS.value, say, hugging_face.available())
        text, met = sampler.table(numbers), {"met": sampler.verdicts(numbers)}
    else:
        numbers = verifiers.run(_REPEATS.value, say)
        text, met = verifiers.table(numbers), {}
    out = Path(_OUT.value or f"experiments/results/bench_{argv[1]}")
    out.mkdir(parents=True, exist_ok=True)
    where = {"command": "python experiments/bench.py " + " ".join(sys.argv[1:]), "date": time.strftime("%Y-%m-%d"),
             "device": jax.devices()[0].device_kind, "processors": os.cpu_count(), "jax": jax.__version__,
             "jaxlib": jaxlib.__version__, "numpy": np.__version__, "python": platform.python_version(),
             "load_at_start": load, "repeats": _REPEATS.value}
    (out / "bench.json").write_text(json.dumps({**where, **met, **numbers}) + "\n")
    header = (f"{where['command']}\n{where['date']}, {where['device']}, {where['processors']} processors, JAX {where['jax']}, "
              f"load {load:.1f} before it began")
    (out / "table.txt").write_text(f"{header}\n\n{text}\n")
    if argv[1] == "sampler":
        sampler.plot(numbers, out / "plot.png")
    print(text)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    app.run(main)
