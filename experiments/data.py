"""Look at data sets before training on them; clean one.

    python experiments/data.py train.jsonl eval.parquet owner/name@train
    python experiments/data.py train.jsonl.gz --tokenizer=DIRECTORY --prompt=chat --max_prompt_length=1024
    python experiments/data.py train.jsonl.gz --against=math500.jsonl,aime24.jsonl --check_gold --out=report
    python experiments/data.py train.jsonl.gz --keep=integer --decontaminate=math500.jsonl --write=clean.jsonl

Prints a table: rows, usable, bad, duplicates (of these with another answer), prompt lengths, whole-number answers. --against names
the rows whose question is in an evaluation file, --check_gold has math-verify judge every gold answer against itself in a box.
--out keeps it as report.md, report.json and, with a tokenizer, lengths.png. --write writes what would train.
Seconds; --check_gold judges a few hundred answers a second and worker.
"""

import datetime
import json
import os
import platform
import sys
from pathlib import Path

from absl import app, flags

_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Directory of a tokenizer: prompts are counted in its tokens.")
_PROMPT = flags.DEFINE_string("prompt", "plain", "As config.data.prompt: chat, plain, another preset, or a format.")
_SYSTEM = flags.DEFINE_string("system", "", "As config.data.system.")
_INSTRUCTION = flags.DEFINE_string("instruction", "", "As config.data.instruction: put after every question.")
_LIMIT = flags.DEFINE_integer("max_prompt_length", 1024, "Tokens; with --write, longer prompts are left out.", lower_bound=1)
_KEEP = flags.DEFINE_string("keep", "", "As config.data.keep: integer, no_proof, valid, no_choice, with commas between them.")
_QUESTION = flags.DEFINE_string("question_field", "", "As config.data.question_field ('': found).")
_EVAL_QUESTION = flags.DEFINE_string("eval_question_field", "", "As config.data.eval_question_field, also of --against.")
_ANSWER = flags.DEFINE_string("answer_field", "", "As config.data.answer_field.")
_SOLUTION = flags.DEFINE_string("solution_field", "", "As config.data.solution_field.")
_AGAINST = flags.DEFINE_list("against", [], "Evaluation files: which of their questions are in FILES?")
_CHECK = flags.DEFINE_bool("check_gold", False, "Have math-verify parse every gold answer, in worker processes.")
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count() or 1, "Processes for --check_gold.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Folder for report.md, report.json and lengths.png.")
_WRITE = flags.DEFINE_string("write", None, "JSON lines file for the rows that would train (of one FILE).")
_UNIQUE = flags.DEFINE_bool("unique", True, "With --write, as config.data.unique.")
_HOLD_OUT = flags.DEFINE_integer("hold_out", 0, "With --write, as config.data.hold_out: these are left out.", lower_bound=0)
_DECONTAMINATE = flags.DEFINE_list("decontaminate", [], "With --write: evaluation files whose questions are left out.")


def encoder():
    """Question -> token ids; None without a tokenizer."""
    if not _TOKENIZER.value:
        return None
    from rl_speed.policy.tokenizer import load_tokenizer, prompt_encoder

    encode = prompt_encoder(load_tokenizer(_TOKENIZER.value), _PROMPT.value, _SYSTEM.value)
    return lambda question: encode(question + _INSTRUCTION.value)


def check(surveys, rows_by_file):
    """Every gold answer of every file, in one pool of workers."""
    from rl_speed.data.survey import check_gold
    from rl_speed.rewards import MathVerifier
    from rl_speed.runtime.progress import progress_bar

    with MathVerifier(_WORKERS.value, timeout_s=10.0) as verifier:
        for s, rows in zip(surveys, rows_by_file):
            s.gold = []
            with progress_bar(len(rows), f"gold answers of {Path(s.source).name}") as bar:
                for found in check_gold(rows, verifier.score_detailed):
                    s.gold += found
                    bar.update(min(256, len(rows) - bar.n))


def save(out, surveys, text, command):
    from rl_speed.data.survey import draw_lengths

    out.mkdir(parents=True, exist_ok=True)
    where = f"on {datetime.date.today()}, {os.cpu_count()} CPU cores ({platform.machine()})"
    (out / "report.md").write_text(f"# Data\n\n`{command}`, {where}.\n\n{text}", encoding="utf-8")
    report = {"made_by": f"{command}, {where}", "files": [s.to_dict(_LIMIT.value) for s in surveys]}
    (out / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    if any(s.lengths.size for s in surveys):
        draw_lengths(surveys, _LIMIT.value, out / "lengths.png")


def write(target, source, fields, of_evaluation, encode):
    from rl_speed.data.loaders import load_training_rows
    from rl_speed.data.survey import write_rows

    rows, _, report = load_training_rows(source, "skip", fields, _KEEP.value, held_out=_HOLD_OUT.value,
                                         decontaminate=_DECONTAMINATE.value, unique=_UNIQUE.value,
                                         of_evaluation=of_evaluation)
    if encode:
        rows = [row for row in rows if len(encode(row.question)) <= _LIMIT.value]
    write_rows(target, rows)
    longer = report.kept - len(rows)
    too_long = f"; {longer} prompts longer than {_LIMIT.value} tokens" if longer else ""
    print(f"{target}: {len(rows)} rows; {report.text()}{too_long}")


def main(argv):
    from rl_speed.config import command
    from rl_speed.data.files import DataError
    from rl_speed.data.loaders import Fields, load_rows
    from rl_speed.data.survey import against_table, copies, details, survey, table

    files = argv[1:]
    if not files:
        command.fail("usage: python experiments/data.py FILE ... [--help for the flags]")
    if _WRITE.value and (len(files) > 1 or Path(_WRITE.value).resolve() == Path(files[0]).resolve()):
        command.fail("--write takes one FILE, and writes another")
    try:
        fields = Fields(_QUESTION.value, _ANSWER.value, _SOLUTION.value, flag="--question_field")
        of_evaluation = Fields(_EVAL_QUESTION.value or _QUESTION.value, _ANSWER.value, _SOLUTION.value, required=False,
                               flag="--eval_question_field")
        encode = encoder()
        evaluation = {name: load_rows(name, "skip", of_evaluation)[0] for name in _AGAINST.value}
        found = [survey(name, fields, _KEEP.value, encode) for name in files]
        surveys, rows = [s for s, _ in found], [r for _, r in found]
        for s, r in found:
            s.against = copies(r, evaluation)
        if _CHECK.value:
            check(surveys, rows)
        text = "\n".join(filter(None, (table(surveys, _LIMIT.value), against_table(surveys), details(surveys))))
        print(text)
        if _OUT.value:
            save(Path(_OUT.value), surveys, text, "python experiments/data.py " + " ".join(sys.argv[1:]))
        if _WRITE.value:
            write(Path(_WRITE.value), files[0], fields, of_evaluation, encode)
    except (DataError, ValueError, OSError) as error:
        command.fail(str(error))


if __name__ == "__main__":
    app.run(main)
