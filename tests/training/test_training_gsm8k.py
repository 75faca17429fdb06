"""The GSM8K configuration end to end: real questions, the real Qwen2.5 tokenizer, a shrunken random Qwen2 directory."""

import dataclasses
import importlib.util
import json
import shutil

import numpy as np
import pytest

from rl_speed.training.loop import Trainer
from rl_speed.training.metrics import read_lines

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def qwen_directory(real_data, tmp_path_factory):
    """Written by transformers' own config class, with Qwen2.5's vocabulary, tokenizer and end tokens."""
    transformers = pytest.importorskip("transformers")
    import jax

    from rl_speed.policy import ModelConfig, init, save_hf

    directory = tmp_path_factory.mktemp("qwen") / "model"
    real = json.loads((real_data / "configs" / "Qwen2.5-0.5B-Instruct.config.json").read_text())
    small = {**real, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2}
    config = ModelConfig.from_hf(transformers.Qwen2Config(**small).to_dict())
    save_hf(directory, init(config, jax.random.key(0)), config,
            extra={"generation_config.json": {"eos_token_id": [151645, 151643]}})
    transformers.Qwen2Config(**small).save_pretrained(directory)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(real_data / "tokenizer" / "qwen2.5" / name, directory)
    shutil.copy(real_data / "tokenizer" / "qwen2.5" / "tokenizer_config.qwen2.5-0.5b-instruct.json",
                directory / "tokenizer_config.json")
    return directory


def make_config(repo, real_data, directory, steps):
    spec = importlib.util.spec_from_file_location("gsm8k_config", repo / "configs" / "gsm8k.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.model.path, config.model.compute_dtype = str(directory), "float32"
    config.data.train, config.data.eval = (str(real_data / "gsm8k" / f"{split}.jsonl") for split in ("train", "test"))
    config.data.max_prompt_length, config.data.train_prompts, config.data.eval_prompts = 96, 64, 4
    config.sampler.slots, config.sampler.max_new, config.sampler.prefill_chunk = 8, 8, 4
    config.rule.n, config.rule.n_init, config.driver.groups = 4, 2, 2
    config.driver.screen_prompts, config.driver.buffer_groups = 4, 8
    config.reward.workers, config.training.micro_batch, config.training.length_multiple = 1, 4, 0
    config.model.head_chunk, config.logging.progress, config.logging.export = 256, False, False
    config.training.steps, config.checkpoints.every, config.evaluation.every = steps, 2, 5
    # A random policy is always wrong: thresholds that accept everything let the whole pipeline run on real questions.
    config.rule.low, config.rule.high = -np.inf, np.inf
    return config


def test_five_steps_checkpoint_resume_evaluate(repo, real_data, qwen_directory, tmp_path):
    first = Trainer(make_config(repo, real_data, qwen_directory, 3), tmp_path)
    prompt = first.stream.take(1)[0]
    first.stream.put_back([prompt])
    text = first.policy.tokenizer.decode(prompt.tokens)
    assert prompt.text in text and "\\boxed{}" in text and text.endswith("<|im_start|>assistant\n")
    assert prompt.answer.lstrip("-").replace(".", "").isdigit()
    assert first.policy.end_tokens == (151645, 151643)
    first.run()
    second = Trainer(make_config(repo, real_data, qwen_directory, 5), tmp_path)
    assert second.step == 3
    summary = second.run()
    records = read_lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(5))
    assert all(r["skipped"] == 0 and r["reward"] == 0 and r["groups"] == 2 for r in records)
    assert records[-1]["verifier/ok"] + records[-1].get("verifier/no_answer", 0) > 0
    assert [e["step"] for e in summary["evaluations"]] == [0, 3, 5]
    rollout = read_lines(tmp_path / "rollouts.jsonl")[0]
    assert rollout["question"] and isinstance(rollout["response"], str)


def test_math_verifier_scores_decoded_responses(real_data, qwen_directory):
    """The scorer's own path: token ids of a right and a wrong boxed answer, with and without the end token."""
    from rl_speed.data.prompts import Prompt
    from rl_speed.policy import load_tokenizer
    from rl_speed.rewards import IntegerMatch, MathVerifier, token_bytes
    from rl_speed.sampling.generate import Drawn
    from rl_speed.training.score import JaxScorer, MathScorer, integer_answers

    tokenizer = load_tokenizer(qwen_directory)
    texts = ["The answer is \\boxed{72}.<|im_end|>", "So \\boxed{71}<|im_end|>", "Hence \\boxed{72}", "72<|im_end|>"]
    ids = [tokenizer.encode(text) for text in texts]
    width = max(map(len, ids))
    tokens = np.array([row + [0] * (width - len(row)) for row in ids], np.int32)
    drawn = Drawn(tokens, np.zeros(tokens.shape, np.float32), np.array([len(r) for r in ids]), np.zeros(4, bool))
    prompt = Prompt("p", np.array([1], np.int32), "72", np.zeros(0, np.int32), "?")
    with MathVerifier(1, 10.0, "boxed") as verifier:
        scores = MathScorer(tokenizer, (151645, 151643), verifier)([prompt] * 4, drawn)
    assert scores.tolist() == [1, 0, 1, 0]
    in_loop = JaxScorer(IntegerMatch(token_bytes(tokenizer, 151936), (151645, 151643)), integer_answers)
    assert in_loop([prompt] * 4, drawn).tolist() == [1, 0, 1, 0]
    with pytest.raises(ValueError, match="prompt 'q': '3/4' is not an integer"):
        integer_answers([prompt, dataclasses.replace(prompt, id="q", answer="3/4")])


@pytest.mark.slow
def test_whole_step_in_one_program_with_integer_answers(repo, real_data, qwen_directory, tmp_path):
    config = make_config(repo, real_data, qwen_directory, 2)
    config.driver.where, config.reward.verifier, config.evaluation.every = "in_loop", "integer", 0
    summary = Trainer(config, tmp_path).run()
    records = read_lines(tmp_path / "metrics.jsonl")
    assert all(r["skipped"] == 0 and r["groups"] == 2 and r["age_max"] == 0 and r["behaviour_gap"] < 1e-5 for r in records)
    assert summary["prompts"]["completed"] == 4
