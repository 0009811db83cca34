"""One module for each action of `npu-gptoss bench`: SUMMARY, `add_arguments`, `run`; `shared` holds what several need.

The measuring itself is one level up; what stands here reads the command line, prints and writes.
"""
