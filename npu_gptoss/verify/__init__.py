"""Checks gpt-oss's kernels against the fp32 definition, at three depths, with one runner and one comparer.

The depths are a server's start, the doctor and `npu-gptoss verify`. `cases` makes inputs, `compare` compares,
`tolerances` has the limits with their reasons. `self_test` has the calls of the first two depths. For everything, the
registry chooses the calls of each kernel (`calls`, one `*_checks` file a family); `mutations` has the known mistakes of
`--mutate`, `known_failures` the ledger, `replay` computes dumped calls again, and `runner` runs all of it.
"""
