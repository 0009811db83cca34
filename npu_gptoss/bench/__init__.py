"""Measures gpt-oss's speed here beside the limits of the machine's memory and arithmetic.

`roofline` counts the bytes that a step must move and the operations that it must do, `measure` times, `records` writes
JSON. `decode` and `engine` (prefill) measure the offline engine through `session`; `kernel` measures each registered
kernel at gpt-oss's shapes (`cases`). `compare` and `tables` read the files.
`random_checkpoint` makes weights of full size. `command` is `npu-gptoss bench`.
"""
