# gpt-oss on Ascend 910B: vLLM and vllm-ascend 0.11.0 on CANN 8.3, or 0.23.0 on CANN 9.1. See docker/README.md; build
# in the repository. The classic builder, without BuildKit, pulls the base images of both stacks.
#   DOCKER_BUILDKIT=1 docker build -f docker/910b.Dockerfile -t npu-gptoss:910b .
#   DOCKER_BUILDKIT=1 docker build -f docker/910b.Dockerfile -t npu-gptoss:910b --build-arg STACK=9.1 .
# 8.3.rc1-910b-ubuntu22.04-py3.11 works too; alpha builds of 8.3 fail on attention sinks, betas of 9.1 compute wrongly.
ARG STACK=8.3
ARG CANN_IMAGE=quay.io/ascend/cann
ARG CANN_8_3=8.3.rc2-910b-ubuntu22.04-py3.11
ARG CANN_9_1=9.1.0-910b-ubuntu22.04-py3.11

FROM ${CANN_IMAGE}:${CANN_8_3} AS cann-8.3

FROM ${CANN_IMAGE}:${CANN_9_1} AS cann-9.1
# Triton-Ascend compiles its launchers while the server runs. No versions: Ubuntu's security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM cann-${STACK}
ARG STACK

# pip reads PIP_INDEX_URL during the build only
ARG PIP_INDEX_URL
# has torch without CUDA for x86_64; the package index has it for aarch64 only. Empty: the package index alone
ARG PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
# 1: uv trusts the certificates of the base image
ARG UV_SYSTEM_CERTS

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/npu-gptoss

# The list is complete, so pip resolves nothing, and checks each file's hash.
COPY requirements/910b-8.3.txt requirements/910b-9.1.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes \
        ${PYTORCH_INDEX:+--extra-index-url "${PYTORCH_INDEX}"} -r "requirements/910b-${STACK}.txt"

# vLLM of vllm-ascend's number, compiled here and not at each start of a container. Without the variable torch would load
# torch-npu, which needs the host's driver.
COPY requirements/uv.txt requirements/vllm-0.11.0.txt requirements/vllm-0.23.0.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/uv.txt \
    && release="$(sed -n 's/^vllm-ascend==\([0-9.]*\).*/\1/p' "requirements/910b-${STACK}.txt")" \
    && VLLM_TARGET_DEVICE=empty TORCH_DEVICE_BACKEND_AUTOLOAD=0 python3 -m uv pip install \
        --python "$(command -v python3)" --no-cache --no-deps --no-build-isolation --require-hashes --compile-bytecode \
        ${PIP_INDEX_URL:+--default-index "${PIP_INDEX_URL}"} -r "requirements/vllm-${release}.txt"

COPY pyproject.toml README.md LICENSE ./
COPY npu_gptoss npu_gptoss
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -rf build npu_gptoss ./*.egg-info

COPY scripts/serve.sh scripts/lib.sh scripts/serve_here.py scripts/
COPY docker/entrypoint.sh docker/healthcheck.py docker/preflight.py docker/vocabulary.py docker/
RUN TORCH_DEVICE_BACKEND_AUTOLOAD=0 python3 docker/vocabulary.py vocabulary

# The driver gives its devices to HwHiAiUser (1000:1000, mode 0660), and HCCL looks the user up in /etc/passwd.
RUN { getent group 1000 > /dev/null || groupadd --gid 1000 HwHiAiUser; } \
    && { getent passwd 1000 > /dev/null \
        || useradd --uid 1000 --gid 1000 --create-home --home-dir /home/HwHiAiUser --shell /bin/bash HwHiAiUser; } \
    && install --directory --owner 1000 --group 1000 /home/HwHiAiUser
USER 1000:1000

# hadolint ignore=DL3064
ENV PORT=8000 \
    TIKTOKEN_ENCODINGS_BASE=/opt/npu-gptoss/vocabulary \
    VLLM_NO_USAGE_STATS=1 \
    VLLM_WORKER_MULTIPROC_METHOD=spawn
WORKDIR /home/HwHiAiUser
EXPOSE 8000

# 120b takes many minutes to load from a slow disk
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=4 \
    CMD ["python3", "/opt/npu-gptoss/docker/healthcheck.py"]
ENTRYPOINT ["/opt/npu-gptoss/docker/entrypoint.sh"]
CMD ["serve", "--model", "/model"]
