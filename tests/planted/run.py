"""Plants the faults of faults.py, one at a time, and asks whether the tests of the room where each
stands notice.

    python tests/planted/run.py --check               # whether every fault can be planted; a second
    python tests/planted/run.py [--room=memory] [--only=NAME,...] [--jobs=2]
        [--table=experiments/results/planted_faults/table.md]

A fault is planted in a private copy of the checkout, never in the checkout itself. Its tests run
there in one pytest that stops at the first failure, without those marked slow (`--marker` says
otherwise). Before, each test file is run without any fault: where one fails, its faults are left
out, since nothing can be told from it, and the command ends with status 2. A run that hangs counts
as caught, by "timeout": it is past several times the processor time that its files take without a
fault, or got none for ten minutes. A fault that keeps the tests from being collected is no silent
one, and ends with status 2 as well.

Results are written as they come to --results, JSON lines keyed by the fault, the file it is planted
in and its tests; what is there is not run again. Ends with status 1 where a fault was not caught.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a test, too, can import this

from planted.faults import EQUIVALENT, FAULTS, Fault  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.2  # between looks at the processor time of a run
STILL_S = 600.0  # a run that gets none for so long waits for something that never comes


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one pytest.

    Attributes:
      ended: "passed", "failed", "timeout", "crash" (it died), "broken" (tests could not be
        collected) or "empty" (no test was run).
      test: the first that failed. said: what it said. passed: tests that passed.
      cpu_s: processor time of pytest and the children that it waited for.
    """

    ended: str
    test: str
    said: str
    passed: int
    cpu_s: float


def problems(faults: Sequence[Fault], root: Path) -> list[str]:
    """Why faults cannot be planted in the tree at `root`, a line each; empty where all can."""
    found, names = [], [fault.name for fault in faults]
    for fault in faults:
        say = lambda text: found.append(f"{fault.name}: {text}")
        if names.count(fault.name) > 1:
            say("another fault has this name")
        if not (path := root / "rl_speed" / fault.file).is_file():
            say(f"there is no rl_speed/{fault.file}")
            continue
        text = path.read_text(encoding="utf-8")
        if (count := text.count(fault.old)) != 1:
            say(
                f"its old text stands {count} times in rl_speed/{fault.file}, "
                f"not once: {fault.old!r}"
            )
            continue
        if fault.old.split() == fault.new.split():
            say("old and new are the same text")
        try:
            ast.parse(text.replace(fault.old, fault.new))
        except SyntaxError as error:
            say(f"its new text is no Python: {error}")
        if not fault.harm.strip() or not fault.tests.split():
            say("it needs tests, and a sentence on its harm")
        for test in fault.tests.split():
            if not (root / "tests" / test).is_file():
                say(f"there is no tests/{test}")
    return found


@contextlib.contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """Within, the copy has the fault."""
    path = copy / "rl_speed" / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def copy_tree(root: Path, to: Path) -> None:
    """What git would commit of the checkout, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


class Stopped(Exception):
    """The command was interrupted."""


def run_tests(
    copy: Path,
    tests: Sequence[str],
    marker: str,
    limit_s: float,
    cache: Path,
    stop: threading.Event,
) -> Outcome:
    """One pytest over these files of the copy's tests,
    which may use `limit_s` seconds of processor time.

    Raises Stopped once `stop` is set; nothing is left running then.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.json", Path(folder) / "output.txt"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(copy), str(Path(__file__).parent)]),
            "PLANTED_REPORT": str(report),
            # Bytecode is matched by time and size: a fault of the same length, planted within the
            # second, would not be seen.
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "RL_SPEED_DATA": os.environ.get("RL_SPEED_DATA", str(ROOT.parent / "shared" / "data")),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "planted_reporter",
            "-m",
            marker,
            *(f"tests/{test}" for test in tests),
        ]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=copy,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                used, ended = wait(process, limit_s, stop)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if stop.is_set():
            raise Stopped
        if not ended:
            return Outcome("timeout", "", f"stopped after {used:.0f} s of processor time", 0, used)
        if not report.exists():
            last = output.read_text(errors="replace").strip().splitlines()[-1:]
            return Outcome("crash", "", f"exit code {process.returncode}: {''.join(last)}", 0, used)
        found = json.loads(report.read_text())
        states = {0: "passed", 1: "failed", 5: "empty"}
        state = "broken" if found["broken"] else states.get(process.returncode, "crash")
        return Outcome(
            state,
            (found["failed"] or "").removeprefix("tests/"),
            found["said"],
            found["passed"],
            found["cpu_s"],
        )


def wait(process: subprocess.Popen, limit_s: float, stop: threading.Event) -> tuple[float, bool]:
    """(seconds of processor time, whether it ended by itself before `limit_s` of them, `stop`,
    and a standstill).
    """
    used, still_s = 0.0, 0.0
    while process.poll() is None and not stop.is_set():
        now = processor_seconds(process.pid)
        # Looks are counted, not a clock read: this process may be suspended together with that one.
        used, still_s = (now, 0.0) if now > used + 0.5 else (used, still_s + LOOK_S)
        if used > limit_s or still_s > STILL_S:
            return used, False
        time.sleep(LOOK_S)
    return used, True


