"""Admission: the one place where a request is checked whole before the engine hears of it.

`gate.Gate` is an ASGI application around vLLM's. In the order in which a request meets them:

* `keys`: with keys, every route but the two that ask for life needs one;
* `body`: what every body has to be: bounded, UTF-8, JSON, one value for each key, finite numbers, whole characters;
* `fields`: the table of every field of every route with its bounds;
* `structures`: grammars, regular expressions and schemas, compiled once in a child process that may die of them.

What is refused is answered with 400 in OpenAI's form before a stream begins. None of it knows a release of vLLM;
`serving/compat/admission.py` and `structures.py` put it around the server.
"""
