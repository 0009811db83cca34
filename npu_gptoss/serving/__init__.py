"""gpt-oss inside vLLM: everything in this package that knows vLLM.

`plugin.register` is the only way in. Importing this package imports neither vLLM nor torch.
"""
