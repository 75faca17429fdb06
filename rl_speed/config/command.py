"""The command line, checked before anything is built: a configuration file that is not there, and
overrides that cannot be, are named with the nearest that can; a flag that was renamed is named with
its new name.
"""

import copy
import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from rl_speed.config import Config, flatten, methods
from rl_speed.config.paths import check_paths

_PARSERS = {bool: flags.BooleanParser(), int: flags.IntegerParser(), float: flags.FloatParser()}


def field_types(config: Any = Config) -> dict[str, type]:
    """{"rule.n_init": int, ...}: every field of a configuration (a class or an instance) that
    holds a value.
    """
    config = config() if isinstance(config, type) else config
    return {name: type(value) for name, value in flatten(dataclasses.asdict(config)).items()}


def nearest(name: str, known: Sequence[str], count: int = 3) -> list[str]:
    """The known dotted names most like `name`: in a section of that name or like it,
    then with a last part like it.
    """
    section, _, leaf = name.rpartition(".")
    parts = lambda index: {k.rpartition(".")[index] for k in known}
    sections = difflib.get_close_matches(section, parts(0), 1, 0.7) if section else []
    leaves = difflib.get_close_matches(leaf, parts(2), count, 0.7)
    alike = [k for close in leaves for k in known if k.rpartition(".")[2] == close]
    here = [k for k in alike if k.rpartition(".")[0] in sections]
    if not alike:
        return [k for k in known if k.rpartition(".")[0] in sections]
    return (here or alike)[:count]


