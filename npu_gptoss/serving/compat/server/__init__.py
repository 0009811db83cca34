"""Repairs of vLLM's API server: requests, answers and shutdown."""
