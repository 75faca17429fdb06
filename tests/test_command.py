"""The command line: what cannot be is named with the nearest that can, before anything is built."""

import pytest

from rl_speed.config import Config
from rl_speed.config.command import check_config_file, check_overrides, check_renamed
from rl_speed.runtime import entry


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--config.rule.n_inti=6"], "there is no config.rule.n_inti; nearest: config.rule.n_init"),
        (["--config.optimzer.learning_rate=1"], "nearest: config.optimizer.learning_rate"),
        (["--config.n_init=6"], "there is no config.n_init; nearest: config.rule.n_init"),
        (["--config.optimizer.lr=1e-3"], "nearest: config.optimizer.learning_rate, "),
        (["--config.sede=1"], "nearest: config.seed"),
        (["--config.zzz.qqq=1"], "rl_speed/config/schema.py lists every field"),
        (
            ["--config.mesh=6"],
            "config.mesh is a section; set one of its fields: data, fsdp, tensor",
        ),
        (["--config.rule.n=many"], "config.rule.n must be an integer, got 'many'"),
        (["--config.rule.n", "6.5"], "config.rule.n must be an integer, got '6.5'"),
        (["--config.rule.low=none"], "config.rule.low must be a number, got 'none'"),
        (
            ["--config.driver.prefetch=maybe"],
            "config.driver.prefetch must be true or false, got 'maybe'",
        ),
        (["--noconfig.rule.n"], "config.rule.n is not a switch but an integer"),
    ],
)
def test_impossible_overrides_are_explained(arguments, message):
    (problem,) = check_overrides(["--workdir=x", *arguments])
    assert message in problem


def test_possible_overrides_pass():
    assert (
        check_overrides(
            [
                "--config=configs/a.py",
                "--config.rule.n",
                "6",
                "--config.model.remat",
                "--noconfig.driver.prefetch",
                "-config.optimizer.learning_rate=3e-4",
                "--config.model.path=/some/where",
                "--other=1",
                "word",
                "--config.seed=0x10",
                "--",
                "--config.nothing=1",
            ]
        )
        == []
    )


@pytest.mark.parametrize(
    "name,message",
    [
        (
            "embedded_dapo.py",
            (
                "--config={0}/embedded_dapo.py: there is no file {0}/embedded_dapo.py; methods are "
                "variants of one file now: --config={0}/embedded.py:dapo"
            ),
        ),
        (
            "embedded_ada_est_ema.py:x",
            "; methods are variants of one file now: --config={0}/embedded.py:ada_est_ema",
        ),
        ("embeded.py:dapo", "there is no file {0}/embeded.py; nearest: {0}/embedded.py"),
        ("zzz.py", "--config={0}/zzz.py: there is no file {0}/zzz.py"),
    ],
)
@pytest.mark.parametrize("written", ["--config={}", "--config {}", "-config={}"])
def test_config_file_that_is_not_there(repo, name, message, written):
    (problem,) = check_config_file(
        ["--workdir=x", *written.format(f"{repo}/configs/{name}").split(), "--config.seed=1"]
    )
    assert problem.endswith(message.format(f"{repo}/configs"))


def test_config_files_that_are_there_pass(repo):
    for words in (
        ["--config={}/embedded.py"],
        ["--config", "{}/embedded.py:dapo"],
        ["--other=1", "config=no.py", "--config.seed=1"],
        ["--", "--config=no.py"],
    ):
        assert check_config_file([word.format(repo / "configs") for word in words]) == []


@pytest.mark.parametrize("script", ["train", "compare", "pass_rates", "replay_cache"])
def test_every_entry_point_names_the_new_form_of_a_methods_file(launch, tmp_path, script):
    done = launch(
        f"experiments/{script}.py",
        "--config=configs/embedded_dapo.py",
        f"--workdir={tmp_path / 'run'}",
        f"--out={tmp_path / 'out'}",
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr.strip().splitlines()[-1].endswith("now: --config=configs/embedded.py:dapo")


@pytest.mark.parametrize(
    "arguments,messages",
    [
        (["--lr=1"], ["--lr is --config.optimizer.learning_rate now"]),
        (["-lr", "1"], ["--lr is --config.optimizer.learning_rate now"]),
        (
            ["--remat", "--noremat"],
            ["--remat is --config.model.remat now", "--noremat is --noconfig.model.remat now"],
        ),
        (["--note", "--config.model.remat", "lr=1", "--lrs=1", "--", "--lr=1"], []),
    ],
)
def test_a_flag_of_before_is_told_its_name_of_now(arguments, messages):
    renamed = {"lr": "config.optimizer.learning_rate", "remat": "config.model.remat"}
    assert check_renamed(["--workdir=x", *arguments], renamed) == messages


def test_every_problem_is_told_at_once():
    assert len(check_overrides(["--config.a=1", "--config.rule.n=x", "--config.b.c=2"])) == 3


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda c: setattr(c.rule, "n", "24"), "config.rule.n must be int, got '24'"),
        (lambda c: setattr(c.model, "remat", 1), "config.model.remat must be bool, got 1"),
        (
            lambda c: setattr(c.training, "steps", 10.0),
            "config.training.steps must be int, got 10.0",
        ),
        (
            lambda c: setattr(c.rule, "n_inti", 4),
            "there is no config.rule.n_inti; nearest: config.rule.n_init",
        ),
        (lambda c: setattr(c, "stepps", 4), "there is no config.stepps"),
    ],
)
def test_fields_that_a_config_file_invents_or_mistypes(change, message):
    config = Config()
    change(config)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_whole_numbers_serve_as_floats():
    config = Config()
    config.optimizer.learning_rate = 1
    assert isinstance(config.validate().optimizer.learning_rate, float)


def test_train_refuses_before_it_builds(launch, tmp_path):
    done = launch(
        "experiments/train.py",
        "--config=configs/embedded.py:speed_rloo",
        f"--workdir={tmp_path / 'run'}",
        "--config.rule.n_inti=4",
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert done.stderr.strip().splitlines()[-1] == (
        "error: --config.rule.n_inti: there is no config.rule.n_inti; nearest: "
        "config.rule.n_init, config.rule.n_min"
    )


def test_a_list_of_numbers_is_refused_by_the_name_of_its_flag():
    assert entry.numbers("seeds", ["0", "12"]) == [0, 12]
    assert entry.numbers("targets", ["0.5"], float) == [0.5]
    with pytest.raises(ValueError, match="--seeds must be whole numbers .* got '1,b'"):
        entry.numbers("seeds", ["1", "b"])
