"""Lines of flags from public recipes of gpt-oss, each with its verdict on each stack.

Sources: vLLM's recipes (GPT-OSS.md and its YAML), vllm-ascend's gpt-oss tutorial, OpenAI's cookbook and model card,
unsloth's and axolotl's guides, AMD's and Intel's recipes, modal, kserve, runpod, and issues of vLLM about gpt-oss.

Verdicts, one letter a stack, in the order of STACKS: S starts an engine (one that lacks a package then says so), A
starts one with vLLM's own model, R refused by our limits or our check, V refused by vLLM, U the parser's usage (no such
flag in that release).
"""

from __future__ import annotations

import json
import shlex

STACKS = ("cpu", "8.3", "9.1", "cuda")

# of amd's checkpoints; vLLM's model reads them
QUARK = {
    "quant_method": "quark",
    "export": {"pack_method": "reorder", "kv_cache_group": []},
    "global_quant_config": {"weight": None},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": [],
}

_LINES = """
SSSS | --tensor-parallel-size 1
SSSS | --tensor-parallel-size 2
SSSS | --tensor-parallel-size 2 --enable-expert-parallel
SSSS | -tp 2
UUSS | --tensor-parallel-size=2 -ep
VVVR | --tensor-parallel-size=3
VVVV | --tensor-parallel-size 0
VVVV | --max-num-seqs -1
VVSS | --max-num-batched-tokens 64
SSSS | --max_model_len 8k
VVVV | --gpu-memory-utilization 90
VVVV | --config /nowhere.yaml
VVVV | --config pyproject.toml
UUUU | --config docker/compose.yaml
VVSS | VLLM_USE_V1=0
SSSS | --tensor-parallel-size 4
SSSS | --tensor-parallel-size 4 --max-model-len 32768 --enforce-eager
SSSA | --pipeline-parallel-size 2
SSSS | --data-parallel-size 2
SSSA | --data-parallel-size 2 --enable-expert-parallel --gpu-memory-utilization 0.4
VVVV | --decode-context-parallel-size 2
SSSS | --async-scheduling
SSSS | --async-scheduling --enforce-eager
SSSS | --no-async-scheduling
SSSS | --max-num-batched-tokens 10240 --max-num-seqs 128 --no-enable-prefix-caching
SSSS | --max-num-batched-tokens 8192 --max-num-seqs 512 --max-model-len 10240 --gpu-memory-utilization 0.95
SSSS | --enable-chunked-prefill --max-num-seqs 32 --max-model-len 8192 --gpu-memory-utilization 0.75
UUSS | --max-model-len auto --max-num-seqs 1 --max-num-batched-tokens 2048
VVSS | --max-model-len -1
SSSS | --max-model-len 131072
VVVV | --max-model-len 262144
VVVU | --max-num-partial-prefills 2
SSSS | --long-prefill-token-threshold 512
SSSS | --enable-auto-tool-choice --tool-call-parser openai
SSSS | --enable-auto-tool-choice --tool-call-parser openai --reasoning-parser openai_gptoss
UUVV | --reasoning-parser GptOss
SSSS | --tool-server demo
SSSS | --chat-template template.jinja
SSSS | --generation-config vllm --seed 42
SSSS | --override-generation-config '{"temperature": 1.0}'
SSSS | --hf-overrides '{"rope_scaling": {"factor": 4, "original_max_position_embeddings": 32768, "rope_type": "yarn"}}'
RRRR | --hf-overrides '{"quantization_config": {}}'
SSSS | --hf-overrides '{"num_experts_per_tok": 2}'
SSSS | --hf-overrides.num_experts_per_tok 2
RRRR | --hf-overrides '{"rope_scaling": null}'
RRRR | --hf-overrides '{"is_causal": false}'
RRRR | --hf-overrides '{"torch_dtype": "float16"}'
RRRR | --hf-overrides '{"quantization_config": null}'
VVVV | --hf-overrides nonsense
VVVV | --additional-config x
RRRA | --hf-overrides QUARK
SSSS | --dtype auto
SSSS | --dtype bfloat16
SRRV | --dtype float32
RRRR | --dtype half
RRRR | --dtype float16 --quantization mxfp4
SSSS | --quantization mxfp4
VRVS | --quantization fp8
VRVS | --quantization awq
VRVS | --quantization modelopt
VRVS | --quantization quark
VRVA | --quantization bitsandbytes --load-format bitsandbytes
VRVS | --quantization gguf
VRVS | --quantization ascend
RRRS | --kv-cache-dtype fp8
VSSS | --kv-cache-dtype bfloat16
RRRU | --kv-cache-dtype fp8_e4m3 --calculate-kv-scales
SSSS | --block-size 16
VSSS | --block-size 64
VSSS | --block-size 128
VVRR | --disable-sliding-window
SSUU | --swap-space 1
SSSA | --cpu-offload-gb 4
SSSS | --kv-cache-memory-bytes 17179869184
SSUU | --cuda-graph-sizes 1 2 4 8
SSUU | --cuda-graph-sizes 2048
UUSS | --max-cudagraph-capture-size 2048
SSSS | --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}'
SSSS | --compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'
SSUU | --compilation-config '{"pass_config": {"enable_fi_allreduce_fusion": true, "enable_noop": true}}'
SSSS | -O3
UUSS | --stream-interval 20
UUSS | --attention-backend TRITON_ATTN
UUSS | --attention-backend FLASH_ATTN
VVSS | VLLM_ATTENTION_BACKEND=TRITON_ATTN_VLLM_V1 --enforce-eager
SSSS | VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1 --tensor-parallel-size 1
VSSS | VLLM_ROCM_USE_AITER=1 --block-size 64
UUSS | --moe-backend marlin
RRRS | --enable-lora
RRRS | --enable-lora --max-lora-rank 64 --max-loras 4
RRRS | --enable-lora --lora-modules sql=/adapters/sql
RRRA | --enable-lora --tensor-parallel-size 2
RRRR | NPU_GPTOSS=1 --enable-lora --tensor-parallel-size 2
RRRR | NPU_GPTOSS=1 --runner pooling
SSSR | NPU_GPTOSS=1 --pipeline-parallel-size 2
RRRA | --runner pooling
RRUU | --task embed
RRRA | --convert embed
RRRA | --convert classify
RRRA | --model-impl transformers
RRRR | --model-impl terratorch
RRRR | --config-format mistral --load-format mistral --tokenizer-mode mistral
RRRR | --tokenizer /nowhere/tokenizer
SSSS | --model-impl vllm
SSSS | --load-format safetensors
SSSA | --load-format dummy
RRRA | --load-format pt
RRRA | --load-format sharded_state
RRRA | --load-format tensorizer
RRRA | --load-format gguf
RRRA | --load-format mistral
SSSS | --load-format runai_streamer
SSSS | --load-format fastsafetensors
RRSS | --speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
VVVV | --speculative-config 2
SSVV | --distributed-executor-backend nonsense
VVVV | --data-parallel-backend nonsense
VVVV | --speculative-config '{"method": "eagle3", "model": "/nowhere/head", "num_speculative_tokens": 3}'
SSSS | --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
SSSS | --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
VSSV | --enable-sleep-mode
RRRR | --enable-dbo
VVVV | --enable-eplb
SSSA | --enable-prompt-embeds
RRRA | --kv-sharing-fast-prefill
SSSS | --logits-processors x:Y
SSSS | --trust-remote-code
SSSS | --tokenizer-mode slow
SSSS | --tokenizer-mode mistral
SSSS | --additional-config '{"enable_weight_nz_layout": true}'
SRRS | --additional-config '{"dynamic_eplb": true}'
SRRS | --additional-config '{"eplb_config": {"dynamic_eplb": true}}'
SRRS | --additional-config '{"enable_flashcomm1": true}' --tensor-parallel-size 2 --enable-expert-parallel
SSSS | VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE=1 --tensor-parallel-size 2
SRRS | --additional-config '{"xlite_graph_config": {"enabled": true}}'
SRRS | --additional-config '{"torchair_graph_config": {"enabled": true}}'
SSSS | --served-model-name openai/gpt-oss-20b gpt-oss-20b --api-key token --host 0.0.0.0
SSSS | --api-server-count 2
SSSS | --distributed-executor-backend mp
VVVV | --distributed-executor-backend ray
SSUS | --disable-log-requests
SSSS | --enable-log-requests --uvicorn-log-level warning
SSSS | --structured-outputs-config.backend xgrammar
SSUU | --guided-decoding-backend auto
SSSS | --mm-processor-cache-gb 0
SSSS | --limit-mm-per-prompt '{"image": 0}'
SSSS | --revision main
SSSS | --scheduling-policy priority
SSSS | --max-logprobs 20
SSSS | --disable-custom-all-reduce
SSSS | --enable-log-outputs
RRRR | NPU_GPTOSS_EXPERT_WEIGHTS=expanded --enable-lora
SSSA | VLLM_USE_V2_MODEL_RUNNER=0 --tensor-parallel-size 1
SSSA | VLLM_USE_BREAKABLE_CUDAGRAPH=0 --enforce-eager
SSSR | VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 --max-model-len 200000
UURS | --weight-transfer-config '{"backend": "nccl"}'
UUSA | --offload-group-size 2
SSRA | VLLM_USE_RUST_FRONTEND=1 VLLM_RUST_FRONTEND_PATH=/vllm-rs --max-num-seqs 8
SSRR | NPU_GPTOSS=1 VLLM_USE_RUST_FRONTEND=1 VLLM_RUST_FRONTEND_PATH=/vllm-rs --max-num-seqs 8
UUUU | --no-such-flag
UURA | --enable-return-routed-experts
UURR | NPU_GPTOSS=1 --enable-return-routed-experts
"""
_QUARK = shlex.quote(json.dumps({"quantization_config": QUARK}))
# (letters, flags)
ROWS = [tuple(line.replace("QUARK", _QUARK).split(" | ", 1)) for line in _LINES.strip().splitlines()]
