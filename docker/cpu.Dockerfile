# The server of `make serve` on a CPU. See docker/README.md; build in the repository:
#   docker build -f docker/cpu.Dockerfile -t npu-gptoss:cpu .
ARG PYTHON_IMAGE=python
ARG PYTHON_TAG=3.11-slim-bookworm
FROM ${PYTHON_IMAGE}:${PYTHON_TAG}

ARG PIP_INDEX_URL
ARG PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
# 1: uv trusts the certificates of the base image
ARG UV_SYSTEM_CERTS

WORKDIR /opt/npu-gptoss

COPY requirements/cpu.txt requirements/torch-cpu.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes \
        ${PYTORCH_INDEX:+--extra-index-url "${PYTORCH_INDEX}"} \
        -r requirements/cpu.txt -r requirements/torch-cpu.txt

COPY requirements/uv.txt requirements/vllm-0.11.0.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/uv.txt \
    && VLLM_TARGET_DEVICE=empty python3 -m uv pip install --python "$(command -v python3)" --no-cache --no-deps \
        --no-build-isolation --require-hashes --compile-bytecode ${PIP_INDEX_URL:+--default-index "${PIP_INDEX_URL}"} \
        -r requirements/vllm-0.11.0.txt

COPY pyproject.toml README.md LICENSE ./
COPY npu_gptoss npu_gptoss
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -rf build npu_gptoss ./*.egg-info

COPY scripts/serve_here.py scripts/
COPY docker/entrypoint.sh docker/healthcheck.py docker/vocabulary.py docker/
# .checkpoints: the server writes the trained tiny checkpoint there
RUN python3 docker/vocabulary.py vocabulary \
    && groupadd --gid 1000 gptoss \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash gptoss \
    && mkdir .checkpoints \
    && chown gptoss:gptoss .checkpoints
USER 1000:1000

# hadolint ignore=DL3064
ENV PORT=8000 \
    TIKTOKEN_ENCODINGS_BASE=/opt/npu-gptoss/vocabulary \
    NPU_GPTOSS_PLATFORM=cpu
EXPOSE 8000

HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=4 \
    CMD ["python3", "/opt/npu-gptoss/docker/healthcheck.py"]
ENTRYPOINT ["/opt/npu-gptoss/docker/entrypoint.sh"]
CMD ["serve"]
