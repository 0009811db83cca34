"""Replaces vLLM's chat handlers by gpt-oss's front end (`frontend/`), with vLLM's engine behind it.

vLLM keeps its routes, request classes, disconnects, keep-alive, metrics and stores. `intake` keeps the client's body
and gives vLLM's classes the fields that the engine needs. The handler of the API (`chat`, `responses`, `messages`)
starts the engine through `engine` and answers through `frontend/`. `release` holds the differences between releases of
vLLM.
"""
