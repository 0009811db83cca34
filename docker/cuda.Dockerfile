# The tests on an NVIDIA GPU, for CI, with the versions that serve there. See docker/README.md; build in the repository:
#   docker build -f docker/cuda.Dockerfile -t npu-gptoss:cuda .
#   docker run --rm --gpus all npu-gptoss:cuda
# torch's wheel brings CUDA's libraries, so the host needs only the driver and NVIDIA's container toolkit.
ARG PYTHON_IMAGE=python
ARG PYTHON_TAG=3.11-slim-bookworm
FROM ${PYTHON_IMAGE}:${PYTHON_TAG}

ARG PIP_INDEX_URL

# Triton compiles its launchers; make runs the tests. No versions: Debian's security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

RUN groupadd --gid 1000 gptoss \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash gptoss
WORKDIR /opt/npu-gptoss

COPY requirements/cuda.txt requirements/dev.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes \
        -r requirements/cuda.txt -r requirements/dev.txt

COPY --chown=gptoss:gptoss . .
# vLLM finds the plugin by its entry points
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --editable .
USER 1000:1000

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["make", "test-cuda", "PYTHON=python3"]
