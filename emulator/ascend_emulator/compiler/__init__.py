"""Triton-Ascend's kernels without an Ascend: Huawei's own compiler, as far as it goes on a machine without CANN.

`lowering.py` takes a kernel to linalg with triton-ascend's front end, `host.py` builds that for this machine's CPU,
`touched.py` has it tell which bytes it touches, `planner.py` gives it to `bishengir-compile` for a 910B, `launches.py`
runs what a program launches by one of these.
The packages are triton-ascend and ascendnpu-ir; importing this package imports neither.
"""
