"""How fast gpt-oss runs here, and how far that is from what the machine's memory and arithmetic allow.

`roofline` counts the bytes that a step must move and the operations that it must do, `measure` times, `cost` prices,
`records` writes JSON; `decode` and `prefill` measure the offline engine, `kernels` each registered kernel at gpt-oss's
shapes, `sweep` the engine on several GPUs; `client`, `load` and `latency` a server; `compare`, `tables`, `plots` read
what was written. `random_checkpoint` writes weights of full size where no published ones are; `command` is `npu-gptoss
bench`, with a module for each action in `actions`.
"""
