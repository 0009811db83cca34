"""Serves checkpoints with vLLM's `LLM` on the emulated 910B, each in a process forked from this one.

Runs in the emulated environment, started by `conftest.py`: reads the path of a job from each line and answers DONE.
The slow part, importing torch_npu and vLLM and inspecting the model's class for vLLM, is done once, before the first
fork; no device is touched by then.

A job holds `checkpoint`, `options` (of `LLM`), `rounds` (prompts of one call to `generate` each, how some of them are
sampled, and a mistake of `spoils.py`; or `look`, the canary), `spoil` (a mistake from the start on), `canary` and
`checked` (whether it and the start check run at the start), `machine` (changes of the emulated machine), `variables`
(of the environment), `log`, and `out`, where for each round goes a list of `{tokens, logprobs, ended}`, what the canary
found, or an error's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from spoils import spoilt

LONG_IMPORTS = ("torch_npu", "vllm", "torch._dynamo", "torch._inductor.compile_fx", "gguf", "numba")
# of vllm-ascend 0.11, and of later ones
WORKERS = (
    *("vllm_ascend.worker.worker_v1", "vllm.compilation.cuda_piecewise_backend"),
    *("vllm_ascend.worker.worker", "vllm.compilation.piecewise_backend"),
)


def generate(
    engine: Any, prompts: list[list[int]], tokens: int, vocabulary: int, sampling: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """`sampling`: fields of `SamplingParams` of the prompts with these numbers, in addition to the common ones."""
    from vllm import LLM, SamplingParams

    common = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": -1}
    sampling = [SamplingParams(**common | sampling.get(str(number), {})) for number in range(len(prompts))]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    if isinstance(engine, LLM):
        answers = engine.generate(inputs, sampling, use_tqdm=False)
    else:
        answers = asyncio.get_event_loop().run_until_complete(_together(engine, inputs, sampling))
    return [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                [step[token].logprob for token in range(vocabulary)] for step in answer.outputs[0].logprobs or ()
            ],
            "ended": answer.outputs[0].stop_reason if answer.outputs[0].finish_reason == "abort" else None,
        }
        for answer in answers
    ]


async def _together(engine: Any, inputs: list[Any], sampling: Any) -> list[Any]:
    async def one(number: int, prompt: Any) -> Any:
        async for answer in engine.generate(prompt, sampling[number], f"request-{number}"):
            last = answer
        return last

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(inputs)))


def start(checkpoint: str, options: dict[str, Any]) -> Any:
    """`LLM`, or with data parallelism the engine of the server, which starts one engine core a rank."""
    settings = {"skip_tokenizer_init": True, "max_logprobs": -1, "seed": 0, **options}
    if "data_parallel_size" not in options:
        from vllm import LLM

        return LLM(checkpoint, **settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    asyncio.set_event_loop(asyncio.new_event_loop())
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=checkpoint, **settings))


def count_replays() -> Callable[[], dict[str, Any]]:
    """A function that counts the graphs that vllm-ascend has captured and this process has replayed, on 0.23 its steps
    by mode and their rows of padding, the requests that it has preempted, and the drafts that it has accepted."""
    import torch
    from vllm.compilation.counter import compilation_counter
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_ascend.worker import model_runner_v1

    replays, replay, preempted, accepted = [0], torch.npu.NPUGraph.replay, [0], [0]
    steps, runner = dict.fromkeys(("FULL", "PIECEWISE", "NONE", "padding"), 0), model_runner_v1.NPUModelRunner
    observe = Scheduler.make_spec_decoding_stats

    def observed(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        accepted[0] += kwargs["num_accepted_tokens"]
        return observe(scheduler, *args, **kwargs)

    Scheduler.make_spec_decoding_stats = observed

    def counted(graph: Any) -> None:
        replays[0] += 1
        replay(graph)

    torch.npu.NPUGraph.replay = counted
    if hasattr(runner, "_determine_batch_execution_and_padding"):
        determine = runner._determine_batch_execution_and_padding

        def determined(self: Any, **asked: Any) -> Any:
            found = determine(self, **asked)
            if asked.get("force_uniform_decode") is None:  # no dummy run
                steps[found[0].name] += 1
                steps["padding"] += found[1].num_tokens - asked["num_tokens"]
            return found

        runner._determine_batch_execution_and_padding = determined
    if hasattr(Scheduler, "_preempt_request"):
        preempt = Scheduler._preempt_request

        def counting(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            preempted[0] += 1
            preempt(scheduler, *args, **kwargs)

        Scheduler._preempt_request = counting
    return lambda: {
        "captured": compilation_counter.num_cudagraph_captured,
        "replayed": replays[0],
        "preempted": preempted[0],
        "accepted": accepted[0],
        "steps": dict(steps),
    }


def look(engine: Any) -> dict[str, str]:
    """What the canary of an engine that has served nothing yet finds wrong, by graph mode, or leaves in the cache."""
    from npu_gptoss.serving import canary

    worker = engine.llm_engine.model_executor.driver_worker.worker
    wrong = canary.look(worker).wrong
    runner = worker.model_runner
    left = any(bool(cache[1:].any()) for layer in runner.kv_caches for cache in layer)
    return wrong | ({"cache": "written"} if left or runner.input_batch.num_reqs else {})


def allocated() -> int:
    """Bytes of the device that tensors of this process hold, without the allocator's rounding."""
    import torch

    return torch.npu.memory_stats()["requested_bytes.all.current"] if torch.npu.is_initialized() else 0


