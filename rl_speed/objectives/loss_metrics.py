"""Metrics of a loss that can be added up over micro-batches."""

import jax
import jax.numpy as jnp


def merge_metrics(first, *others):
    """Combines `policy_loss` metrics of micro-batches: "max/" entries by maximum, others by sum.

    Associative; all-zero metrics are the identity. Raises ValueError if the names differ.
    """
    for other in others:
        if other.keys() != first.keys():
            raise ValueError(
                "Metrics of different losses cannot be merged; they differ in "
                f"{sorted(other.keys() ^ first.keys())}."
            )
        first = {
            name: jnp.maximum(value, other[name])
            if name.startswith("max/")
            else value + other[name]
            for name, value in first.items()
        }
    return first


def reduce_metrics(metrics, axes):
    """Combines metrics like `merge_metrics`, over all devices along mesh axes, inside
    `jax.shard_map`.
    """
    return {
        name: (jax.lax.pmax if name.startswith("max/") else jax.lax.psum)(value, axes)
        for name, value in metrics.items()
    }


def summarise_metrics(metrics):
    """Turns accumulated `policy_loss` metrics into the scalars to log.

    Returns: loss, loss_policy, loss_kl and loss_entropy as accumulated; the counts tokens and
    sequences; `<name>_max`; and every other "sum/" entry as its mean per unmasked token (0 without
    tokens).
    """
    tokens = jnp.maximum(metrics["sum/tokens"], 1.0)
    out = {}
    for key, value in metrics.items():
        kind, name = key.split("/")
        if kind == "loss":
            out["loss" if name == "total" else f"loss_{name}"] = value
        elif kind == "max":
            out[f"{name}_max"] = value
        elif name in ("tokens", "sequences"):
            out[name] = value
        else:
            out[name] = value / tokens
    return out
