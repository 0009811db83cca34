"""What gpt-oss is, without vLLM: config, YaRN, checkpoints, the plain transformer, vocabulary, tiny checkpoints."""
