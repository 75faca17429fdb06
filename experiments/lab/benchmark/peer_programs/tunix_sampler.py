"""tunix's `Sampler` on the peers' work: JAX, its own Qwen2, all rows at once."""

import inspect

import jax
import jax.numpy as jnp
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from turns import Turns


class Ids:
    """A tokenizer whose text is the ids themselves."""

    def encode(self, text, **_):
        return [int(i) for i in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return None

    def eos_id(self):
        return 0

    def pad_id(self):
        return 0


def main(turns: Turns) -> None:
    work = turns.work
    shape = turns.work["shape"]
    config = qwen2.ModelConfig(
        num_layers=shape["layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["width"],
        hidden_dim=shape["mlp_width"],
        num_heads=shape["heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["kv_heads"],
        rope_theta=int(shape["rope_theta"]),
        norm_eps=shape["norm_eps"],
        use_tied_embedding=shape["tie_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    load = qwen2_params.create_model_from_safe_tensors
    # Float32 as the others; versions differ in whether they can be asked for it.
    dtype = {"dtype": jnp.float32} if "dtype" in inspect.signature(load).parameters else {}
    policy = load(work["model"], config, mesh=mesh, **dtype)
    length = len(work["prompts"][0])
    sampler = tunix_sampler.Sampler(
        policy,
        Ids(),
        tunix_sampler.CacheConfig(
            # With room to spare.
            cache_size=length + work["max_new"] + 64,
            num_layers=shape["layers"],
            num_kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
        ),
    )
    texts = [" ".join(map(str, ids)) for ids in work["prompts"] for _ in range(work["samples"])]

    def call(turn: int):
        out = sampler(
            texts,
            max_generation_steps=work["max_new"],
            max_prompt_length=length,
            eos_tokens=work["ends"],
            temperature=1.0,
            top_p=1.0,
            seed=turn,
            return_logprobs=True,
        )
        lengths = [len(ids) for ids in out.tokens]
        return {"tokens": sum(lengths), "steps": max(lengths)}

    turns.serve(call)


if __name__ == "__main__":
    main(Turns())
