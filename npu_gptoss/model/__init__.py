"""The gpt-oss model without vLLM: config, YaRN, checkpoints, the plain transformer, sharding, device memory."""
