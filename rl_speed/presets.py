"""Settings that several files in configs/ start from."""

from rl_speed.config import Config


def embedded() -> Config:
    """The embedded task on two CPU cores: what every method there shares. Methods differ in rule and objective alone."""
    config = Config()
    config.data.max_prompt_length = 10
    config.sampler.max_new = 16
    config.sampler.slots = 256
    config.sampler.prefill_chunk = 32
    # About one prompt in seven passes screening: so many must be screened to fill a batch of 16 in one call.
    config.driver.screen_prompts = 320
    config.driver.margin = 2.5
    config.driver.buffer_groups = 192
    # A finite set, encoded once: making questions on the fly would cost as much as generating answers to them.
    config.data.train_prompts = 4096
    # A quarter of the batch at a time: activations stay in the processor's cache, and the update takes 0.6 of the time.
    config.training.micro_batch = 96
    config.model.remat = False
    # Rows of 18 tokens where no response rambles, 26 where one does.
    config.training.length_multiple = 9
    config.optimizer.learning_rate = 1e-3
    # RLOO's gradients are a tenth of SPEED's: a bound that spares it its outliers is one that normalises the other's.
    config.optimizer.max_grad_norm = 0.1
    config.optimizer.warmup_steps = 5
    config.training.steps = 120
    config.evaluation.every = 5
    config.evaluation.samples = 4
    return config
