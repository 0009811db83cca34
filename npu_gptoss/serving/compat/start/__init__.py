"""Repairs of vLLM's start: its checks, the loading of a checkpoint, and the choice of operators."""
