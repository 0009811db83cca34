"""Capture a decode step once, replay it at bucketed sizes: what CUDA graphs and Ascend's ACL graphs have in common.

A replay costs the host one call instead of hundreds of launches, and the device the gaps between them. What is captured
reads and writes fixed addresses: `state` holds the step's inputs in tensors that stay where they are, padded to the
bucket's size; `advance` makes them on the device from where each request stands. `buckets` says which sizes there are
and which one a step takes, `recorder` captures. On the NPU vLLM captures with its own wrapper; it shares the choice of
sizes only (`buckets`, which imports the standard library only).
"""
