"""Pass rates of prompts: measured ones from files, or a synthetic mixture."""

import contextlib
import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.data.files import format_of
from rl_speed.data.loaders import DataError, row_id
from rl_speed.data.sources import Place, distinct_ids, read_items

# Scale of a number -> its conversion to a pass rate, and its maximum.
SCALES = {
    "rate": (lambda x: x, 1.0),
    "percent": (lambda x: x / 100, 100.0),
    "failure": (lambda x: 1 - x, 1.0),
    "difficulty": (lambda x: 1 - x / 100, 100.0),
}
# Fields found automatically (also with a suffix, as in fail_pct_MODEL), and their scale.
KNOWN_FIELDS = {
    "pass_rate": "rate",
    "solve_rate": "rate",
    "accuracy": "rate",
    "fail_rate": "failure",
    "pass_pct": "percent",
    "fail_pct": "difficulty",
    "difficulty": "difficulty",
}
# Shares and Beta(a, b) of the mixture used without a file.
MIXTURE = ((0.35, 0.3, 12.0), (0.45, 1.0, 1.0), (0.20, 12.0, 0.5))


@dataclasses.dataclass(frozen=True)
class PassRates:
    """Pass rates f64[P] in [0, 1], their source (a text for people), and the number of rows without
    one (null).

    `ids` are the prompts', as the loaders of `rl_speed.data` would name the rows; those of rows
    without a pass rate come last. Empty if the file names no prompts.
    """

    rates: np.ndarray
    source: str
    missing: int = 0
    ids: tuple[str, ...] = ()


def mixture(prompts: int = 20_000, seed: int = 0) -> PassRates:
    """A mixture of unsolvable, medium and easy prompts, shaped like rates measured on mathematics;
    used without a file.
    """
    rng = np.random.default_rng(seed)
    shares, a, b = np.array(MIXTURE).T
    kind = rng.choice(len(MIXTURE), size=prompts, p=shares)
    text = " + ".join(f"{s:g} Beta({x:g}, {y:g})" for s, x, y in MIXTURE)
    return PassRates(
        rng.beta(a[kind], b[kind]), f"a synthetic mixture, {text}, {prompts:,} prompts"
    )


def load_pass_rates(
    path: str | Path, field: str | None = None, scale: str | None = None
) -> PassRates:
    """Pass rates of a file's rows.

    Args:
      path: a source of `sources.read_items`; or a .json file with an object with "rates" and
        optional "ids" (from experiments/pass_rates.py), or an object {id: pass rate}.
      field: the field of a row's number; None: the one of `KNOWN_FIELDS` that the first row has.
        Rows with null there have no measured pass rate: they are left out and counted.
      scale: "rate" p, "percent" 100 p, "failure" 1 - p, "difficulty" 100 (1 - p); None: the scale
        of the field's name.

    Raises:
      DataError: no such file, a row that is no object or lacks the field, a number that is invalid
        or out of range (the message names file, line and field), a field that cannot be found or
        whose scale is unknown, or no pass rate at all.
    """
    path = Path(path)
    if scale is not None and scale not in SCALES:
        raise DataError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    whole = path.name.endswith(".json") and path.is_file()
    rows = _rates_object(path, field) if whole else None
    if rows is not None:
        field = "rates"
        scale = scale or "rate"
        named = all(name is not None for name, _ in rows)
        rows = [
            (Place(str(path), path.name, i), {"id": name, "rates": value})
            for i, (name, value) in enumerate(rows, start=1)
        ]
    else:
        named = True
    values = []
    measured = []
    missing = []
    for place, item in read_items(path) if rows is None else rows:
        where = str(place)
        if isinstance(item, DataError):
            raise DataError(f"{where}: {item}")
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected an object, got {type(item).__name__}")
        if field is None:
            field = _find_field(item, where)
        if field not in item:
            raise DataError(
                f"{where}: no field {field!r}; it has {', '.join(sorted(item)) or 'none'}"
            )
        row = place, row_id(item, place.where)
        if item[field] is None:
            missing.append(row)
            continue
        number = item[field]
        if format_of(place.file) in (".csv", ".tsv"):  # cells are text
            with contextlib.suppress(ValueError):
                number = float(number)
        values.append(_number(number, f"{where}: {field}"))
        measured.append(row)
    if not values:
        why = f": {field!r} is null in all {len(missing)}" if missing else ", it is empty"
        raise DataError(f"{path}: no row has a pass rate{why}")
    given = scale
    scale = scale or _known(field)
    if scale is None:
        raise DataError(
            f"{path}: cannot tell what {field!r} means; say so with scale = one of "
            f"{', '.join(SCALES)}"
        )
    numbers, (convert, largest) = np.array(values), SCALES[scale]
    # This form also finds NaN.
    outside = np.flatnonzero(~((numbers >= 0) & (numbers <= largest)))
    if len(outside):
        raise DataError(
            f"{measured[outside[0]][0]}: {field} must lie in [0, {largest:g}] (scale {scale!r}), "
            f"got {numbers[outside[0]]:g}"
        )
    if given is None and largest > 1 and 0 < numbers.max() <= 1:
        other = "failure" if scale == "difficulty" else "rate"
        raise DataError(
            f"{path}: {field!r} is read as {scale!r}, 0 to 100, but no value exceeds 1; say which "
            f"it is with scale = {other!r} (0 to 1) or {scale!r}"
        )
    rows = measured + missing
    ids = distinct_ids([name for _, name in rows], [place.name for place, _ in rows])
    return PassRates(
        convert(numbers),
        f"{path.name}, field {field}, {len(numbers):,} prompts",
        len(missing),
        tuple(ids) if named else (),
    )


