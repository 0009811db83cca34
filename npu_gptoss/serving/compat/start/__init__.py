"""Repairs of how vLLM starts, loads a checkpoint and chooses what runs."""
