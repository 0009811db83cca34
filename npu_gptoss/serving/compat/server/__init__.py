"""Repairs of vLLM's API server: what it takes in, what it answers, how it ends."""
