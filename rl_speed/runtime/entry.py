"""What every entry point does around its own work: flags checked before anything is built,
JAX set up, errors told in one line.
"""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from rl_speed.config import command
from rl_speed.runtime.out_of_memory import is_out_of_memory
from rl_speed.runtime.setup import setup_jax
from rl_speed.runtime.signals import Stopped


def run(
    main: Callable[[list[str]], Any],
    *,
    takes: str = "",
    config: Any = None,
    renamed: Mapping[str, str] = {},
    default: str = "",
    explain: Callable[[Exception], str] | None = None,
) -> NoReturn:
    """Run `main(arguments that are no flags)`, and exit.

    What the user can mend is one line on stderr and status 2: bad flags and overrides, and any
    ValueError or OSError of `main`. An error with an `exit_status` of its own ends with that one, a
    run that a signal stopped with the shell's, and all others with their traceback. `--verbosity=1`
    shows every traceback.

    Args:
      takes: what stands for the arguments in a usage line, such as "WORKDIR ..."; "": there are
        none, and any is refused.
      config: the class of `--config`, whose overrides are checked; None: that of training.
      renamed, default: see `command.parse_flags`.
      explain: says of an out-of-memory error what was held and which settings to turn down.
    """

    def guarded(argv: Sequence[str]) -> None:
        if bool(argv[1:]) != bool(takes):
            command.fail(
                f"usage: python {argv[0]} {takes} [--flag=value ...]"
                if takes
                else f"unexpected argument {argv[1]!r}: every setting is a --flag"
            )
        setup_jax(mesh_size())
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells every detail of every save
        try:
            main(list(argv[1:]))
        except Stopped as stopped:
            print(stopped)
            sys.exit(stopped.exit_status)
        except KeyboardInterrupt:
            command.fail(
                "interrupted at once; what was saved is whole, and the same command goes "
                "on from there",
                130,
            )
        except Exception as error:
            logging.debug("%s", traceback.format_exc())
            if explain is not None and is_out_of_memory(error):
                command.fail(explain(error), status=1)
            status = getattr(
                error, "exit_status", 2 if isinstance(error, (ValueError, OSError)) else None
            )
            if status is None:
                raise
            command.fail(str(error), status)

    parse = lambda argv: command.parse_flags(argv, config or command.Config, renamed, default)
    app.run(guarded, flags_parser=parse)


def mesh_size() -> int:
    """Devices that the mesh of `--config` wants; 1 where this program has no such flag."""
    mesh = getattr(flags.FLAGS["config"].value, "mesh", None) if "config" in flags.FLAGS else None
    return 1 if mesh is None else mesh.data * mesh.fsdp * mesh.tensor


def numbers(flag: str, texts: Sequence[str], kind: type = int) -> list[Any]:
    """The values of a list flag as numbers. Raises ValueError naming the flag."""
    try:
        return [kind(text) for text in texts]
    except ValueError:
        what = {int: "whole numbers"}.get(kind, "numbers")
        raise ValueError(
            f"--{flag} must be {what} with commas between, got {','.join(texts)!r}"
        ) from None


def shown_command() -> str:
    """The command line of this process, as tables and reports repeat it."""
    return " ".join([f"python experiments/{Path(sys.argv[0]).name}", *sys.argv[1:]])
