"""gpt-oss's chat front end: OpenAI's and Anthropic's requests to token ids, and an engine's tokens to their answers.

It imports neither vLLM nor torch, and stands on `harmony/`. `chat`, `responses` and `messages` each read a request of
one API (`read`) and write its answer, whole or streamed. They share `tools`, `structure` and `turn`, the only reader of
generated tokens. An engine is reached through `engine.Step`: token ids in, steps of token ids out. vLLM's servers
(`serving/openai/`) and the offline engine (`engine/chat.py`) are such engines.
"""
