"""The policy against transformers, and its decode path against its own forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_speed.mesh import make_mesh
from rl_speed.policy import ModelConfig, decoder, forward, hidden_states, init, load_hf, save_hf, token_logprobs
from rl_speed.policy.hf import stored_tensors
from rl_speed.sampling import SamplerConfig, build_contexts, build_requests, sample

pytestmark = pytest.mark.usefixtures("quick_compiles")

MODEL = ModelConfig(vocab_size=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48, max_position=64)
KEY = jax.random.key(0)


def lively(config):
    """Random weights with biases and norms that matter."""
    params = init(config, KEY)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)


@pytest.fixture(scope="module")
def params():
    return lively(MODEL)


def ragged_rows(seed=0, rows=5, longest=20, vocab=40):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, longest + 1, rows)
    return np.where(np.arange(longest) < lengths[:, None], rng.integers(0, vocab, (rows, longest)), 0), lengths


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_transformers(tied, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = dataclasses.replace(MODEL, tie_embeddings=tied)
    params = lively(config)
    save_hf(tmp_path / "m", params, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokens, lengths = ragged_rows()
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    out = theirs(torch.tensor(tokens), attention_mask=torch.tensor(valid.astype(np.int64))).logits
    np.testing.assert_allclose(np.where(valid[..., None], forward(params, tokens, config), 0),
                               np.where(valid[..., None], out.detach().numpy(), 0), atol=1e-3)
    # A sequence loss: mean negative log-probability of the next token.
    mask = valid[:, 1:]
    picked = torch.log_softmax(out[:, :-1], -1).gather(-1, torch.tensor(tokens[:, 1:, None]))[..., 0]
    (-(picked * torch.tensor(mask)).sum() / mask.sum()).backward()

    def loss(params):
        logprobs, _ = token_logprobs(params, hidden_states(params, tokens, config)[:, :-1], tokens[:, 1:], config)
        return -jnp.sum(jnp.where(mask, logprobs, 0)) / mask.sum()

    ours = jax.grad(loss)(params)
    gradients = dict(stored_tensors(ours, config))  # by Hugging Face's names: every weight is compared
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad.numpy(), atol=1e-4, err_msg=name)


def test_greedy_continuation_equals_transformers(params, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    save_hf(tmp_path / "m", params, MODEL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokens, lengths = ragged_rows(3)
    prompts = [row[:n] for row, n in zip(tokens, lengths)]
    contexts = build_contexts(prompts, 8, 20)
    requests = build_requests(range(5), range(5), [0] * 5, contexts, 16, 12)
    config = SamplerConfig(slots=4, max_new=12, temperature=0.0, end_tokens=(7,))
    got = sample(decoder(MODEL), params, contexts, requests, KEY, config)
    for i, prompt in enumerate(prompts):
        want = theirs.generate(torch.tensor(prompt)[None], do_sample=False, max_new_tokens=12, eos_token_id=7, pad_token_id=0)
        want = want[0, len(prompt):].tolist()
        assert got.tokens[i, :int(got.lengths[i])].tolist() == want


def draw(params, slots, order=slice(None), temperature=0.9):
    """96 requests that cut ragged contexts anywhere; returns (rows with their history, samples)."""
    tokens, lengths = ragged_rows(5, rows=12)
    contexts = build_contexts([row[:n] for row, n in zip(tokens, lengths)], 12, 20)
    rng = np.random.default_rng(9)
    context = np.repeat(np.arange(12), 8)
    cut = rng.integers(1, lengths[context] + 1)
    columns = dict(context=context, visit=context, sample_index=np.tile(np.arange(8), 12), context_length=cut)
    requests = build_requests(contexts=contexts, capacity=96, max_new=10,
                              **{name: values[order] for name, values in columns.items()})
    got = sample(decoder(MODEL), params, contexts, requests, KEY,
                 SamplerConfig(slots=slots, max_new=10, end_tokens=(1, 2), temperature=temperature))
    return [tokens[c][:n] for c, n in zip(context, cut)], jax.device_get(got)


def forced_logprobs(params, prompts, samples, temperature=0.9):
    """Log-probs of the sampled tokens by the training forward pass, one row each, [96, 10]."""
    rows = np.zeros((96, 30), np.int64)
    for i, prompt in enumerate(prompts):
        rows[i, :len(prompt)] = prompt
        rows[i, len(prompt):len(prompt) + samples.lengths[i]] = samples.tokens[i, :samples.lengths[i]]
    logprobs, _ = token_logprobs(params, hidden_states(params, rows, MODEL)[:, :-1], rows[:, 1:], MODEL, temperature=temperature)
    out = np.zeros((96, 10))
    for i, prompt in enumerate(prompts):
        n = samples.lengths[i]
        out[i, :n] = logprobs[i, len(prompt) - 1:len(prompt) - 1 + n]
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_within_1e_5(params, temperature):
    prompts, samples = draw(params, 16, temperature=temperature)
    assert samples.truncated.any() and not samples.truncated.all()
    np.testing.assert_allclose(samples.logprobs, forced_logprobs(params, prompts, samples, temperature), atol=1e-5)


def test_order_and_company_change_no_bit(params):
    _, base = draw(params, 16)
    order = np.random.default_rng(2).permutation(96)[:61]
    _, other = draw(params, 16, order)
    np.testing.assert_array_equal(base.tokens[order], other.tokens[:61])
    np.testing.assert_array_equal(base.logprobs[order], other.logprobs[:61])


@pytest.mark.parametrize("slots", [5, 8, 32])
def test_other_slot_counts_agree_up_to_rounding(params, slots):
    prompts, base = draw(params, 16)
    _, other = draw(params, slots)
    np.testing.assert_allclose(other.logprobs, forced_logprobs(params, prompts, other), atol=1e-5)
    for i in range(96):
        if base.tokens[i].tolist() == other.tokens[i].tolist():
            continue
        # A first divergence must be a near-tie: the uniform number lies within rounding of the edge between the two tokens.
        from rl_speed.sampling.logits import request_keys, uniforms

        t = int(np.flatnonzero(base.tokens[i] != other.tokens[i])[0])
        row = np.concatenate([prompts[i], base.tokens[i, :t]])
        cdf = np.cumsum(jax.nn.softmax(forward(params, row[None], MODEL)[0, -1] / 0.9))
        u = float(uniforms(request_keys(KEY, jnp.array([i // 8]), jnp.array([i % 8])), jnp.array([t]))[0])
        assert np.min(np.abs(cdf - u)) < 1e-5


def test_chunked_head_equals_whole(params):
    tokens, _ = ragged_rows(7)
    hidden = hidden_states(params, tokens, MODEL)

    def total(params, chunk):
        logprobs, entropy = token_logprobs(params, hidden, tokens, MODEL, temperature=0.7, chunk=chunk, with_entropy=True)
        return jnp.sum(logprobs * jnp.arange(20)) + jnp.sum(entropy), (logprobs, entropy)

    (_, whole), grads = jax.value_and_grad(total, has_aux=True)(params, None)
    (_, pieces), more = jax.value_and_grad(total, has_aux=True)(params, 15)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, pieces)
    np.testing.assert_allclose(grads["embed"], more["embed"], atol=1e-3)
    reference = jax.nn.log_softmax(forward(params, tokens, MODEL) / 0.7)
    np.testing.assert_allclose(whole[0], np.take_along_axis(reference, tokens[..., None], -1)[..., 0], atol=1e-5)
    np.testing.assert_allclose(whole[1], -(jnp.exp(reference) * reference).sum(-1), atol=1e-5)


def test_packed_segments_equal_separate_rows(params):
    tokens, _ = ragged_rows(8, rows=1, longest=16)
    segments = np.array([[0] * 6 + [1] * 10])
    packed = forward(params, tokens, MODEL, segment_ids=segments)
    np.testing.assert_allclose(packed[:, :6], forward(params, tokens[:, :6], MODEL), atol=1e-5)
    np.testing.assert_allclose(packed[:, 6:], forward(params, tokens[:, 6:], MODEL), atol=1e-5)


def test_load_on_a_mesh_equals_load_on_one_device(params, tmp_path):
    save_hf(tmp_path / "m", params, MODEL)
    one, config = load_hf(tmp_path / "m")
    four, _ = load_hf(tmp_path / "m", mesh=make_mesh(fsdp=2, tensor=2))
    assert dataclasses.replace(config, rope_theta=MODEL.rope_theta) == MODEL
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(four))
    assert four["layers"]["w_up"].addressable_shards[0].data.shape == (2, 16, 24)
