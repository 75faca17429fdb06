"""Configuration values given by name: fixed words, objects that a word names, and users' functions
as "module:function". Standard library only.
"""

import dataclasses
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_function(name: str) -> bool:
    """Returns whether the name has the form "module:function"."""
    return _NAME.fullmatch(name) is not None


def load_function(name: str) -> Callable[..., Any]:
    """Imports the function "module:function", after adding the working directory to sys.path.

    Raises:
      ValueError: the import fails, the module has no such attribute, or it is not callable.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # a module of the user's own may raise anything
        raise ValueError(
            f"the function {name!r} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if not callable(target):
        raise ValueError(
            f"the function {name!r} cannot be used: it is {target!r}, which is not callable"
        )
    return target


def named(name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns known[name], or imports the function "module:function" (see `load_function`)."""
    return load_function(name) if name not in known and is_function(name) else known[name]


def one_of(
    *options: str | Mapping[str, Any], default: str | None = None, function: bool = False
) -> Any:
    """Declares a dataclass field whose value is one of some words.

    Args:
      options: words, or tables with words as keys. Keys added to a table later also count.
      default: the default word; None: the first.
      function: whether a user's function, "module:function", is also allowed.
    """
    first = options[0] if isinstance(options[0], str) else next(iter(options[0]))
    return dataclasses.field(
        default=first if default is None else default,
        metadata={"options": options, "function": function},
    )


def options_of(declared: dataclasses.Field) -> list[str]:
    """Returns the words that a field allows; [] if it was not declared by `one_of`."""
    return [
        word
        for option in declared.metadata.get("options", ())
        for word in ([option] if isinstance(option, str) else option)
    ]


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a field gets an object, such as a rule, that the command line names by a word.

    Attributes:
      table: maps a word to a class or to a function that returns the object.
      make: (class or function, current object) -> new object.
      change: (object, **fields) -> a copy with these fields changed.
    """

    table: Mapping[str, Callable[..., Any]]
    make: Callable[[Any, Any], Any]
    change: Callable[..., Any] = dataclasses.replace

    def of_word(self, field: str, word: str, present: Any) -> Any:
        """Returns the object for a word of `table` or a user's "module:name"; `present` if the word
        already names it.

        Raises:
          ValueError: the word is unknown, or the object cannot be made. The message begins with the
            field.
        """
        if word not in self.table and not is_function(word):
            raise ValueError(
                f"{field} must be one of {', '.join(self.table)}, or one of yours, 'module:name'; "
                f"got {word!r}"
            )
        try:
            kind = named(word, self.table)
            if self.word_of(present) == word:
                return present
            return self.make(kind, present)
        except Exception as error:  # a function of the user's own may raise anything
            said = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{field}={word!r}: {said}") from error

    def word_of(self, value: Any) -> str:
        """Returns the word for an object: its key in `table`, else "module:name"."""
        kind = _kind_of(value)
        return next((word for word, known in self.table.items() if kind is known), word_of(value))


def word_of(value: Any) -> str:
    """Returns "module:name" of a class, of a function, or of an object's class."""
    kind = _kind_of(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def _kind_of(value: Any) -> Any:
    return value if callable(value) and hasattr(value, "__qualname__") else type(value)


def chosen(
    default: Any,
    table: Mapping[str, Callable[..., Any]],
    make: Callable[[Any, Any], Any],
    change: Callable[..., Any] = dataclasses.replace,
) -> Any:
    """Declares a dataclass field whose value is an object, set by `Choice(table, ...)`."""
    return dataclasses.field(
        default=default, metadata={"choice": Choice(table, make=make, change=change)}
    )
