"""Configurations: what cannot be is refused with the field's name,
and every shipped file is a valid one.
"""

import dataclasses
import importlib.util

import pytest

from rl_speed.config import Config, methods, presets
from rl_speed.config.checks import check_evaluation
from rl_speed.mesh import make_mesh
from rl_speed.studies.comparison.runs import Variant


@pytest.mark.parametrize(
    "path,value,message",
    [
        (
            "rule.name",
            "sped",
            (
                "config.rule.name must be one of uniform, dynamic, band, speed, sequential, "
                "allocated, or a function of yours, 'module:function'; got 'sped'"
            ),
        ),
        ("rule.n_init", 1, "can accept no prompt"),
        ("rule.n_init", 30, "config.rule.n_init must be between 1 and config.rule.n"),
        ("sampler.top_p", 0.9, "cut the distribution that training samples from"),
        ("driver.buffer_groups", 4, "config.driver.buffer_groups"),
        ("training.minibatches", 3, "config.training.minibatches .3. must divide"),
        (
            "mesh.data",
            5,
            "the 384 samples of an optimizer step .* cannot be split over mesh data=5",
        ),
        (
            "driver.accept",
            "completion",
            "config.driver.accept='completion' needs a rule of one phase",
        ),
        ("data.task", "jsonl", "config.data.train must name a file"),
        ("optimizer.schedule", "step", "config.optimizer.schedule"),
    ],
)
def test_impossible_settings_name_the_field(path, value, message):
    config = Config()
    section, leaf = path.split(".")
    setattr(getattr(config, section), leaf, value)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_mesh_larger_than_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"needs 8 devices, but only 4 are visible \(cpu\)"):
        make_mesh(data=8)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX looks at of a device to lay a mesh."""

    id: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0


def test_an_axis_is_laid_over_parts_of_a_torus():
    """Sixteen TPUs, 4 x 4, as fsdp=8 x tensor=2: each pair of `tensor` are neighbours."""
    mesh = make_mesh(fsdp=8, tensor=2, devices=[Chip(i, (i % 4, i // 4, 0)) for i in range(16)])
    assert mesh.devices.shape == (1, 8, 2)
    for a, b in mesh.devices[0]:
        assert abs(a.coords[0] - b.coords[0]) + abs(a.coords[1] - b.coords[1]) == 1
    assert sorted(d.id for d in mesh.devices.flat) == list(range(16))


def test_every_method_is_valid():
    for name in methods.METHODS:
        config = Config()
        config.data.train_prompts = 64  # replay caches responses by question
        assert methods.apply(config, name).validate().method == name
    with pytest.raises(ValueError, match="unknown method 'rlo'; known: rloo"):
        methods.apply(Config(), "rlo")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_config_file_is_valid(repo):
    """With every word that it may be asked for; the docstring says how it is launched,
    and knows the words. What is for evaluations alone is checked as they check it.
    """
    made = set()
    for path in sorted((repo / "configs").glob("*.py")):
        module, check = (
            load(path),
            check_evaluation if path.stem == "evaluation" else lambda config: config.validate(),
        )
        check(module.get_config())
        assert f"configs/{path.name}" in module.__doc__, (
            f"{path.name} does not say how it is launched"
        )
        for variant in filter(None, presets.variants(getattr(module, "VARIANTS", ()))):
            check(config := module.get_config(variant))
            made.add((path.stem, variant, getattr(config, "method", "")))
            assert variant in module.__doc__ or "Variants: those of" in module.__doc__, (
                f"{path.name} does not mention {variant}"
            )
    assert {("embedded", method, method) for method in methods.METHODS} - made == {
        ("embedded", "speed_rloo", "speed_rloo")
    }


def test_embedded_document(repo):
    """Without a word it is SPEED-RLOO, which it also knows by name; its table has a row for each
    method and no other; it names every field in which what all methods share differs from
    the defaults.
    """
    document, plain = load(repo / "configs" / "embedded.py"), presets.embedded().to_dict()
    assert (
        document.get_config()
        == document.get_config("speed_rloo")
        == presets.embedded()
        == presets.embedded("speed_rloo")
    )
    assert all(
        document.get_config(method) == presets.embedded(method) for method in methods.METHODS
    )
    rows = document.__doc__.split("\nNAME  ")[1].split("\n\n")[0].splitlines()[2:]
    assert sorted(row.split()[0] for row in rows) == sorted(methods.METHODS)
    changed = {
        f"{section}.{leaf}"
        for section, values in Config().to_dict().items()
        if isinstance(values, dict)
        for leaf, value in values.items()
        if plain[section][leaf] != value
    }
    assert changed and all(field in document.__doc__ for field in changed)
    with pytest.raises(ValueError, match="no variant 'dapp'; nearest: dapo"):
        document.get_config("dapp")


def test_variants_of_a_preset_are_words_of_their_own():
    words = (("a", "b"), ("c", "d", "e"))
    assert presets.choose("", words) == ["a", "c"] and presets.choose("e,b", words) == ["b", "e"]
    assert list(presets.variants(words)) == ["", "b", "d", "e"]
    with pytest.raises(ValueError, match="no variant 'speed_dap'; nearest: speed_dapo"):
        presets.speed("model", "speed_dap")
    with pytest.raises(ValueError, match="is 'd' or 'e', not both"):
        presets.choose("d,e", words)
    with pytest.raises(ValueError, match="'grpo' replays nothing, and has no window '300'"):
        presets.rpo("model", "300,grpo")


def test_papers_scale_as_the_papers_have_it():
    """Numbers of methods.md, written down once more: batch, samples, lengths, steps,
    and what makes each variant.
    """
    speed, dapo = presets.speed("m"), presets.speed("m", "deepscaler,speed_dapo")
    assert (speed.driver.groups, speed.driver.screening, speed.driver.screen_prompts) == (
        16,
        "fixed",
        64,
    )
    assert (speed.rule.n, speed.rule.n_init, speed.rule.low, speed.rule.high) == (24, 8, 0.0, 1.0)
    assert (speed.data.max_prompt_length, speed.sampler.max_new, speed.sampler.temperature) == (
        1024,
        3072,
        1.0,
    )
    assert (
        speed.optimizer.learning_rate,
        speed.optimizer.warmup_steps,
        speed.optimizer.weight_decay,
    ) == (1e-6, 10, 0.1)
    assert (dapo.objective.clip_low, dapo.objective.clip_high, "deepscaler" in dapo.data.train) == (
        0.2,
        0.28,
        True,
    )
    band = presets.band("m", "30-70")
    assert (band.driver.groups, band.rule.n, band.training.steps, band.data.order) == (
        16,
        16,
        256,
        "visits",
    )
    assert (band.rule.low, band.rule.high, band.rule.inclusive, band.evaluation.temperature) == (
        0.3,
        0.7,
        True,
        0.6,
    )
    assert (
        band.reward.format_weight == band.reward.language_weight == 1
        and band.objective.reference_every > 0
    )
    assert (
        not presets.band("m", "0-100").rule.inclusive
        and presets.band("m", "plain").rule.name == "uniform"
    )
    ada = presets.ada("m", "ada_seq_pos")
    assert (ada.driver.groups, ada.rule.n, ada.rule.m, ada.rule.rounds, ada.sampler.max_new) == (
        512,
        4,
        8,
        4,
        2048,
    )
    assert (ada.rule.k_pos, ada.rule.k_neg, ada.objective.entropy_coef, ada.training.steps) == (
        1,
        0,
        0.0,
        600,
    )
    assert (
        presets.ada("m", "paper").objective.entropy_coef == 1e-4
        and presets.ada("m", "grpo").driver.groups == 512
    )
    rpo = presets.rpo("m", "800,length_aware")
    assert (
        rpo.driver.groups * rpo.rule.n,
        rpo.rule.n,
        rpo.sampler.temperature,
        rpo.sampler.max_new,
    ) == (576, 6, 0.7, 4096)
    assert (rpo.replay.window, rpo.replay.length, rpo.replay.eps, rpo.reward.length_alpha) == (
        "fixed",
        800,
        0.1,
        0.01,
    )
    assert round(rpo.training.steps * rpo.driver.groups / 7000, 2) == 4.0


def test_variants_change_fields_and_name_mistakes():
    config = Variant("speed_rloo@rule.n_init=6@logging.progress=false").apply(Config())
    assert (
        config.method == "speed_rloo"
        and config.rule.n_init == 6
        and config.logging.progress is False
    )
    assert Variant("speed_rloo@rule.n_init=6").label == "speed_rloo n_init=6"
    with pytest.raises(ValueError, match="'rule.ninit=6' is not section.field=value"):
        Variant("speed_rloo@rule.ninit=6").apply(Config())
