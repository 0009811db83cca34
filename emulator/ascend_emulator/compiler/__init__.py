"""Runs Triton-Ascend's kernels without an Ascend: Huawei's compiler, as far as it goes without CANN.

`lowering.py` lowers a kernel to linalg with triton-ascend's front end. `host.py` builds that for this CPU, `touched.py`
makes it count the bytes that it touches, `planner.py` compiles it for a 910B, `launches.py` runs a program's launches.
The packages are triton-ascend and ascendnpu-ir; importing this package does not import them.
"""
