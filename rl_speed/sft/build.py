"""From settings to a supervised run: policy, examples, shape of the batches, optimizer, evaluation. Nothing here has a loop."""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rl_speed.config import Reward
from rl_speed.data import DEFAULT_SPEC, chain
from rl_speed.data.embedded_tokenizer import END_ID, VOCABULARY, save_tokenizer
from rl_speed.data.prompts import Prompt
from rl_speed.data.schemas import Fields
from rl_speed.rollout.evaluate import evaluate
from rl_speed.mesh import make_mesh, row_shards
from rl_speed.policy import (ModelConfig, abstract_params, decoder, encode_prompt, end_token_ids, init, load_hf, load_tokenizer,
                             num_params, param_shardings, save_hf)
from rl_speed.policy.hf import read_json, require_replaceable
from rl_speed.rewards import MathVerifier
from rl_speed.rewards.scorer import TextScorer
from rl_speed.sampling import SamplerConfig
from rl_speed.rollout.generate import Generator
from rl_speed.training.build import check_vocabulary, limits
from rl_speed.update.optimizer import OptimizerConfig, make_optimizer
from rl_speed.runtime.out_of_memory import abstract_state, device_bytes, explain, update_parts
from rl_speed.runtime.plotting import plot_sft
from rl_speed.sft.train import SFTConfig, SFTData, SFTTrainer
from rl_speed.sft.data import Example, Layout, Schedule, hold_out, keep_short, make_layout, read_examples

log = logging.getLogger(__name__)

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # The cold start of Bae et al. (arXiv 2504.03380) on 1.1k distilled solutions.
    "band": {"learning_rate": 5e-6, "epochs": 5, "warmup_steps": 25, "batch": 21,
             # Ours: the paper names neither schedule, clipping, decay nor length.
             "schedule": "cosine", "max_grad_norm": 1.0, "weight_decay": 0.01, "max_length": 8192},
}

