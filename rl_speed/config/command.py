"""Checks the command line before anything is built. Errors about missing configuration files and
unknown fields name the nearest known ones.
"""

import copy
import dataclasses
import difflib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from rl_speed.config import Config, describe, flatten, methods
from rl_speed.config.paths import check_paths
from rl_speed.shipped import COMMANDS, folder

_PARSERS = {bool: flags.BooleanParser(), int: flags.IntegerParser(), float: flags.FloatParser()}


def field_types(config: Any = Config) -> dict[str, type]:
    """Every field of a configuration (a class or an instance) that holds a value: {"rule.n_init":
    int, ...}.
    """
    config = config() if isinstance(config, type) else config
    return {name: type(value) for name, value in flatten(dataclasses.asdict(config)).items()}


def nearest(name: str, known: Sequence[str], count: int = 3) -> list[str]:
    """Known dotted names most like `name`: first in the same or a similar section, then with a
    similar last part.
    """
    section, _, leaf = name.rpartition(".")

    def parts(index):
        return {k.rpartition(".")[index] for k in known}

    sections = difflib.get_close_matches(section, parts(0), 1, 0.7) if section else []
    leaves = difflib.get_close_matches(leaf, parts(2), count, 0.7)
    alike = [k for close in leaves for k in known if k.rpartition(".")[2] == close]
    here = [k for k in alike if k.rpartition(".")[0] in sections]
    if not alike:
        return [k for k in known if k.rpartition(".")[0] in sections]
    return (here or alike)[:count]


