"""Repairs of vLLM's engine core and workers: one request's mistake is not everybody's."""
