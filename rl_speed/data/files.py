"""Rows of a data set as they stand: JSON lines, JSON, Parquet, or a data set of the Hugging Face
hub. What fields mean is not known here.
"""

import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
# OWNER/NAME[:CONFIG][@SPLIT]
_HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?"
)


class DataError(ValueError):
    """A data file or a row of it that cannot be used; the message names file and line."""


def read_items(source: str | pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Line number and value (or the DataError that the line gave) of each row of `source`.

    Args:
      source: one of
        .jsonl[.gz]: a value a line;
        .json[.gz]: an array; an object of columns, each an array, or an object {row: value} as
          pandas writes it; or an object that holds nothing but one array of objects, as {"data":
          [...]}. "Line" is then the row's number, from 1;
        .parquet: read a row group at a time; nested columns become dicts and lists. "Line" is the
          row's number;
        OWNER/NAME[:CONFIG][@SPLIT]: a data set of the Hugging Face hub, @train where nothing is
          said, through the library `datasets` (pip install -e '.[hub]' in the checkout) and its
          cache. What exists as a path is a path. A directory is read by that library too:
          DIRECTORY[@SPLIT].

    Raises:
      DataError: no such file, not readable as what its name says, or the hub has no such data set
        or cannot be reached.
    """
    path = pathlib.Path(source)
    if path.is_file():
        if path.name.endswith(".parquet"):
            return _parquet(path)
        if path.name.endswith(ENDINGS):
            return _json(path)
        raise DataError(f"{path}: expected a name ending in {', '.join(ENDINGS)}")
    directory, _, split = str(source).rpartition("@")
    if path.is_dir() or (directory and pathlib.Path(directory).is_dir()):
        return _hub(str(source), *((str(source), "train") if path.is_dir() else (directory, split)))
    found = _HUB_NAME.fullmatch(str(source))
    if found and not str(source).endswith(ENDINGS):
        return _hub(str(source), found["name"], found["split"] or "train", found["config"])
    raise DataError(f"{source}: no such file")


def is_source(name: str) -> bool:
    """Whether `name` exists as a path, or has the form of a hub's data set."""
    path = pathlib.Path(name)
    return path.exists() or (_HUB_NAME.fullmatch(name) is not None and not name.endswith(ENDINGS))


def _json(path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    try:
        data = (
            gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({error})") from None
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        lines = enumerate(data.split(b"\n"), start=1)
        return ((line, _parse(raw)) for line, raw in lines if raw.strip())
    whole = _parse(data)
    if isinstance(whole, DataError):
        raise DataError(f"{path}: {whole}")
    return enumerate(_rows(whole, path), start=1)


def _rows(whole: Any, path: pathlib.Path) -> list[Any]:
    """The rows of a JSON document."""
    if isinstance(whole, list):
        return whole
    columns = whole if isinstance(whole, dict) else {}
    if len(columns) == 1:
        (only,) = columns.values()
        if isinstance(only, list) and only and all(isinstance(row, dict) for row in only):
            return only
    if columns and all(isinstance(column, dict) for column in columns.values()):  # pandas' to_json
        names = list(next(iter(columns.values())))
        if all(list(column) == names for column in columns.values()):
            columns = {key: list(column.values()) for key, column in columns.items()}
    if columns and all(isinstance(column, list) for column in columns.values()):
        if len({len(column) for column in columns.values()}) == 1:
            return [dict(zip(columns, row)) for row in zip(*columns.values())]
        sizes = ", ".join(f"{key} {len(column)}" for key, column in list(columns.items())[:4])
        raise DataError(f"{path}: columns of different lengths ({sizes})")
    raise DataError(
        f"{path}: expected a JSON array of rows, or an object of columns of one length; got "
        f"{type(whole).__name__}"
    )


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return DataError(f"not JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, thousands of brackets.
        return DataError(f"not read as JSON ({str(error).splitlines()[0]})")


def _parquet(path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    line = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(batch_size=1024, row_groups=[group]):
                    for row in batch.to_pylist():
                        line += 1
                        yield line, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a whole Parquet file (after row {line}: {str(error).splitlines()[0]})"
        ) from None


def _hub(
    source: str, name: str, split: str, config: str | None = None
) -> Iterator[tuple[int, Any]]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source}: no such file; to read it as a data set of the Hugging Face hub, install "
            "the library `datasets` (pip install -e '.[hub]' in the checkout)"
        ) from None
    try:
        rows = datasets.load_dataset(name, config, split=split)
    # The library lets through what its back ends raise: requests, httpx, fsspec, pyarrow, and
    # errors of its own.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{source}: no such file, and not read as a data set of the Hugging Face hub (split "
            f"{split!r}): {reason}"
        ) from None
    return enumerate(iter(rows), start=1)
