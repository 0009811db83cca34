# The tests that need an NVIDIA GPU, for CI. See docker/README.md; build from the repository:
#   docker build -f docker/cuda.Dockerfile -t npu-gptoss:cuda .
#   docker run --rm --gpus all npu-gptoss:cuda
# CUDA's libraries come with torch's wheel, so that the host needs the driver and NVIDIA's container toolkit only.
ARG PYTHON_IMAGE=python
ARG PYTHON_TAG=3.11-slim-bookworm
FROM ${PYTHON_IMAGE}:${PYTHON_TAG}

ARG PIP_INDEX_URL

# Triton compiles its launchers; make runs the tests. Debian's own security updates are wanted, so no versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

RUN groupadd --gid 1000 gptoss \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash gptoss
WORKDIR /opt/npu-gptoss

COPY requirements/cuda-image.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/cuda-image.txt

COPY --chown=gptoss:gptoss . .
USER 1000:1000

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["make", "test-cuda", "PYTHON=python3"]
