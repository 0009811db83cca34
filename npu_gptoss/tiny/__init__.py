"""Writes tiny gpt-oss checkpoints in the official layout, random or trained, with the published vocabulary."""