# Settings that change neither what is computed, up to rounding, nor its order: a run may be gone on with under others.
FREE = ("out", "workdir", "eval_every", "eval_samples", "eval_temperature", "checkpoint_every", "tensorboard", "micro_rows",
        "remat", "head_chunk", "mesh_data", "mesh_fsdp", "mesh_tensor")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags of experiments/sft.py, which say what each means. None: a default that depends on others."""

    out: str
    workdir: str = ""
    model: str = ""
    data: str = ""
    prompt: str | None = None
    on_bad_row: str = "error"
    question_field: str = ""
    eval_question_field: str = ""
    max_length: int = 1024
    pack: bool = True
    eval_data: str = ""
    eval_share: float = 0.05
    eval_every: int = 250
    eval_samples: int = 0
    eval_temperature: float = 0.0
    steps: int | None = None
    epochs: int | None = None
    batch: int = 128
    learning_rate: float | None = None
    warmup_steps: int | None = None
    schedule: str = "cosine"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0
    checkpoint_every: int = 200
    tensorboard: bool = True
    dtype: str = "float32"
    remat: bool = False
    micro_rows: int = 0
    head_chunk: int = 0
    mesh_data: int = 1
    mesh_fsdp: int = 1
    mesh_tensor: int = 1

    def __post_init__(self):
        out, workdir = Path(self.out).resolve(), Path(self.workdir_path).resolve()
        for wrong, message in (
            (bool(self.model) != bool(self.data), "give --model and --data together, or neither for the embedded policy"),
            (self.steps is not None and self.epochs is not None, "give --steps or --epochs, not both"),
            (self.epochs is not None and not self.data, "--epochs needs --data: the embedded task has examples without end"),
            (not self.data and (self.eval_data or self.eval_samples), "--eval_data and --eval_samples need --data"),
            (not self.data and self.question_field, "--question_field needs --data"),
            (not self.eval_data and self.eval_question_field, "--eval_question_field needs --eval_data"),
            (not 0 <= self.eval_share < 1, f"--eval_share must be in [0, 1), got {self.eval_share}"),
            (bool(self.workdir_path) and (workdir == out or out in workdir.parents),
             f"--workdir={self.workdir} must not be --out or in it, which is replaced as a whole at the end"),
        ):
            if wrong:
                raise ValueError(message)

    @property
    def workdir_path(self) -> str:
        """Where the run is written: `workdir`, or beside `out` for data of one's own; "" is nowhere."""
        return self.workdir or (f"{str(self.out).rstrip('/')}.run" if self.data else "")

    def optimizer(self, steps: int) -> OptimizerConfig:
        """Of a run of so many updates."""
        rate = self.learning_rate if self.learning_rate is not None else (1e-5 if self.model else 3e-3)
        warmup = self.warmup_steps if self.warmup_steps is not None else min(100, steps // 10)
        if warmup >= steps and self.schedule != "constant":
            raise ValueError(f"--warmup_steps={warmup} leaves none of {steps} updates for --schedule={self.schedule}")
        return OptimizerConfig(learning_rate=rate, warmup_steps=warmup, schedule=self.schedule, total_steps=steps,
                               weight_decay=self.weight_decay, b2=0.98, max_grad_norm=self.max_grad_norm)


@dataclasses.dataclass
class Run:
    """A run ready to start. `counts`: what the data came to. `close` ends the verifier's processes."""

    settings: Settings
    layout: Layout
    trainer: SFTTrainer
    model: ModelConfig
    tokenizer: Any
    counts: dict[str, Any]
    files: dict[str, Any]
    close: Callable[[], None] = lambda: None

    def save(self, command: str) -> dict[str, Any]:
        """Write the Hugging Face directory `settings.out`, with made_by.json, which is returned; and the plot of the workdir."""
        last = self.trainer.last
        made = {"command": command, "parameters": num_params(self.model), "loss": last["loss"], "eval_loss": last.get("eval/loss"),
                **({"eval_accuracy": last["eval/accuracy"]} if "eval/accuracy" in last else {}),
                **({"steps": self.trainer.step, **self.counts} if self.settings.data else {}), "jax": jax.__version__}
        save_hf(self.settings.out, self.trainer.params, self.model, self.tokenizer, extra={**self.files, "made_by.json": made})
        if self.trainer.workdir is not None:
            plot_sft(self.trainer.workdir)
        return made


def build(settings: Settings, progress: bool = True) -> Run:
    """Everything up to the first update.

    Raises: ValueError (DataError among them), OSError, CheckpointError: of one line, about a flag or a file and line.
    """
    require_replaceable(settings.out)
    mesh = make_mesh(settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor)
    return (build_from_files if settings.data else build_embedded)(settings, mesh, progress)


def explain_out_of_memory(settings: Settings, error: Exception, layout: Layout | None = None) -> str:
    """What to say when a device ran out of memory: what the run holds there by part, and which flags to turn down. `layout`: its
    rows, where it got as far as to know them."""
    mesh = make_mesh(settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor)
    model = embedded_model(settings)
    if settings.model:
        model = ModelConfig.from_hf(read_json(Path(settings.model) / "config.json"), dtype=settings.dtype, remat=settings.remat)
    params = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract_params(model),
                          param_shardings(model, mesh))
    # Of the schedule the size of its state does not depend.
    optimizer = make_optimizer(OptimizerConfig(max_grad_norm=settings.max_grad_norm, weight_decay=settings.weight_decay), params)
    rows = "" if layout is None else f", now {layout.rows // layout.pieces} of {layout.length} tokens"
    advice = (f"--micro_rows ({settings.micro_rows}{rows}), --max_length ({settings.max_length}), --head_chunk "
              f"({settings.head_chunk}), or give --remat (now {settings.remat}), --dtype=bfloat16 (now {settings.dtype}), or raise "
              f"--mesh_fsdp ({settings.mesh_fsdp})")
    parts = [("the update", update_parts(abstract_state(model, params, optimizer, mesh)), advice)]
    if settings.eval_samples:
        parts.append(("sampling answers", {"weights (sharded, float32)": device_bytes(params)},
                      f"--max_length ({settings.max_length}) or --eval_samples ({settings.eval_samples}; 0 samples none)"))
    last = ("what was saved is whole: the same command with other values of these goes on from there, but for --max_length and "
            "--dtype, which make it another run")
    return explain(error, parts, last if settings.workdir_path else "")


def _assemble(settings: Settings, mesh: Mesh, params: Any, model: ModelConfig, tokenizer: Any, data: SFTData, steps: int,
              layout: Layout, counts: dict[str, Any], progress: bool, files: dict[str, Any] | None = None,
              close: Callable[[], None] = lambda: None) -> Run:
    config = SFTConfig(steps, layout.pieces, settings.eval_every, settings.checkpoint_every, settings.head_chunk, progress,
                       settings.tensorboard)
    belongs = {**dataclasses.asdict(settings), **counts}
    fixed = [name for name in belongs if name not in FREE]
    trainer = SFTTrainer(params, model, settings.optimizer(steps), data, config, mesh, settings.workdir_path or None, belongs,
                         fixed)
    return Run(settings, layout, trainer, model, tokenizer, counts, files or {}, close)


