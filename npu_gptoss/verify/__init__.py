"""`npu-gptoss verify`: every kernel that can run here against the definition, and proof that the comparison bites.

The registry decides what there is to verify: each kernel's signatures, traits and platform choose the calls that it
gets (`calls.py`). The definition is the fp32 reference on the CPU, from the same inputs (`cases.py`). One file a family
has its calls and how an operation is run by one kernel; `mutations.py` has the known mistakes of `--mutate`;
`compare.py` judges, `tolerances.py` says how far a result may be off and why, `known_failures.py` is the ledger,
`runner.py` puts them together.
"""
