"""Repairs that shorten the host time of a step (vLLM 0.33)."""