# Demonstrations of the embedded task.


def embedded_model(settings: Settings) -> ModelConfig:
    """The shape of a new embedded policy."""
    return ModelConfig(vocab_size=len(VOCABULARY), width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=192,
                       max_position=64, dtype=settings.dtype, remat=settings.remat)


def build_embedded(settings: Settings, mesh: Mesh, progress: bool) -> Run:
    """A new policy on demonstrations of the embedded task: never the same one twice, on rows of one example."""
    model = embedded_model(settings)
    with tempfile.TemporaryDirectory() as directory:
        # Through the files, so that training encodes exactly as every later user of the directory does.
        save_tokenizer(directory)
        (Path(directory) / "config.json").write_text(json.dumps(model.to_hf()))
        tokenizer = load_tokenizer(directory)
    spec, steps = DEFAULT_SPEC, settings.steps or 2600
    length, template = spec.max_prompt_tokens + spec.max_response_tokens, settings.prompt or "{question}="

    def shown(split: str, first: int, count: int) -> list[Example]:
        demonstrations = (chain.demonstration(spec, settings.seed, i, split) for i in range(first, first + count))
        return [Example(np.asarray(encode_prompt(tokenizer, question, template), np.int32),
                        np.asarray(tokenizer.encode(written) + [END_ID] * ends, np.int32))
                for question, written, ends in demonstrations]

    layout = make_layout([length], lambda: iter([np.zeros(settings.batch, np.int64)]), length, False, settings.micro_rows,
                         row_shards(mesh))
    held = Layout(length, -(-512 // row_shards(mesh)) * row_shards(mesh), 1, False)
    data = SFTData(lambda step: (layout.batch(shown("demo", step * settings.batch, settings.batch)), {}),
                   [held.batch(shown("demo_eval", 0, 512))])
    params = init(model, jax.random.key(settings.seed))
    return _assemble(settings, mesh, params, model, tokenizer, data, steps, layout, {}, progress)


# Files.


def build_from_files(settings: Settings, mesh: Mesh, progress: bool) -> Run:
    """A policy from a Hugging Face directory on the rows of a file."""
    tokenizer = load_tokenizer(settings.model)
    # What the tokenizer calls its end closes a solution; a generation config may list others, which stop the sampler, too.
    ends = end_token_ids(settings.model, tokenizer)
    own = tokenizer.eos_token_id
    ends = tuple(dict.fromkeys(([] if own is None else [own]) + list(ends)))
    examples, held, counts = read_data(settings, tokenizer, ends)
    # Data first: weights take minutes to read where a row can be wrong in the first second.
    params, model = load_hf(settings.model, mesh=mesh, dtype=settings.dtype, remat=settings.remat)
    check_vocabulary(tokenizer, model, settings.model)
    if (longest := max(map(len, examples + held))) > model.max_position:
        raise ValueError(f"an example has {longest} tokens, and {settings.model} was made for {model.max_position} positions; "
                         "lower --max_length")
    epochs = settings.epochs or (0 if settings.steps else 3)
    schedule = Schedule(len(examples), settings.batch, settings.seed, epochs)
    steps = settings.steps or schedule.steps
    layout = make_layout([len(e) for e in examples], lambda: schedule.all_indices(steps), settings.max_length, settings.pack,
                         settings.micro_rows, row_shards(mesh))
    # Held-out examples may be longer than any row that training needs; a multiple of 8 as there.
    longest = max((-(-len(e) // 8) * 8 for e in held), default=0)
    held_layout = dataclasses.replace(layout, length=max(layout.length, min(longest, settings.max_length)))
    log.warning("%s: %s", settings.data, describe(counts, steps, settings.batch, layout))

    def batch(step: int):
        part = [examples[i] for i in schedule.indices(step)]
        made = layout.batch(part)
        return made, {"examples": float(len(part)), "epoch": min((step + 1) * settings.batch / len(examples), epochs or math.inf),
                      **layout.use(made)}

    answers, close = None, lambda: None
    if settings.eval_samples:
        if not held:
            raise ValueError("--eval_samples needs held-out rows: --eval_data, or --eval_share above 0 and two questions at least")
        answers, close = build_answers(settings, mesh, model, tokenizer, ends, held)
    files = {"generation_config.json": {"eos_token_id": list(ends), "pad_token_id": tokenizer.pad_token_id}}
    data = SFTData(batch, held_layout.batches(held), answers)
    return _assemble(settings, mesh, params, model, tokenizer, data, steps, layout, counts, progress, files, close)


def read_data(settings: Settings, tokenizer: Any, ends: Sequence[int]) -> tuple[list[Example], list[Example], dict[str, Any]]:
    """(training examples, held-out examples, what became of the rows and a hash of what is trained on)."""
    read = functools.partial(read_examples, tokenizer=tokenizer, template=settings.prompt or "chat", ends=ends,
                             on_bad_row=settings.on_bad_row)
    examples, skipped = read(settings.data, fields=Fields(settings.question_field, flag="--question_field"))
    examples, dropped = keep_short(examples, settings.max_length)
    counts = {"skipped_rows": skipped, "dropped_long": dropped}
    if settings.eval_data:
        held, counts["eval_skipped_rows"] = read(settings.eval_data, fields=Fields(
            settings.eval_question_field or settings.question_field, required=False, flag="--eval_question_field"))
        held, counts["eval_dropped_long"] = keep_short(held, settings.max_length)
        if shared := {e.question for e in held} & {e.question for e in examples}:
            log.warning("%d questions of %s are trained on, too", len(shared), settings.eval_data)
    else:
        examples, held = hold_out(examples, settings.eval_share)
    digest = hashlib.sha256()
    for example in examples:
        digest.update(f"{len(example.prompt)},{len(example.response)}:".encode())
        digest.update(np.concatenate([example.prompt, example.response]).tobytes())
    return examples, held, {"examples": len(examples), "held_out": len(held), **counts, "examples_sha256": digest.hexdigest()}


def describe(counts: Mapping[str, Any], steps: int, batch: int, layout: Layout) -> str:
    """One line: what is trained on, and in what shape."""
    kinds = {"held_out": "held out", "dropped_long": "longer than --max_length dropped", "skipped_rows": "bad rows skipped"}
    left = ", ".join(f"{counts[name]} {what}" for name, what in kinds.items() if counts[name])
    pieces = f", {layout.rows // layout.pieces} at a time" if layout.pieces > 1 else ""
    return (f"{counts['examples']} examples" + f" ({left})" * bool(left) + f"; {steps} updates of {batch} in {layout.rows} rows of "
            f"{layout.length} tokens{pieces}")


def build_answers(settings: Settings, mesh: Mesh, model: ModelConfig, tokenizer: Any, ends: tuple[int, ...],
                  held: Sequence[Example]) -> tuple[Callable[..., dict[str, float] | None], Callable[[], None]]:
    """((parameters, stop) -> accuracy, length, ... of `eval_samples` answers to each held-out question that has a gold answer,
    judged by math-verify; what ends its processes). A response has the room that the longest prompt leaves of `max_length`."""
    questions = {e.question: e for e in held if e.answer}.values()
    if not questions:
        raise ValueError("--eval_samples needs held-out rows with an answer to compare with: no row of --data has one")
    prompts = [Prompt(id=e.id, tokens=e.prompt, answer=e.answer, answer_tokens=np.zeros((0,), np.int32), text=e.question)
               for e in questions]
    longest, samples = max(len(p.tokens) for p in prompts), settings.eval_samples
    per_call = min(len(prompts), max(1, 256 // samples))
    slots = -(-min(per_call * samples, 128) // row_shards(mesh))
    sampler = SamplerConfig(slots=slots, max_new=settings.max_length - longest, temperature=settings.eval_temperature,
                            end_tokens=ends)
    generator = Generator(decoder(model, fuse=mesh.shape["tensor"] == 1), sampler, mesh, per_call, per_call * samples, samples,
                          longest, jax.random.key(settings.seed))
    verifier = MathVerifier(Reward.workers, mode="free", **limits(Reward()))
    judge = TextScorer(tokenizer, ends, verifier)

    def answers(params: Any, stop: Callable[[], bool]) -> dict[str, float] | None:
        result = evaluate(generator, params, prompts, samples, judge, per_call, stop=stop)
        return None if result is None else result.metrics()

    return answers, verifier.close
