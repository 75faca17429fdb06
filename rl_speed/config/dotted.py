"""Fields of a configuration by dotted name, "section.field": reading, changing, writing as JSON.

Works for any tree of dataclasses. A field declared with `named.chosen` holds an object, such as a
rule: its own name sets the object by its word ("rule" = "band"), and names below it set the
object's numbers ("rule.low" = 0.3).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from rl_speed.named import Choice, word_of

# Below a chosen object: its word, in files ("rule.name").
WORD = "name"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"rule.n_init": 4, ...} of a nested mapping."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return flat


def get(config: Any, path: str) -> Any:
    """The value of "section.field". Raises AttributeError: there is no such field."""
    return functools.reduce(getattr, path.split("."), config)


def choices(config: Any, prefix: str = "") -> dict[str, Choice]:
    """{"rule": its `Choice`, ...}: the fields that hold objects."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if choice := field.metadata.get("choice"):
            found[prefix + field.name] = choice
        elif dataclasses.is_dataclass(value):
            found |= choices(value, f"{prefix}{field.name}.")
    return found


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("section.field", value) of every field that holds a value; of an object's its numbers."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        elif "choice" not in field.metadata:
            yield prefix + field.name, value


def changeable(chosen: Any) -> bool:
    """Whether a chosen object's numbers can be set by name."""
    return dataclasses.is_dataclass(chosen) or hasattr(chosen, "changed")


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as JSON has it; an object is {"name": its word, number: value, ...}."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        choice = field.metadata.get("choice")
        inner = to_dict(value) if dataclasses.is_dataclass(value) else None
        if choice:
            found[field.name] = {WORD: choice.word_of(value), **(inner or {})}
        else:
            found[field.name] = plain(value) if inner is None else inner
    return found


def plain(value: Any) -> Any:
    """A value as JSON returns it: tuples as lists, NumPy's numbers as Python's, others as text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return word_of(value) if callable(value) else str(value)


def _like(present: Any, value: Any) -> Any:
    """A value that `plain` returned, as the type of the present one: a list as a tuple."""
    if isinstance(present, tuple) and isinstance(value, list):
        return tuple(_like((), inner) for inner in value)
    return value


def from_dict(config: Any, values: Mapping[str, Any]) -> Any:
    """Sets the fields of `config` from what `to_dict` returned, and returns it. Unknown fields are
    left out; missing ones keep their values.
    """
    flat = flatten(values)
    words = {path: flat[f"{path}.{WORD}"] for path in choices(config) if f"{path}.{WORD}" in flat}
    update(config, words)
    known = dict(leaves(config))
    update(config, {p: _like(known[p], value) for p, value in flat.items() if p in known})
    return config


def update(config: Any, values: Mapping[str, Any]) -> None:
    """Sets fields by dotted name. Objects are set first, by a word or as they are; then numbers,
    all numbers of one object together.

    Raises:
      AttributeError: there is no such field. ValueError: an object refuses its numbers, or there
      is none of that word; names the field.
    """
    known = choices(config)
    values = {
        path.removesuffix(f".{WORD}") if path.removesuffix(f".{WORD}") in known else path: value
        for path, value in values.items()
    }
    groups: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, leaf = path.rpartition(".")
        if path not in known:
            groups.setdefault(section, {})[leaf] = value
            continue
        holder = get(config, section) if section else config
        if isinstance(value, str):
            value = known[path].of_word(f"config.{path}", value, getattr(holder, leaf))
        setattr(holder, leaf, value)
    for section, fields in groups.items():
        holder = get(config, section) if section else config
        if section not in known:
            for leaf, value in fields.items():
                if not hasattr(holder, leaf):
                    raise AttributeError(f"there is no config.{section}.{leaf}")
                setattr(holder, leaf, value)
            continue
        if not changeable(holder):
            raise ValueError(
                f"config.{section}={known[section].word_of(holder)!r} is no dataclass: its numbers "
                "cannot be set by name; assign a new object"
            )
        try:
            made = known[section].change(holder, **fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"config.{section}: {error}") from None
        outer, _, leaf = section.rpartition(".")
        setattr(get(config, outer) if outer else config, leaf, made)
