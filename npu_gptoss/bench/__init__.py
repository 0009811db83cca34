"""How fast gpt-oss runs here, and how far that is from what the machine's memory and arithmetic allow.

`roofline` counts the bytes that a step must move and the operations that it must do, `measure` times, `records` writes
JSON; `decode`, `prefill` and `graphs` measure the offline engine by way of `session`, `kernel` each registered kernel
at gpt-oss's shapes (`cases`), `sweep` the engine on several GPUs; `compare` and `tables` read what was written.
`random_checkpoint` makes weights of full size where no published ones are. `command` is `npu-gptoss bench`.
"""