def load_pass_rate_table(path: str | Path) -> dict[str, float | None]:
    """{prompt id: pass rate, None for null} of a file for `load_pass_rates`.

    Raises: its DataErrors, and one if the file names no prompts, or one of them twice.
    """
    found = load_pass_rates(path)
    if not found.ids:
        raise DataError(
            f"{path}: it has pass rates but no prompt ids; expected an object {{id: pass rate}}, "
            'rows with "id", or "ids" beside "rates"'
        )
    table = dict(zip(found.ids, found.rates.tolist() + [None] * found.missing))
    if len(table) < len(found.ids):
        twice = next(name for name, count in Counter(found.ids).items() if count > 1)
        raise DataError(f"{path}: prompt {twice!r} is there twice")
    return table


def load_epochs(path: str | Path, cover: float = 0.9) -> np.ndarray:
    """Accuracies over training, f64[P, E], from a JSON object {prompt: [accuracy of each epoch]}.

    Prompts are visited in another order in every epoch, so lists differ in length. Returns the
    epochs that at least a share `cover` of the prompts have; a shorter list repeats its last value.

    Raises: DataError that names file, prompt and epoch.
    """
    path = Path(path)
    found = _json(path)
    if not isinstance(found, dict) or not found:
        raise DataError(
            f"{path}: expected an object {{prompt: [accuracy of each epoch]}}, got "
            f"{'an empty one' if found == {} else type(found).__name__}"
        )
    for name, series in found.items():
        if not isinstance(series, list) or not series:
            raise DataError(
                f"{path}: prompt {name!r}: expected a list of accuracies, got {series!r:.40}"
            )
        for epoch, value in enumerate(series):
            where = f"{path}: prompt {name!r}, epoch {epoch}"
            if not 0 <= _number(value, where) <= 1:
                raise DataError(f"{where}: must lie in [0, 1], got {value:g}")
    lengths = sorted((len(series) for series in found.values()), reverse=True)
    epochs = lengths[max(math.ceil(cover * len(lengths) - 1e-9), 1) - 1]
    return np.array([(series + series[-1:] * epochs)[:epochs] for series in found.values()], float)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """f64[P, E]: mean over `window` (odd) epochs around each, shifted inwards at both ends; 1
    leaves the values unchanged.

    With few samples per epoch too many prompts are at exactly 0 and 1; the policy of neighbouring
    epochs is nearly the same. Every mean has the same number of samples. Otherwise the ends would
    seem to have more constant prompts.

    Raises: ValueError for a window that is even, below 1 or longer than the series.
    """
    epochs = values.shape[1]
    if not 1 <= window <= epochs or window % 2 == 0:
        raise ValueError(
            f"window must be odd and between 1 and the number of epochs, {epochs}, got {window}"
        )
    total = np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))
    first = np.clip(np.arange(epochs) - window // 2, 0, epochs - window)
    return np.clip((total[:, first + window] - total[:, first]) / window, 0.0, 1.0)


def _known(field: str) -> str | None:
    return next(
        (
            scale
            for name, scale in KNOWN_FIELDS.items()
            if field == name or field.startswith(name + "_")
        ),
        None,
    )


def _find_field(item: dict, where: str) -> str:
    found = [name for name in item if _known(name)]
    if len(found) != 1:
        what = (
            f"several fields look like pass rates ({', '.join(found)})"
            if found
            else (
                f"no field looks like a pass rate ({', '.join(KNOWN_FIELDS)}); it has "
                f"{', '.join(sorted(item)) or 'none'}"
            )
        )
        raise DataError(f"{where}: {what}; name one with field")
    return found[0]


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: expected a number, got {value!r:.40}")
    return float(value)


def _json(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        return json.loads(path.read_text())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno})"
        ) from None


def _rates_object(path: Path, field: str | None) -> list[tuple[str | None, Any]] | None:
    """(prompt id or None, number) of a file that is one JSON object; None for an array of rows."""
    whole = _json(path)
    if not isinstance(whole, dict):
        return None
    name = field or "rates"
    if (
        whole
        and name not in whole
        and not any(isinstance(value, list | dict) for value in whole.values())
    ):
        return list(whole.items())
    if not isinstance(whole.get(name), list):
        raise DataError(
            f"{path}: expected an array of rows, an object {{id: pass rate}}, or an object with a "
            f"list under {name!r}; it has {', '.join(sorted(whole)) or 'nothing'}"
        )
    rates = whole[name]
    ids = whole.get("ids", [None] * len(whole[name]))
    if not isinstance(ids, list) or len(ids) != len(rates):
        raise DataError(f"{path}: 'ids' must be a list as long as {name!r}, {len(rates)}")
    return list(zip(ids, rates))
