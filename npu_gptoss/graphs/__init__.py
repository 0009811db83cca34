"""Capture a decode step once, replay it at bucketed sizes: code that CUDA graphs and Ascend's ACL graphs share.

A replay costs the host one call instead of hundreds of launches, and the device the gaps between them. A captured step
reads and writes fixed addresses: `state` holds the step's inputs in tensors that stay where they are, padded to the
bucket's size; `advance` makes them on the device from each request's position. `buckets` has the sizes
and picks the size of a step, `recorder` captures. On the NPU vLLM captures with its own wrapper; it shares the choice
of sizes only (`buckets`, which imports the standard library only).
"""
