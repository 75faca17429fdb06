"""The lengths that packing is measured on, and its table."""

import numpy as np

from rl_speed.studies.benchmark.packing import gsm8k_like, table


def test_lengths_are_those_of_gsm8k():
    examples = gsm8k_like(4000, vocab_size=32)
    prompts, solutions = (
        np.array([len(getattr(e, name)) for e in examples]) for name in ("prompt", "response")
    )
    # Of the 7,473 training rows as a chat, with Qwen2.5's tokenizer: mean 88.6 (std 21.6) and
    # 122.8 (53.7).
    np.testing.assert_allclose([prompts.mean(), solutions.mean()], [88.6, 122.8], rtol=0.03)
    np.testing.assert_allclose([prompts.std(), solutions.std()], [21.6, 53.7], rtol=0.08)
    assert prompts.min() >= 41 and solutions.max() <= 454
    assert 0.45 < np.corrcoef(prompts, solutions)[0, 1] < 0.65


def test_table():
    kind = lambda rate: {
        "rows": 4,
        "length": 64,
        "pieces": 1,
        "use": 0.5,
        "seconds": [0.1, 0.2, 0.3],
        "tokens_per_s": rate,
    }
    text = table(
        {
            "workload": {
                "batch": 4,
                "parameters": 1e6,
                "model": {"dtype": "float32"},
                "piece": 256,
            },
            "kinds": {"padded": kind(100.0), "packed": kind(250.0)},
            "ratio": 2.5,
            "losses_apart": 0.0,
        }
    )
    assert text.splitlines()[4].split() == ["packed", "4", "64", "1", "50.0%", "200", "250"]
    assert "packed / padded: 2.50" in text
