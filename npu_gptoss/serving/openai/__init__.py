"""vLLM's chat handlers, replaced: gpt-oss's own front end (`frontend/`) with vLLM's engine behind it.

vLLM keeps its routes, request classes, disconnects, keep-alive, metrics and stores. A request goes through `intake`
(keeps the body as the client wrote it, and hands vLLM's classes what an engine samples by) to the handler of its API
(`chat`, `responses`, `messages`), which starts the engine by `engine` and answers by `frontend/`. `release_0_11` and
its siblings hold what differs between releases of vLLM; `install` puts everything in.
"""