def written_flags(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(name, "=" or "", value) of each flag; without "=" the value would be the next argument."""
    for i, argument in enumerate(arguments):
        if argument == "--":
            return
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            yield name, equals, value if equals else "".join(arguments[i + 1 : i + 2])


def check_renamed(arguments: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """A message for each flag that has another name now; a switch may be written --noNAME.

    Args:
      renamed: {name of before: name of now}, neither with its dashes.
    """
    problems = []
    for name, _, _ in written_flags(arguments):
        no = "no" * (name not in renamed and name.startswith("no"))
        if new := renamed.get(name.removeprefix(no)):
            problems.append(f"--{name} is --{no}{new} now")
    return problems


def check_config_file(arguments: Sequence[str], flag: str = "config") -> list[str]:
    """What is wrong with the file of `--config=FILE[:VARIANT]` among the arguments: a message,
    or nothing where it is there.
    """
    for name, _, value in written_flags(arguments):
        if name != flag:
            continue
        path = Path(value.partition(":")[0])
        if path.is_file():
            continue
        problem, method = (
            f"--{flag}={value}: there is no file {path}",
            path.stem.removeprefix("embedded_"),
        )
        if path.stem.startswith("embedded_") and method in methods.METHODS:
            return [
                f"{problem}; methods are variants of one file now: "
                f"--{flag}={path.with_name('embedded.py')}:{method}"
            ]
        close = difflib.get_close_matches(
            path.name, sorted(file.name for file in path.parent.glob("*.py"))
        )
        return [
            problem
            + (
                f"; nearest: {', '.join(str(path.with_name(file)) for file in close)}"
                if close
                else ""
            )
        ]
    return []


def check_overrides(
    arguments: Sequence[str], config: Any = Config, flag: str = "config"
) -> list[str]:
    """What is wrong with the `--config.section.field=value` among the arguments:
    a message each, empty where all is well.
    """
    known = field_types(config)
    sections = {name.rsplit(".", 1)[0] for name in known if "." in name}
    problems = []
    for name, equals, value in written_flags(arguments):
        negated = name.startswith(f"no{flag}.")
        path = name.removeprefix("no" if negated else "").removeprefix(f"{flag}.")
        if not name.removeprefix("no" if negated else "").startswith(f"{flag}."):
            continue
        if path in sections:
            fields = ", ".join(
                sorted(k.rsplit(".", 1)[1] for k in known if k.startswith(path + "."))
            )
            problems.append(
                f"--{name}: {flag}.{path} is a section; set one of its fields: {fields}"
            )
            continue
        if path not in known:
            close = nearest(path, list(known))
            problems.append(
                f"--{name}: there is no {flag}.{path}"
                + (
                    f"; nearest: {', '.join(f'{flag}.{k}' for k in close)}"
                    if close
                    else f"; {_file(config)} lists every field"
                )
            )
            continue
        kind = known[path]
        if negated or (kind is bool and not equals):
            if negated and kind is not bool:
                problems.append(
                    f"--{name}: {flag}.{path} is not a switch but {_article(kind)}; write "
                    f"--{flag}.{path}=VALUE"
                )
            continue
        if kind in _PARSERS:
            try:
                _PARSERS[kind].parse(value)
            except (ValueError, TypeError):
                problems.append(f"--{name}: {flag}.{path} must be {_article(kind)}, got {value!r}")
    return problems


def of_method(flag: str = "config", values: flags.FlagValues = flags.FLAGS) -> methods.OfMethod:
    """The settings of each method by `--config=FILE[:VARIANT]` and what overrides it.

    Where the file's `VARIANTS` have methods, they are those of the variant for the method, or for
    the nearest (`methods.nearest`) with the method's fields set: a preset may give a baseline
    another driver than the method that chooses prompts, or replay to one of two. Elsewhere they are
    those of `--config` with the method's fields set. What makes the method is not overridden, and
    with groups of a size of its own it has as many as make a batch of that size.

    Raises, when called, ValueError: the method or the variant cannot be.
    """
    given = values[flag]
    path, _, variant = given.config_filename.partition(":")
    module = load_config_file(path)
    groups = [list(group) for group in getattr(module, "VARIANTS", ())]
    here = next((g for g in groups if any(word in methods.METHODS for word in g)), [])
    known = [word for word in here if word in methods.METHODS]
    kept = [word for word in variant.split(",") if word and word not in here]

    def of(name: str) -> Config:
        like = methods.nearest(name, known) if name in methods.METHODS else None
        if like is None:
            return methods.apply(copy.deepcopy(given.value), name)
        config = module.get_config(",".join([like, *kept]))
        if like != name:
            methods.apply(config, name)
        overrides, own = given.override_values, methods.METHODS[name]
        for field in overrides.keys() - own.keys():
            config.set(field, overrides[field])
        if "rule.n" in own and overrides.keys() & {"rule.n", "driver.groups"}:
            methods.keep_batch(config, given.value.driver.groups * given.value.rule.n)
        return config

    return of


def load_config_file(path: str | Path) -> Any:
    """The module of a configuration file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file(config: Any) -> str:
    """Where a configuration (a class or an instance) is declared."""
    kind = config if isinstance(config, type) else type(config)
    return f"{kind.__module__.replace('.', '/')}.py"


def _article(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number"}.get(
        kind, f"a {kind.__name__}"
    )


def parse_flags(
    arguments: Sequence[str],
    config: Any = Config,
    renamed: Mapping[str, str] = {},
    default: str = "",
) -> list[str]:
    """The arguments that are no flags. Exits with status 2 and what is wrong, a line each.

    Args:
      config: the class of `--config`. renamed: see `check_renamed`.
      default: the file of `--config` where none is given.
    """
    given = arguments[1:]
    named = [(f"--{name}", v) for name, _, v in written_flags(given) if not v.startswith("-")]
    if problems := list(check_paths(named)):
        fail("\n".join(problems))
    unnamed = default and all(name != "config" for name, _, _ in written_flags(given))
    file = check_config_file([f"--config={default}"] if unnamed else given)
    if problems := check_renamed(given, renamed) + file + check_overrides(given, config):
        fail("\n".join(problems))
    try:
        if unnamed:
            flags.FLAGS.set_default("config", default)
        left = flags.FLAGS(list(arguments))
    except flags.Error as error:
        told, _, trace = str(error).partition("Error whilst parsing config file:")
        # What a configuration file raised comes with its traceback, whose last line says it.
        fail(" ".join((told + trace.strip().rpartition("\n")[2]).split()))
    if problems := list(check_paths([("argument", word) for word in left[1:]])):
        fail("\n".join(problems))
    made = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
    if made is not None and not isinstance(made, config):
        fail(
            "--config: these are settings of another command: fields of "
            f"{_file(made)}, not of {_file(config)}"
        )
    return left


def fail(message: str, status: int = 2) -> NoReturn:
    """Say what is wrong and exit. Status 2: nothing was started; 1: a run ended."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)
