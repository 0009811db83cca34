"""harmony, gpt-oss's chat format: OpenAI's messages to harmony's messages to token ids, for the server and the engine.

conversation.py writes the messages, rendering.py their text and control tokens, encoding.py the token ids. The rules
come from the published chat template and the harmony guide; docs/decisions.md lists where the two differ. Neither
vLLM nor torch is imported.
"""
