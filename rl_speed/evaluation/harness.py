"""An evaluation from start to end: a policy, benchmarks, settings; responses into a directory, a summary out of it."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from rl_speed.config import EMBEDDED, Config
from rl_speed.data.loaders import Fields
from rl_speed.evaluation.benchmarks import (Benchmark, chain_benchmark, file_benchmark, file_name, longest_prompt,
                                            numbered)
from rl_speed.rollout.evaluate import draw_in_calls, plan_calls
from rl_speed.evaluation.measures import summarise
from rl_speed.evaluation.responses import ResponseFile, identity_of, model_facts
from rl_speed.evaluation.settings import Settings, capacities
from rl_speed.evaluation.source import Source, digest
from rl_speed.evaluation.verdicts import Judge
from rl_speed.mesh import row_shards
from rl_speed.policy import prompt_encoder
from rl_speed.sampling import SamplerConfig
from rl_speed.rollout.generate import GenerationStats, Generator
from rl_speed.training import build
from rl_speed.runtime.progress import progress_bar

PREFILL_CHUNK = 32


class Interrupted(Exception):
    """An evaluation was stopped between two calls; its message says how far it came."""


def make_config(settings: Settings, directory: str) -> Config:
    """What building a policy and its verifier reads of a configuration."""
    config = Config()
    config.model.path, config.model.compute_dtype = directory, settings.compute_dtype
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = settings.data, settings.fsdp, settings.tensor
    config.sampler.max_new = settings.max_new
    config.reward.verifier, config.reward.mode = settings.verifier, settings.mode
    config.reward.workers, config.reward.timeout_s, config.reward.stall_s = settings.workers, settings.timeout_s, settings.stall_s
    return config


def load_benchmarks(files: dict[str, str], settings: Settings, tokenizer: Any, source: Source,
                    on_bad_row: str = "error", question_field: str = "") -> list[Benchmark]:
    """Those of `files`; where there are none, the held-out questions of the run that made the policy, or the chain task.

    `question_field` is as config.data.question_field, in those of `files` that have it; a run's own say it in their configuration.

    Raises ValueError that names what cannot be used.
    """
    form = prompt_encoder(tokenizer, settings.prompt, settings.system)
    encode = lambda question: form(question + settings.instruction)
    bare = lambda text: tokenizer.encode(text, add_special_tokens=False)
    if files:
        fields = Fields(question_field, required=False, flag="--question_field")
        return [file_benchmark(name, path, encode, bare, settings.max_prompt_length, on_bad_row, settings.limit, fields)
                for name, path in files.items()]
    if question_field:
        raise ValueError("--question_field is for the files of --data")
    if source.config is None and source.directory != EMBEDDED:
        raise ValueError("--data is missing: which questions? (A run's own held-out questions are asked with --checkpoint=WORKDIR)")
    data = Config().data if source.config is None else source.config.data
    if data.task == "chain":
        return [chain_benchmark(encode, bare, data.eval_prompts or 512, settings.limit)]
    limit = settings.limit or data.eval_prompts
    if data.eval:
        return [file_benchmark(file_name(data.eval), data.eval, encode, bare, settings.max_prompt_length, data.on_bad_row, limit,
                               build.evaluation_fields(data))]
    if not data.hold_out:
        raise ValueError("--data is missing: the run that made this policy had no held-out questions of its own")
    longest = settings.max_prompt_length or data.max_prompt_length
    _, held_out, _ = build.read_data(dataclasses.replace(data, max_prompt_length=longest), encode)
    return [Benchmark("held_out", numbered("held_out", held_out, limit), data.train)]


def default_prompt(tokenizer: Any) -> str:
    """For a policy that nobody said how to ask: its chat template. Raises ValueError where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("--prompt is missing: this tokenizer has no chat template. Give 'plain', or a format such as "
                         "'Question: {question}\\nAnswer:'")
    return "chat"


def make_generator(policy: build.Policy, mesh: Mesh, settings: Settings, questions: int,
                   prompt_length: int) -> tuple[Generator, int, int]:
    """(the one compiled program of this evaluation, work items in a call, samples of one of them at most)."""
    pieces, piece = capacities(settings, questions)
    sampler = SamplerConfig(slots=max(1, settings.slots // row_shards(mesh)), max_new=settings.max_new,
                            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p,
                            end_tokens=policy.end_tokens, prefill_chunk=PREFILL_CHUNK)
    return Generator(policy.decoder, sampler, mesh, pieces, pieces * piece, piece, prompt_length,
                     build.Keys.of(settings.seed).evaluate), pieces, piece


def run(policy: build.Policy, benchmarks: Sequence[Benchmark], settings: Settings, mesh: Mesh, judge: Judge, folder: Path,
        notes: dict[str, Any] | None = None, overwrite: bool = False, stop: Callable[[], bool] = lambda: False,
        progress: bool = False) -> dict[str, Any]:
    """Draw and judge what `folder` does not hold yet, and summarise all of it (see `measures.summarise`; nothing in it depends on
    the clock, or on where the evaluation was interrupted; what it cost this process is under "now").

    Args:
      judge: of `settings.verifier`. notes: kept in evaluation.json, not compared. stop: asked before each call is dispatched.

    Raises: OtherEvaluation, ValueError as `ResponseFile`; Interrupted once `stop` said so and what was under way is saved.
    """
    prompts, prompt_length = [p for b in benchmarks for p in b.prompts], longest_prompt(benchmarks)
    facts = {**settings.fingerprint(), "platform": jax.default_backend()}
    file = ResponseFile(folder, identity_of(facts, model_facts(policy.model, digest(policy.params), policy.end_tokens), benchmarks,
                                            prompt_length), notes or {}, benchmarks, settings.samples, overwrite)
    generator, pieces, piece = make_generator(policy, mesh, settings, len(prompts), prompt_length)
    calls = plan_calls(prompts, settings.samples, pieces, piece, file.done)
    cost, begin = GenerationStats(), time.perf_counter()
    bar = progress_bar(file.total, "responses", file.done, progress)
    try:
        for rollouts, stats in draw_in_calls(generator, policy.params, calls, stop):
            file.append(rollouts, judge(rollouts))
            cost += stats
            bar.update(len(rollouts))
            bar.set_postfix_str(f"accuracy {file.accuracy:.3f}")
    finally:
        bar.close()
        file.close()
    if file.done < file.total:
        raise Interrupted(f"stopped after {file.done} of {file.total} responses, saved in {folder}: the same command goes on from "
                          "there")
    meta = {b.name: [p.meta for p in b.prompts] for b in benchmarks}
    summary = summarise(file.outcomes(), meta, settings.k)
    for b in benchmarks:
        summary["benchmarks"][b.name] |= {"file": b.path, "left_out": {"too_long": b.too_long, "bad_rows": b.bad}}
    return {**summary, "now": {**dataclasses.asdict(cost), "seconds": time.perf_counter() - begin}}


def describe_source(source: Source, step: int | None) -> str:
    """For people."""
    if source.directory == EMBEDDED and source.checkpoints is None:
        return "the embedded policy"
    return source.directory if source.checkpoints is None else f"{source.checkpoints.parent}, step {step}"
