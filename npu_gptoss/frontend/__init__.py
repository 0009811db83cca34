"""gpt-oss's chat front end: turns OpenAI's and Anthropic's requests into token ids, and generated tokens into answers.

It imports neither vLLM nor torch, and uses `harmony/`. `chat`, `responses` and `messages` each read a request of one
API (`read`) and write its answer, whole or streamed. They share `tools`, `structure` and `turn`, the only reader of
generated tokens. `engine.Step` is the interface to an engine: token ids in, steps of token ids out. vLLM's servers
(`serving/openai/`) and the offline engine (`engine/chat.py`) implement it.
"""
