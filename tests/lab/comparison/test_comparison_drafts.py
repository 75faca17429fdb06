"""The task "drafts", which the protocols of Bae et al. and of RPO are run on."""

import collections

import numpy as np
import pytest

from lab.comparison import drafts, protocols
from lab.comparison.runs import Variant
from rl_speed.config import methods
from rl_speed.data import chain
from rl_speed.policy import load_hf, load_tokenizer
from rl_speed.rewards import format_reward, language_reward


@pytest.fixture(scope="module")
def shown():
    """(question, demonstration) of each."""
    generator = np.random.default_rng(0)
    asked = [chain.question(drafts.MIXTURES["wide"], "demo", 0, i) for i in range(3000)]
    return [
        (question, drafts.demonstration(question.text, generator, (2, 5))) for question in asked
    ]


def test_the_last_draft_decides(shown):
    by_class = collections.defaultdict(list)
    for question, text in shown:
        right = drafts.correct(text, question.answer[-1], ended=True)
        thought, closed, answer = text.partition(drafts.CLOSE)
        if closed and answer and not set(text) & set(drafts.FOREIGN_DIGITS):
            totals = thought.removeprefix(drafts.OPEN).split(drafts.NEXT)[-1]
            assert answer == totals.rstrip(chain.FILL)[-1]
            assert not right or answer == question.answer[-1]
        assert not drafts.correct(text, question.answer[-1], ended=False)
        by_class[question.class_name].append(right)
    means = {name: np.mean(values) for name, values in by_class.items()}
    assert means["easy"] > 0.8 > means["mild"] > 0.5 > means["hard"] > 0.2 > means["beyond"]


def test_demonstrations_err_in_form_and_language(shown):
    texts = [text for _, text in shown]
    form = format_reward(texts, [True] * len(texts))
    # Without an opening tag there is no thought either; nor without a closing one, and no summary.
    shares = {value: np.mean(np.isclose(form, value)) for value in (1.0, 0.8, 0.6, 0.4)}
    assert shares[1.0] > 0.85 and all(0.02 < shares[v] < 0.06 for v in (0.8, 0.6, 0.4))
    assert 0.07 < np.mean(language_reward(texts) < 1) < 0.13


def test_a_response_is_a_token_a_character_or_tag(shown, tmp_path, monkeypatch):
    monkeypatch.setattr(drafts, "TRAIN", {"wide": 30, "repairable": 20})
    monkeypatch.setattr(drafts, "HELD_OUT", 10)
    monkeypatch.setattr(drafts, "DEMONSTRATIONS", 5)
    drafts.write(tmp_path)
    assert len((tmp_path / "repairable" / "train.jsonl").read_text().splitlines()) == 20
    _, model = load_hf(tmp_path / "wide" / "untrained")
    assert model.vocab_size == len(drafts.VOCABULARY)
    tokenizer = load_tokenizer(tmp_path / "wide" / "untrained")
    for _, text in shown[:50]:
        tokens = tokenizer.encode(text)
        tags = text.count(drafts.OPEN) + text.count(drafts.CLOSE)
        letters = len(text.replace(drafts.OPEN, "").replace(drafts.CLOSE, ""))
        assert len(tokens) == tags + letters and tokenizer.decode(tokens) == text


@pytest.mark.parametrize("name, mixture", [("bae", "wide"), ("rpo", "repairable")])
def test_the_protocols_run_on_it(name, mixture):
    protocol = protocols.PROTOCOLS[name]
    of_method = protocol.settings(methods.of(drafts.get_config(f"grpo,{mixture}")))
    for spec in protocol.methods:
        config = Variant(spec).of(of_method).validate()
        assert (
            f"/{mixture}/" in config.data.train
            and config.sampler.max_new == drafts.MAX_NEW[mixture]
        )