def processor_seconds(pid: int) -> float:
    """Of a process and the children that it has waited for; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def digest(*parts: str | Path) -> str:
    """Of texts, and of what files hold."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        whole.update(b"\0")
    return whole.hexdigest()[:16]


def helpers(root: Path) -> list[Path]:
    """What tests import beside the package."""
    return sorted(
        path
        for path in (root / "tests").rglob("*.py")
        if not path.name.startswith("test_") and path.parent.name != "planted"
    )


def key_of(fault: Fault, root: Path, marker: str) -> str:
    """Changes with the fault, the file where it is planted, its tests and their helpers."""
    tests = [root / "tests" / test for test in fault.tests.split()]
    return digest(
        marker, fault.old, fault.new, root / "rl_speed" / fault.file, *tests, *helpers(root)
    )


def key_of_control(test: str, root: Path, marker: str) -> str:
    """Changes with the package, a test file and its helpers."""
    return digest(
        marker, *sorted((root / "rl_speed").rglob("*.py")), root / "tests" / test, *helpers(root)
    )


class Results:
    """Records by (kind, name, key), appended to a file of JSON lines as they come;
    the last one holds.
    """

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        # One may have been cut short.
        records = [json.loads(line) for line in lines if line.endswith("}")]
        self._known = {(r["kind"], r["name"], r["key"]): r for r in records}

    def get(self, kind: str, name: str, key: str) -> Outcome | None:
        record = self._known.get((kind, name, key))
        return record and Outcome(**{f.name: record[f.name] for f in dataclasses.fields(Outcome)})

    def add(self, kind: str, name: str, key: str, outcome: Outcome) -> None:
        record = {
            "kind": kind,
            "name": name,
            "key": key,
            **dataclasses.asdict(outcome),
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._known[kind, name, key] = record
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


CAUGHT = ("failed", "timeout", "crash")


def table(faults: Sequence[Fault], outcomes: dict[str, Outcome], command: str) -> str:
    """Markdown: what was found, by room."""
    run = [f for f in faults if f.name in outcomes]
    caught = [f for f in run if outcomes[f.name].ended in CAUGHT]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "pytest"))
    minutes = sum(outcomes[f.name].cpu_s for f in run) / 60
    missing = f"; {len(faults) - len(run)} not run" if len(run) < len(faults) else ""
    lines = [
        "# Planted faults",
        "",
        f"`{command}`",
        "",
        (
            f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores ({platform.machine()}), "
            f"Python {platform.python_version()}, {versions}. Each fault alone, against the tests "
            "of its room, until the first failure."
        ),
        "",
        (
            f"**{len(caught)} of {len(run)} caught ({len(caught) / max(len(run), 1):.1%})**, in "
            f"{minutes:.0f} minutes of processor time{missing}."
        ),
        "",
        "| room | planted | caught |",
        "|---|---|---|",
    ]
    rooms = list(dict.fromkeys(f.room for f in run))
    lines += [
        f"| {room} | {sum(f.room == room for f in run)} | {sum(f.room == room for f in caught)} |"
        for room in rooms
    ]
    for room in rooms:
        lines += [
            "",
            f"## {room}",
            "",
            "| fault | in | what a user would get | caught by | s |",
            "|---|---|---|---|---|",
        ]
        for f in (f for f in run if f.room == room):
            o = outcomes[f.name]
            by = o.test.rpartition("/")[2].replace("|", "\\|") if o.ended == "failed" else o.ended
            by = "**not caught**" if f not in caught else f"`{by}`" if o.ended == "failed" else by
            lines.append(f"| {f.name} | {f.file} | {f.harm} | {by} | {o.cpu_s:.0f} |")
    lines += [
        "",
        "## Tried, and no fault",
        "",
        *(f"- {what}: {why}" for what, why in EQUIVALENT.items()),
        "",
    ]
    return "\n".join(lines)


