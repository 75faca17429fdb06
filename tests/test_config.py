"""Configurations: what cannot be is refused with the field's name, and every shipped file is a valid one."""

import importlib.util

import pytest

from rl_speed import methods
from rl_speed.comparison.runs import Variant
from rl_speed.config import Config
from rl_speed.mesh import make_mesh


@pytest.mark.parametrize("path,value,message", [
    ("rule.name", "sped", "config.rule.name must be one of uniform, dynamic, band, speed, sequential, allocated; got 'sped'"),
    ("rule.n_init", 1, "can accept no prompt"),
    ("rule.n_init", 30, "config.rule.n_init must be between 1 and config.rule.n"),
    ("sampler.top_p", 0.9, "cut the distribution that training samples from"),
    ("driver.buffer_groups", 4, "config.driver.buffer_groups"),
    ("training.micro_batch", 5, "config.training.micro_batch .5. must divide"),
    ("training.minibatches", 3, "config.training.minibatches .3. must divide"),
    ("mesh.data", 5, "384 samples per gradient piece cannot be split over mesh data=5"),
    ("driver.accept", "completion", "config.driver.accept='completion' needs a rule of one phase"),
    ("data.task", "jsonl", "config.data.train must name a file"),
    ("optimizer.schedule", "step", "config.optimizer.schedule"),
])
def test_impossible_settings_name_the_field(path, value, message):
    config = Config()
    section, leaf = path.split(".")
    setattr(getattr(config, section), leaf, value)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_kernel_that_is_not_split_refuses_a_tensor_axis():
    config = Config()
    config.sampler.attention, config.mesh.tensor = "pallas", 2
    with pytest.raises(ValueError, match="attention='pallas' needs config.mesh.tensor=1"):
        config.validate()


def test_mesh_larger_than_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"needs 8 devices, but only 4 are visible \(cpu\)"):
        make_mesh(data=8)


def test_every_method_is_valid():
    for name in methods.METHODS:
        config = Config()
        config.data.train_prompts = 64  # replay caches responses by question
        assert methods.apply(config, name).validate().method == name
    with pytest.raises(ValueError, match="unknown method 'rlo'; known: rloo"):
        methods.apply(Config(), "rlo")


def test_every_config_file_is_valid(repo):
    files = sorted((repo / "configs").glob("*.py"))
    assert len(files) >= 6
    for path in files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.get_config().validate()
        assert f"configs/{path.name}" in module.__doc__, f"{path.name} does not say how it is launched"


def test_variants_change_fields_and_name_mistakes():
    config = Variant("speed_rloo@rule.n_init=6@logging.progress=false").apply(Config())
    assert config.method == "speed_rloo" and config.rule.n_init == 6 and config.logging.progress is False
    assert Variant("speed_rloo@rule.n_init=6").label == "speed_rloo n_init=6"
    with pytest.raises(ValueError, match="'rule.ninit=6' is not section.field=value"):
        Variant("speed_rloo@rule.ninit=6").apply(Config())
