"""The text that names held-out sets: their names, files and samples."""

import numpy as np
import pytest

from rl_speed.config import Config
from rl_speed.data.held_out import NamedFile, numbered, parse_files
from rl_speed.data.prompts import Prompt


def parse(text):
    return parse_files(text, "config.data.eval")


@pytest.mark.parametrize(
    "text,found",
    [
        ("", []),
        ("eval/math500.jsonl", [("", "eval/math500.jsonl", 0)]),
        ("open-r1/DAPO:en@train", [("", "open-r1/DAPO:en@train", 0)]),
        ("hold_out", [("", "hold_out", 0)]),
        ("math=eval/a.jsonl", [("math", "eval/a.jsonl", 0)]),
        (
            "dapo1k=hold_out, aime24:32=owner/aime:2024@test[:30], eval/math500.jsonl.gz",
            [
                ("dapo1k", "hold_out", 0),
                ("aime24", "owner/aime:2024@test[:30]", 32),
                ("math500", "eval/math500.jsonl.gz", 0),
            ],
        ),
        # A "=" behind a "/" belongs to a path.
        (
            "runs/lr=1/a.jsonl,b:2=runs/lr=1/b.jsonl",
            [("a", "runs/lr=1/a.jsonl", 0)] + [("b", "runs/lr=1/b.jsonl", 2)],
        ),
    ],
)
def test_names_samples_and_files(text, found):
    assert parse(text) == [NamedFile(*one) for one in found]


def test_what_exists_as_a_path_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.jsonl", "x=y.jsonl"):
        (tmp_path / name).write_text("")
        assert parse(name) == [NamedFile("", name)]


@pytest.mark.parametrize(
    "text,message",
    [
        ("a=", "config.data.eval is FILE or NAME=FILE, or NAME:SAMPLES=FILE, .*; got 'a='"),
        ("=b.jsonl", "got '=b.jsonl'"),
        ("a:=b.jsonl", "the samples are a whole number of at least 1; got 'a:=b.jsonl'"),
        ("a:0=b.jsonl", "at least 1; got 'a:0=b.jsonl'"),
        ("a:1:2=b.jsonl", "at least 1; got 'a:1:2=b.jsonl'"),
        ("x/a.jsonl,a=b.jsonl", r"two sets 'a' \(x/a.jsonl and b.jsonl\): call one of them"),
    ],
)
def test_what_cannot_be_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def files(**fields):
    config = Config()
    config.data.task = "jsonl"
    config.data.train = "train.jsonl"
    for name, value in fields.items():
        setattr(config.data, name, value)
    return config


def test_the_configuration_resolves_its_words():
    config = files(
        hold_out=9, eval="own=hold_out,a:7=a.jsonl,b=b.jsonl", decontaminate="c.jsonl,eval"
    )
    config.validate()
    assert config.data.decontamination_files() == ["c.jsonl", "a.jsonl", "b.jsonl"]
    assert config.most_evaluation_samples == 7
    config.evaluation.samples = 8
    assert config.most_evaluation_samples == 8
    config.data.eval = ""
    assert config.data.held_out_files() == [NamedFile("", "hold_out")]
    assert files().data.held_out_files() == [] == Config().data.held_out_files()
    assert Config().most_evaluation_samples == Config().evaluation.samples


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"eval": "a=hold_out"}, "config.data.hold_out is 0: set it"),
        ({"decontaminate": "eval", "hold_out": 9}, "config.data.eval names no file"),
        ({"eval": "a:x=b.jsonl"}, "config.data.eval: in NAME:SAMPLES=FILE"),
    ],
)
def test_the_configuration_refuses_words_without_a_meaning(fields, message):
    with pytest.raises(ValueError, match=message):
        files(**fields).validate()


def test_a_questions_visit_depends_on_its_set_alone():
    prompts = [Prompt(str(i), np.zeros(1, int), "", np.zeros(0, int), "") for i in range(3)]

    def visits(name, *how):
        return [p.visit for p in numbered(name, prompts, *how)]

    assert visits("") == [0, 1, 2] and visits("", 2) == [0, 1]
    assert visits("math500") == [visits("math500", 1)[0] + i for i in range(3)]
    assert not set(visits("math500")) & set(visits("aime24"))


def test_a_list_that_is_longer_than_a_path_may_be():
    text = ",".join(f"benchmark_number_{i}:4=a_long_name_of_a_file_{i}.jsonl" for i in range(20))
    found = parse(text)
    assert len(found) == 20 and found[19].file == "a_long_name_of_a_file_19.jsonl"
