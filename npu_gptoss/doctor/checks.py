"""Every check of the doctor: what it looks at and what to do when it is not well. docs/doctor.md shows this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """remedy: the usual one; a finding has the one that fits it."""

    name: str
    group: str
    looks_at: str
    remedy: str


CHECKS: tuple[Check, ...] = (
    Check(
        "machine",
        "Versions",
        "what this machine is to serve on: Ascend (`/dev/davinci*`, vllm-ascend or torch-npu), CUDA or CPU",
        "`NPU_GPTOSS_PLATFORM` names another",
    ),
    Check("python", "Versions", "the Python release", "an environment with the Python that it names"),
    Check("torch", "Versions", "the torch release; torch-npu loads with exactly one", "`pip install` what it names"),
    Check(
        "torch-works",
        "Versions",
        "whether torch imports, which loads torch-npu and CANN's libraries too",
        "`source` CANN's and NNAL's `set_env.sh` in the shell that starts the server",
    ),
    Check("torch-npu", "Versions", "the torch-npu release", "`pip install` what it names"),
    Check(
        "vllm",
        "Versions",
        "the vLLM release, and that it is the build without a device",
        "`python scripts/setup/install_vllm.py --no-deps`; elsewhere this package steps aside",
    ),
    Check("vllm-ascend", "Versions", "the vllm-ascend release", "`pip install` what it names"),
    Check(
        "cann",
        "CANN and driver",
        "the CANN toolkit by its version files. Before 8.3.RC1, and in alpha builds of it such as 8.3.RC1.alpha003, "
        "the attention operator fails on sinks",
        "the release that it names, or its container image; `source …/set_env.sh`",
    ),
    Check(
        "nnal",
        "CANN and driver",
        "NNAL, whose libatb.so writes the KV cache; it must be of CANN's version",
        "install it and `source` its `set_env.sh` after CANN's",
    ),
    Check(
        "driver",
        "CANN and driver",
        "the driver's version file; an old driver refuses to capture graphs",
        "Ascend HDK of the release that it names, or `--enforce-eager`",
    ),
    Check(
        "device-files",
        "CANN and driver",
        "whether this user may open `/dev/davinci<n>`, `davinci_manager`, `devmm_svm` and `hisi_hdc`, and whether "
        "`ASCEND_RT_VISIBLE_DEVICES` names cards that are there",
        "`--device` flags of the container; the group HwHiAiUser",
    ),
    Check(
        "plugin",
        "Plugin",
        "whether vLLM finds this package's entry point, and `VLLM_PLUGINS` lets it in",
        "install npu-gptoss where vLLM is; unset `VLLM_PLUGINS`",
    ),
    Check(
        "plugin-order",
        "Plugin",
        "which plugins vLLM loads in which order; one that comes later may replace the model",
        "leave it out with `VLLM_PLUGINS`",
    ),
    Check(
        "platform-plugin",
        "Plugin",
        "that vLLM gets one platform: `ascend`, or this package's for CPUs, and no second",
        "uninstall the other, or name one in `VLLM_PLUGINS`",
    ),
    Check(
        "registration",
        "Plugin",
        "what vLLM ends up with once it has loaded all plugins, in a process of its own: platform and model class",
        "what plugin-order and platform-plugin say",
    ),
    Check(
        "variables",
        "Servers",
        "variables whose names begin with `NPU_GPTOSS_` and that nothing reads",
        "the spelling of [configuration.md](configuration.md)",
    ),
    Check(
        "exposure",
        "Servers",
        "who reaches the servers that run here, and whether a key keeps the others out; it tells no key",
        "[exposing-the-server.md](exposing-the-server.md)",
    ),
    Check(
        "device",
        "Device and kernels",
        "the device that torch opens, its name, number and memory; the CPU's on a CPU machine",
        "what driver, device-files and cann say",
    ),
    Check(
        "attention-operator",
        "Device and kernels",
        "whether torch-npu's `npu_fused_infer_attention_score_v2` takes `learnable_sink`",
        "the torch-npu that it names",
    ),
    Check(
        "kernels",
        "Device and kernels",
        "the kernel that each operation selects for a gpt-oss call, with the reasons against each other one",
        "what the reasons say; `npu-gptoss kernels explain`",
    ),
    Check(
        "vocabulary",
        "Model",
        "whether openai-harmony loads its vocabulary without the network",
        "`npu-gptoss vocabulary MODEL_DIR`",
    ),
    Check(
        "checkpoint",
        "Model",
        "with `--model`: every shard that the index names is there in its size, every tensor with its shape; MXFP4 or "
        "BF16; the tokenizer",
        "download again what it names",
    ),
    Check(
        "memory",
        "Model",
        "with `--model`: weights in BF16 (MXFP4 is expanded at load, except by the offline engine on CUDA) and "
        "`--max-model-len` tokens of KV cache against the device; always: the published models in words",
        "more cards, a shorter context, the `--gpu-memory-utilization` that it names",
    ),
    Check(
        "graphs",
        "Model",
        "the streams that captured graphs take against those of the device",
        "`cudagraph_capture_sizes` that you use; `HCCL_OP_EXPANSION_MODE=AIV`, not with data parallelism",
    ),
    Check(
        "self-test-sink",
        "Self-test",
        "attention with another sink in every head, against the definition",
        "the release that cann names; `NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops`",
    ),
    Check(
        "self-test-window",
        "Self-test",
        "that a query sees the key 127 positions back and not the one 128 back; that a full layer sees all",
        "the same",
    ),
    Check(
        "self-test-attention",
        "Self-test",
        "calls that known defects of CANN's attention get wrong: decodes over tiles of keys, windows at their borders, "
        "chunks beside decodes, many equal lengths, rows behind the last request; each repeated, bit for bit",
        "another release of CANN; the server goes round heads that are merged wrongly",
    ),
    Check(
        "self-test-bias",
        "Self-test",
        "routing and experts with large biases, against the definition",
        "`NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops`, with `--enforce-eager` on Ascend",
    ),
    Check(
        "self-test-activation",
        "Self-test",
        "gpt-oss's SwiGLU: gate and up interleaved, both clamped, 1.702 in the sigmoid, one added to up",
        "the same",
    ),
    Check(
        "self-test-moe",
        "Self-test",
        "routing and experts at the edges of their kernels: empty groups, all rows to one expert, sizes of tiles and "
        "of the sort, counts that change on a rank with a part of the experts, a rank without a token",
        "`NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops`, with `--enforce-eager` on Ascend; another release of CANN",
    ),
    Check(
        "self-test-dense",
        "Self-test",
        "projections from 1 to 257 rows, one of them with an Inf; norms, and apart from them those of tiny checkpoints",
        "another release of CANN",
    ),
    Check(
        "self-test-nz",
        "Self-test",
        "experts and a projection with weights in FRACTAL_NZ, in a process of its own",
        "`NPU_GPTOSS_EXPERT_FORMAT=nd`",
    ),
    Check(
        "self-test-graph",
        "Self-test",
        "routing and experts captured once and replayed 50 times; attention captured short and updated to long "
        "contexts and back. In a process of its own, which may hang",
        "`--enforce-eager`; for attention nothing: servers capture PIECEWISE then",
    ),
    Check(
        "self-test-record",
        "Self-test",
        "for which CANN, driver and torch-npu the self-tests were made on this machine: what one release computes "
        "rightly proves nothing of the next",
        "`npu-gptoss doctor` on the machine with the card",
    ),
    Check(
        "bandwidth",
        "Self-test",
        "how fast the device copies its memory, and the share of its nominal bandwidth",
        "end what else uses the device",
    ),
)


def groups() -> list[tuple[str, list[str]]]:
    """(title, names of the checks) in the order of the report."""
    titles = list(dict.fromkeys(check.group for check in CHECKS))
    return [(title, [check.name for check in CHECKS if check.group == title]) for title in titles]