def serve(job: dict[str, Any]) -> None:
    from ascend_emulator import context, trace
    from ascend_emulator.ops import fia_workspace
    from vllm.plugins import load_general_plugins

    from npu_gptoss.serving import compat

    context.set_default(dataclasses.replace(context.current(), **job["machine"]))
    os.environ["ASCEND_EMULATOR_DEFECTS"] = ",".join(job["machine"].get("defects", ()))  # for the runtime
    # vLLM thaws what it freezes for its captures, and then collects among all objects of the imports, three times
    gc.unfreeze = lambda: None
    if not context.current().is_8_3:  # our size for 8.3 is of a whole card; 9.1 is asked for its size
        fia_workspace.CORES = 2  # 400 MB of each capture take half a second to fill
    load_general_plugins()
    if not job["canary"]:  # it takes seconds of each start
        from npu_gptoss.serving import canary

        canary.run = lambda worker: None
    if not job["checked"]:  # a fifth of each start
        from npu_gptoss.serving.ascend import start_check

        start_check._wrong = lambda results: []  # computes none of them
    results, graphs = [], count_replays()
    with spoilt(job["spoil"]):
        engine = start(job["checkpoint"], job["options"])
        states = {entry.patch.name: entry.state for entry in compat.status() if entry.patch.name.startswith("ascend")}
        print("PATCHES", json.dumps(states))
        print("GRAPHS", json.dumps(graphs()))
        print("ALLOCATED", allocated())
        for turn in job["rounds"]:
            trace.mark("round")
            try:
                with spoilt(turn.get("spoil")):
                    results.append(
                        look(engine)
                        if "look" in turn
                        else generate(
                            engine, turn["prompts"], turn["tokens"], job["vocabulary"], turn.get("sampling", {})
                        )
                    )
            except Exception as error:  # an operator's refusal; the engine is unusable afterwards
                results.append(f"{type(error).__name__}: {error}")
                break
            print("GRAPHS", json.dumps(graphs()))
    Path(job["out"]).write_text(json.dumps(results))


def child(job: dict[str, Any]) -> None:
    log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["variables"])
    for handler in logging.getLogger("vllm").handlers:  # made when vLLM was imported
        handler.setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    code = 1
    try:
        serve(job)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the exit messages of engines and process groups


def import_and_compile() -> None:
    """Imports the modules of an engine, in its order, and fills Dynamo's tables: a third of the time of a start."""
    import torch
    from vllm.platforms import current_platform

    for name in ("vllm.v1.engine.async_llm", "vllm.entrypoints.llm"):
        importlib.import_module(name)
    current_platform.pre_register_and_update()  # vllm-ascend patches vLLM before its worker is imported
    for name in WORKERS:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
    # torch 2.10's Dynamo would ask the device for its stream, and forked processes could then use no device
    with mock.patch.object(torch.accelerator, "is_available", return_value=False):
        torch.compile(layers, backend="eager", dynamic=True)(torch.ones(3, 2))
    torch._dynamo.reset()
    assert not torch.npu.is_initialized(), "a device is touched before the fork"


def main() -> None:
    for name in LONG_IMPORTS:
        importlib.import_module(name)
    from vllm.model_executor.models import ModelRegistry, registry
    from vllm.plugins import load_general_plugins

    registry._run_in_subprocess = lambda look: look()  # at the model's class; vLLM's way imports everything once more
    load_general_plugins()
    assert ModelRegistry._try_inspect_model_cls("GptOssForCausalLM") is not None
    import_and_compile()
    gc.collect()
    gc.freeze()
    print("READY", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(Path(line.strip()).read_text()))
        os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # workers that the job left behind
        print("DONE", flush=True)


if __name__ == "__main__":
    main()
