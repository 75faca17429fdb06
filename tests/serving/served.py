"""A random Qwen2-shaped policy over bytes, with ChatML turns, for tests of serving."""

import json

import jax
import tokenizers
import transformers

from rl_speed.policy import ModelConfig, init, save_hf

TURN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_policy(directory, key=3):
    """Writes the policy as a Hugging Face directory; `directory`."""
    vocabulary = [END, TURN, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([END, TURN])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    model = ModelConfig(
        vocab_size=258,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=64,
        max_position=256,
        qkv_bias=True,
    )
    # Wider than at the start of training, so that what is likeliest changes from token to token.
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, init(model, jax.random.key(key)))
    save_hf(directory, params, model, tokenizer)
    # Byte 0x2e, a dot, ends a response too: a random policy rarely draws one certain token.
    path = directory / "generation_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {"eos_token_id": [0, vocabulary.index(".")]}))
    return directory
