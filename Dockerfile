# An image for NVIDIA GPUs. Untried: it was written where neither Docker nor a GPU was at hand.
#
#   docker build -t rl_speed .
#   docker run --gpus all -v "$PWD/runs:/runs" rl_speed train --config=embedded:speed_rloo --workdir=/runs/a
#
# JAX's wheels bring CUDA and cuDNN along; the host needs the driver (580 or newer for CUDA 13, 525 for CUDA 12) and the NVIDIA
# container toolkit. EXTRA=cuda12 for an older driver, EXTRA=tpu for a Cloud TPU.
FROM python:3.12-slim

ARG EXTRA=cuda13
WORKDIR /rl_speed
COPY . .
RUN pip install --no-cache-dir -e ".[${EXTRA}]"

ENTRYPOINT ["rl-speed"]
CMD ["--help"]
