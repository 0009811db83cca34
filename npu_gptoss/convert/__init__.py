"""`npu-gptoss convert`: gpt-oss files of other tools, other formats and LoRA adapters to the official layout."""