def written_flags(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(name, "=" or "", value) of each flag; without "=", value is the next argument."""
    for i, argument in enumerate(arguments):
        if argument == "--":
            return
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            yield name, equals, value if equals else "".join(arguments[i + 1 : i + 2])


def with_config_path(arguments: Sequence[str], flag: str = "config") -> list[str]:
    """The arguments with the bare name in `--config=NAME[:VARIANT]` replaced by its file."""
    found = list(arguments)
    for i, argument in enumerate(found):
        if argument == "--":
            break
        name, equals, value = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            if equals:
                found[i] = f"{name}={find_config(value)}"
            elif i + 1 < len(found):
                found[i + 1] = find_config(found[i + 1])
    return found


def find_config(value: str) -> str:
    """FILE[:VARIANT] of NAME[:VARIANT]: a local file NAME or NAME.py, or else the shipped
    configuration of that name. Returns `value` unchanged if there is none.
    """
    name, colon, variant = value.partition(":")
    places = [Path(name), Path(f"{name}.py")]
    if is_bare(name):
        places.append(folder("configs") / f"{name.removesuffix('.py')}.py")
    return next((f"{path}{colon}{variant}" for path in places if path.is_file()), value)


def is_bare(name: str) -> bool:
    """Whether a configuration is given by its name alone, without a folder."""
    return Path(name).name == name


def check_config_file(arguments: Sequence[str], flag: str = "config") -> list[str]:
    """Error messages about the file of `--config=FILE[:VARIANT]` in the arguments; empty if it
    exists.
    """
    for name, _, value in written_flags(arguments):
        if name != flag:
            continue
        file, colon, variant = value.partition(":")
        path = Path(file)
        if path.is_file():
            continue
        problem = f"--{flag}={value}: there is no file {path}"
        shipped = sorted(f.stem for f in folder("configs").glob("*.py"))
        if is_bare(file):
            close = difflib.get_close_matches(path.stem, shipped)
            return [
                f"{problem}, and no configuration of that name ships with the package; "
                + (f"nearest: {', '.join(close)}" if close else f"there are {', '.join(shipped)}")
            ]
        files = sorted(f.name for f in path.parent.glob("*.py"))
        if close := difflib.get_close_matches(path.name, files):
            return [f"{problem}; nearest: {', '.join(str(path.with_name(f)) for f in close)}"]
        if path.stem in shipped:
            return [f"{problem}; one ships with the package: --{flag}={path.stem}{colon}{variant}"]
        return [problem]
    return []


def check_overrides(
    arguments: Sequence[str], config: Any = Config, flag: str = "config"
) -> list[str]:
    """Error messages about each `--config.section.field=value` in the arguments; empty if all are
    valid.
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
    """The settings of each method, from `--config=FILE[:VARIANT]` and its overrides.

    If the file's `VARIANTS` contain methods, the settings are those of the method's variant, or of
    the nearest method's (`methods.nearest`) with the method's fields set: a preset may give a
    baseline another driver, or replay to some methods only. Otherwise they are those of `--config`
    with the method's fields set. Overrides do not change the method's own fields. A method with its
    own group size gets as many groups as make a batch of equal size.

    Raises ValueError, when called: the method or the variant is unknown.
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
        overrides = given.override_values
        own = methods.METHODS[name]
        for field in overrides.keys() - own.keys():
            config.set(field, overrides[field])
        if "rule.n" in own and overrides.keys() & {"rule.n", "driver.groups"}:
            methods.keep_batch(config, given.value.driver.groups * given.value.rule.n)
        return config

    return of


def load_config_file(path: str | Path) -> Any:
    """Loads a configuration file as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file(config: Any) -> str:
    """File that declares a configuration (a class or an instance)."""
    kind = config if isinstance(config, type) else type(config)
    return f"{kind.__module__.replace('.', '/')}.py"


def _article(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number"}.get(
        kind, f"a {kind.__name__}"
    )


def parse_flags(
    arguments: Sequence[str], config: Any = Config, fields: Collection[str] = (), default: str = ""
) -> list[str]:
    """Returns the arguments that are not flags. Prints errors, one a line, and exits with status 2;
    exits with status 0 after --help.

    Args:
      config: the class of `--config`. fields: its fields that the command reads; empty: all.
      default: value of `--config` if none is given, a name or a file.
    """
    try:
        given = with_config_path(flags.FLAGS.read_flags_from_files(list(arguments[1:]), False))
    except flags.Error as error:
        fail(str(error))
    named = [(f"--{name}", v) for name, _, v in written_flags(given) if not v.startswith("-")]
    if problems := list(check_paths(named)):
        fail("\n".join(problems))
    names = {name for name, _, _ in written_flags(given)}
    default = find_config(default) if default and "config" not in names else ""
    asked_help = bool(names & {"help", "h", "helpshort"})
    if asked_help:
        given = [word for word in given if word.lstrip("-") not in ("help", "h", "helpshort")]
    file = check_config_file([f"--config={default}"] if default else given)
    if problems := file + check_overrides(given, config):
        fail("\n".join(problems))
    if asked_help or "print_config" in names:
        for name in flags.FLAGS:  # nothing runs, so required flags such as --workdir may be missing
            if asked_help or name != "config":
                flags.FLAGS[name].validators.clear()
    try:
        if default:
            flags.FLAGS.set_default("config", default)
        left = flags.FLAGS([arguments[0], *given])
    except flags.Error as error:
        message, _, trace = str(error).partition("Error whilst parsing config file:")
        # An error in a configuration file comes with its traceback; the last line has the message.
        fail(" ".join((message + trace.strip().rpartition("\n")[2]).split()))
    if problems := list(check_paths([("argument", word) for word in left[1:]])):
        fail("\n".join(problems))
    made = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
    if made is not None and not isinstance(made, config):
        fail(
            "--config: these are settings of another command: fields of "
            f"{_file(made)}, not of {_file(config)}"
        )
    if asked_help:
        print(in_words_of_program(help_text(made or config(), fields)))
        sys.exit(0)
    return left


def help_text(config: Any, fields: Collection[str] = ()) -> str:
    """The main module's docstring, its flags, and the fields of `--config`, if it has that flag."""
    own = (sys.argv[0], "rl_speed.runtime.entry")
    by_module = flags.FLAGS.flags_by_module_dict()
    found = [flag for module in own for flag in by_module.get(module, ())]
    # Names of configurations work everywhere, their files only in a checkout.
    text = re.sub(
        r"--config=configs/(\w+)\.py\b", r"--config=\1", sys.modules["__main__"].__doc__ or ""
    )
    blocks = [text.strip(), "", "Flags:"]
    for flag in found:
        shown = "" if flag.name == "config" else flag.default
        shown = ",".join(map(str, shown)) if isinstance(shown, list) else shown
        shown = "" if shown is None else shown
        blocks.append(describe.entry_text(flag.name, shown, flag.flag_type(), flag.help))
    blocks.append("  --helpfull\n      The flags of libraries, too.")
    if "config" in flags.FLAGS:
        shipped = sorted(file.stem for file in folder("configs").glob("*.py"))
        blocks += [
            "",
            f"Configurations that ship, --config=NAME[:VARIANT], in {folder('configs')}:",
            textwrap.fill(", ".join(shipped), 96, initial_indent="  ", subsequent_indent="  "),
            "",
            f"Fields of --config, from {_file(config)}, with their values:",
            describe.fields_text(config, fields),
        ]
    return "\n".join(blocks)


def program() -> str:
    """The command that this process runs: "rl-speed train", or "python experiments/train.py"."""
    written = sys.argv[0]
    by_name = written.startswith("rl-speed ")
    return written if by_name else f"python experiments/{Path(written).name}"


def in_words_of_program(text: str) -> str:
    """Rewrites commands in the text for users of `rl-speed`: "python experiments/train.py" becomes
    "rl-speed train". Programs that are not in the wheel are marked "(in the repository)".
    """
    if not sys.argv[0].startswith("rl-speed "):
        return text
    commands = "|".join(COMMANDS)
    text = re.sub(rf"(?<![\w/])(?:python )?experiments/({commands})\.py\b", r"rl-speed \1", text)
    return re.sub(r"(?<![\w/])(experiments/\w+\.py)\b", r"\1 (in the repository)", text)


def fail(message: str, status: int = 2) -> NoReturn:
    """Prints an error and exits. Status 2: nothing was started; 1: a run ended."""
    print(f"error: {in_words_of_program(message)}", file=sys.stderr)
    sys.exit(status)
