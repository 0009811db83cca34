"""Repairs that shorten the host's part of a step (vLLM 0.33)."""