def main(
    arguments: Sequence[str] | None = None, faults: Sequence[Fault] = FAULTS, root: Path = ROOT
) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="only see whether every fault can be planted"
    )
    parser.add_argument("--room", help="only faults of this room")
    parser.add_argument("--only", help="only these faults, by name, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="faults under way at once")
    parser.add_argument("--marker", default="not slow", help="which tests count, as pytest's -m")
    parser.add_argument(
        "--results",
        type=Path,
        default=root / ".cache" / "planted_faults.jsonl",
        help="finished runs",
    )
    parser.add_argument("--table", type=Path, help="write a table of all that was found there")
    parser.add_argument("--again", action="store_true", help="run what is in --results once more")
    options = parser.parse_args(arguments)
    wanted = set(options.only.split(",")) if options.only else {f.name for f in faults}
    if unknown := wanted - {f.name for f in faults}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    if options.room and options.room not in (rooms := {f.room for f in faults}):
        parser.error(f"the rooms are {', '.join(sorted(rooms))}")
    if options.check:
        found = problems(faults, root)
        print(*(found or [f"{len(faults)} faults can be planted"]), sep="\n")
        return 2 if found else 0
    results = Results(options.results)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies = [Path(folder, str(job)) for job in range(options.jobs)]
        copy_tree(root, copies[0])  # the checkout may change while this runs
        if found := problems(faults, copies[0]):
            print(*found, sep="\n")
            return 2
        for copy in copies[1:]:
            shutil.copytree(copies[0], copy)
        runner = Runner(options, faults, results, copies)
        ended = runner.run(
            [f for f in faults if f.name in wanted and options.room in (None, f.room)]
        )
        outcomes = {f.name: o for f in faults if (o := runner.known(f))}
    if options.table:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join(
            ["python", "tests/planted/run.py", *(sys.argv[1:] if arguments is None else arguments)]
        )
        options.table.write_text(table(faults, outcomes, command), encoding="utf-8")
    return ended


class Runner:
    """Runs controls, then faults, a copy of the tree for each job."""

    def __init__(
        self, options: Any, faults: Sequence[Fault], results: Results, copies: Sequence[Path]
    ):
        self._options, self._results, self._copies = options, results, queue.SimpleQueue()
        for copy in copies:
            self._copies.put(copy)
        self._keys = {f.name: key_of(f, copies[0], options.marker) for f in faults}
        files = {test for f in faults for test in f.tests.split()}
        self._control_keys = {
            test: key_of_control(test, copies[0], options.marker) for test in files
        }
        cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", ROOT / ".cache" / "jax-tests"))
        self._stop = threading.Event()
        self._test = lambda copy, tests, limit: run_tests(
            copy, tests, options.marker, limit, cache, self._stop
        )

    def known(self, fault: Fault) -> Outcome | None:
        """What was found of it before, in a tree like this."""
        return self._results.get("fault", fault.name, self._keys[fault.name])

    def run(self, faults: Sequence[Fault]) -> int:
        """Exit status: 0 all were caught, 1 some were not, 2 nothing can be told."""
        todo = [f for f in faults if self._options.again or not self.known(f)]
        files = list(dict.fromkeys(test for f in todo for test in f.tests.split()))
        controls = self._each(files, self._control)
        self._seconds = {name: o.cpu_s for name, o in controls.items()}
        failed = {name: o for name, o in controls.items() if o.ended not in ("passed", "empty")}
        outcomes = self._each(
            [f for f in todo if not failed.keys() & set(f.tests.split())], self._fault
        )
        outcomes |= {f.name: self.known(f) for f in faults if f not in todo}
        missed = [f for f in faults if f.name in outcomes and outcomes[f.name].ended not in CAUGHT]
        print(f"{len(outcomes) - len(missed)} of {len(outcomes)} caught")
        for f in missed:
            print(
                f"  not caught: {f.name} ({outcomes[f.name].ended} "
                f"{outcomes[f.name].said}): {f.harm}"
            )
        if failed:
            print(
                f"{len(faults) - len(outcomes)} faults were not planted, since "
                "without any these fail:",
                *(f"  {name}: {o.ended} {o.test} {o.said}" for name, o in failed.items()),
                sep="\n",
            )
        return (
            2
            if failed or any(outcomes[f.name].ended in ("broken", "empty") for f in missed)
            else bool(missed)
        )

    def _each(self, items: Sequence[Any], one: Any) -> dict[str, Outcome]:
        found = {}
        with ThreadPoolExecutor(self._options.jobs) as threads:
            under_way = [threads.submit(one, item) for item in items]
            try:
                for done in as_completed(under_way):
                    name, outcome = done.result()
                    found[name] = outcome
                    print(
                        f"[{len(found)}/{len(items)}] {name}: {outcome.ended} {outcome.test} "
                        f"({outcome.cpu_s:.0f} s) {outcome.said[:120]}",
                        flush=True,
                    )
            except BaseException:  # a signal too
                self._stop.set()
                threads.shutdown(cancel_futures=True)
                raise
        return found

    def _control(self, test: str) -> tuple[str, Outcome]:
        key = self._control_keys[test]
        if not (outcome := self._results.get("control", test, key)):
            with self._copy() as copy:
                outcome = self._test(copy, [test], 3600.0)
            self._results.add("control", test, key, outcome)
        return test, outcome

    def _fault(self, fault: Fault) -> tuple[str, Outcome]:
        tests = fault.tests.split()
        # A fault compiles anew what the control found in the cache.
        limit = 300.0 + 5 * sum(self._seconds[test] for test in tests)
        with self._copy() as copy, planted(fault, copy):
            outcome = self._test(copy, tests, limit)
        self._results.add("fault", fault.name, self._keys[fault.name], outcome)
        return fault.name, outcome

    @contextlib.contextmanager
    def _copy(self) -> Iterator[Path]:
        copy = self._copies.get()
        try:
            yield copy
        finally:
            self._copies.put(copy)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
