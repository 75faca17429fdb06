"""Hold math-verify, as we ask it, against what the authors of graders expect of theirs.

    python experiments/verifier_cases.py --cases=DATA/verifier_cases/cases.jsonl

Prints agreement by source and by kind and every disagreement with its reason, and writes it to
OUT/README.md (half a minute). A case is a line with pred, gold, expected, kind, source and perhaps
config; rl_speed/studies/benchmark/verifier_cases.py says how each kind is asked.
"""

import importlib.metadata
import sys
import time
from pathlib import Path

from absl import flags

from rl_speed.runtime import entry

_CASES = flags.DEFINE_string("cases", None, "JSON lines of cases.", required=True)
_OUT = flags.DEFINE_string("out", "runs/verifier_cases", "Folder for README.md.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=1)
_TIMEOUT = flags.DEFINE_float(
    "timeout_s", 20.0, "Seconds of processor time for a case.", lower_bound=0.1
)


def main(_):
    from rl_speed.studies.benchmark import verifier_cases

    cases = verifier_cases.read_cases(_CASES.value)
    outcomes = verifier_cases.judge(cases, _WORKERS.value, _TIMEOUT.value)
    version, rule = importlib.metadata.version, verifier_cases.__doc__.partition("\n\n")[2].strip()
    text = "\n".join(
        [
            "# Our verifier beside other graders",
            "",
            (
                "Written by `python experiments/verifier_cases.py` on "
                f"{time.strftime('%Y-%m-%d')}: math-verify {version('math-verify')}, SymPy "
                f"{version('sympy')}, {len(cases)} cases that the authors of graders wrote down. "
                "What they expect is not always mathematical truth, and some contradict each "
                "other. Speed and planted faults: table.txt, by `bench.py scoring`."
            ),
            "",
            rule,
            "",
            verifier_cases.document(outcomes),
            "## What graders differ on, as we have it",
            "",
            (
                'Asked in mode "boxed". The library drops units and percent signs, so that 10% is '
                "taken for 10 and for 0.1: a verifier does not know what the question asked for."
            ),
            "",
            verifier_cases.probe_table(_WORKERS.value),
            "",
        ]
    )
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {out / 'README.md'}", file=sys.stderr)


if __name__ == "__main__":
    entry.run(main)
