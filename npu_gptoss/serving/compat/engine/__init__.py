"""Repairs of vLLM's engine core and workers: an error in one request leaves the other requests alone."""
