"""Admission: checks each request completely before the engine receives it.

`middleware.AdmissionMiddleware` is an ASGI application around vLLM's. Its checks, in order:

* `keys`: on a server with API keys, every route except /health and /ping requires a key;
* `body`: limited size, UTF-8, JSON, unique keys, finite numbers, whole characters;
* `fields`: the limits of each field of each route;
* `structures`: compiles grammars, regular expressions and schemas in a child process, which may crash.

A refused request gets an error in the form of its API before a stream begins. These modules depend on no release of
vLLM; `compat/server/admission.py` and `structures.py` connect them to the server.
"""
