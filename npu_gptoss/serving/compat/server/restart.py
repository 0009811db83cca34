"""Streams outlive their engine: `NPU_GPTOSS_ENGINE_RESTARTS=N` lets the API server start a dead engine anew.

`Outliving` stands between AsyncLLM and its engine core client. It keeps each request that is in flight, and the tokens
that it has passed on. When the engine dies, it starts another with the same configuration and sends these requests
again. Everything above goes on undisturbed, because it sees no error: detokenizers, stop strings, streams of every API.

How a request goes on:
* From prompt plus tokens, with as much less of `max_tokens` and `min_tokens`, if nothing but the tokens decides what
  comes next: greedy and unseeded sampling.
* By a replay, if the engine holds more state: a seeded generator, a grammar, penalties of output tokens, a processor.
  The engine generates from the prompt again, and the tokens that were passed on are compared and dropped. So that it
  can be repeated, such a request without a seed gets one at its start. If rounding lets a replay differ, the request
  goes on from prompt plus tokens; under a grammar it ends with an error.

With data parallelism all engines of this server end and start together: the ranks of a mixture of experts step in lock
step, so that none can go on without the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

from npu_gptoss import envs
from npu_gptoss.serving import logger
from npu_gptoss.serving.admission.refusal import Refusal, escaped
from npu_gptoss.serving.compat.patch import Original, around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.server.heartbeat import engines
from npu_gptoss.serving.compat.server.shutdown import cause_of_death, engine_ended, is_final
from npu_gptoss.serving.compat.targets import ALL

WINDOW = 600.0  # seconds in which at most N restarts are tried
ENGINES = ("EngineCore", "VLLM_DP_Coordinator")  # names of vLLM's processes
LAST_WILL = 10.0  # seconds for the dead engine's processes to end by themselves
# fields of SamplingParams by which an engine keeps state besides the tokens
STATEFUL = (
    *("structured_outputs", "presence_penalty", "frequency_penalty", "bad_words", "extra_args"),
    *("thinking_token_budget", "repetition_detection"),  # 0.23 and 0.33
)


@dataclass(eq=False)
class Sent:
    """A request in flight. request: vLLM's EngineCoreRequest as it came; tokens: passed on to AsyncLLM."""

    request: Any
    engine_id: str  # its id in the present engine; a restart changes it, so that late outputs are known as such
    tokens: list[int] = field(default_factory=list)
    ahead: int = 0  # of `tokens`, how many a replay has yet to repeat
    cached: int | None = None  # prompt tokens that the first engine found in its cache
    times: int = 0  # sent again

    @property
    def replays(self) -> bool:
        params = self.request.sampling_params
        if params is None or self.request.prompt_token_ids is None:  # pooling, embeddings
            return True
        seeded = params.seed is not None and params.temperature > 0
        return seeded or any(getattr(params, name, None) for name in STATEFUL)

    def again(self, replay: bool) -> Any:
        """Returns the request for another engine."""
        self.times += 1
        request = copy.copy(self.request)
        request.request_id = self.engine_id = f"{self.request.request_id}-again{self.times}"
        self.ahead = len(self.tokens) if replay else 0
        if self.tokens and not replay:
            done, params = len(self.tokens), copy.copy(request.sampling_params)
            params.max_tokens -= done
            params.min_tokens = max(0, params.min_tokens - done)
            params.prompt_logprobs = None  # passed on with the first token
            request.sampling_params = params
            request.prompt_token_ids = [*request.prompt_token_ids, *self.tokens]
        return request

    def take(self, output: Any) -> bool:
        """Makes an engine's output the next one of this request: drops what was passed on. Returns whether something is
        left. Raises Differs."""
        output.request_id = self.request.request_id
        new, expected = output.new_token_ids, self.tokens[len(self.tokens) - self.ahead :]
        repeated = min(len(new), self.ahead)
        early = output.finished and len(new) < self.ahead and str(output.finish_reason) not in ("abort", "error")
        if new[:repeated] != expected[:repeated] or early:
            raise Differs
        if repeated:
            self.ahead -= repeated
            output.new_token_ids = new[repeated:]
            if output.new_logprobs is not None:
                rows = [part if part is None else part[repeated:] for part in output.new_logprobs]
                output.new_logprobs = type(output.new_logprobs)(*rows)
        if self.tokens:
            output.new_prompt_logprobs_tensors = None
            if hasattr(output, "prefill_stats"):  # 0.23 and later
                output.prefill_stats = None
        if hasattr(output, "num_cached_tokens"):
            self.cached = output.num_cached_tokens if self.cached is None else self.cached
            output.num_cached_tokens = self.cached
        self.tokens += output.new_token_ids
        return bool(output.new_token_ids or output.finished or not repeated)


class Differs(Exception):
    """A replay gave other tokens than those that were passed on."""


class _Resources:
    """The client's resources; the engine is dead for AsyncLLM when no restart is left."""

    def __init__(self, owner: Outliving) -> None:
        self._owner = owner

    @property
    def engine_dead(self) -> bool:
        return self._owner.over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.client.resources, name)


class Outliving:
    """An engine core client of vLLM whose engine can be replaced. `make(config)` starts an engine; it may block."""

    def __init__(self, make: Callable[[Any], Any], config: Any, tries: int) -> None:
        self._pristine = copy.deepcopy(config)  # a start writes into it
        self._make, self._tries = make, tries
        self._restarts: list[float] = []
        self._sent: dict[str, Sent] = {}  # by the id in the engine
        self._names: dict[str, Sent] = {}  # by the id in AsyncLLM
        self.down = ""  # why no engine runs; empty if one runs
        self.up = asyncio.Event()
        self.up.set()
        self.over = False
        self.gave_up = ""  # the cause of the server's end
        self._starts = False
        self._changed = ""  # a call that gave the engine other weights
        self.resources = _Resources(self)
        self.client = self._started(config)

    def __getattr__(self, name: str) -> Any:
        if name == "client":  # the first start failed
            raise AttributeError(name)
        return getattr(self.client, name)

    # what AsyncLLM calls

    async def add_request_async(self, request: Any) -> None:
        self._raise_if_over()
        sent = Sent(request, request.request_id)
        params = request.sampling_params
        if sent.replays and params is not None and params.temperature > 0 and params.seed is None:
            request.sampling_params = params = copy.copy(params)  # samples of one request share it
            params.seed = random.getrandbits(31)
        self._names[request.request_id] = self._sent[sent.engine_id] = sent
        if not self.down:
            await self._send(sent, request)

    async def _send(self, sent: Sent, request: Any) -> None:
        try:
            await self.client.add_request_async(copy.copy(request))
        except Exception as error:
            if not is_final(error):  # a dying engine: the restart sends it
                self._forget(sent)
                raise

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        known = [self._names[name] for name in request_ids if name in self._names]
        for sent in known:
            self._forget(sent)
        if known and not self.down:
            await self.client.abort_requests_async([sent.engine_id for sent in known])

    async def collective_rpc_async(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if "weight" in str(method):
            self._changed = str(method)
        return await self.client.collective_rpc_async(method, *args, **kwargs)

    async def get_output_async(self) -> Any:
        while True:
            try:
                outputs = await self.client.get_output_async()
            except Exception as error:
                if self.over or not is_final(error):
                    raise
                await self._restart()
                continue
            outputs.outputs = [kept for output in outputs.outputs if (kept := await self._taken(output)) is not None]
            return outputs

    async def _taken(self, output: Any) -> Any | None:
        """Returns the output for AsyncLLM, or None if there is none."""
        if (sent := self._sent.get(output.request_id)) is None:
            return None  # aborted, or of an earlier try
        try:
            is_new = sent.take(output)
        except Differs:
            return await self._without_replay(sent, output)
        if output.finished:
            self._forget(sent)
        return output if is_new else None

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        starting, self.over = bool(self.down), True
        self.client.shutdown(*args, **kwargs)
        if starting:  # else the start would delay the process's end
            threading.Thread(target=self._end_start, name="npu-gptoss end", daemon=True).start()

    # the restart

    def _end_start(self) -> None:
        """Kills what a start has made so far, and what it makes until it fails."""
        while self._starts:
            _kill(child for child in multiprocessing.active_children() if child.name.startswith(ENGINES))
            time.sleep(0.1)

    def _forget(self, sent: Sent) -> None:
        self._names.pop(sent.request.request_id, None)
        self._sent.pop(sent.engine_id, None)

    def _raise_if_over(self) -> None:
        if self.over:
            raise engine_ended()()

    async def _without_replay(self, sent: Sent, output: Any) -> Any | None:
        """Goes on with a request whose replay differed. Returns its last output if it cannot."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        name = sent.request.request_id
        self._sent.pop(sent.engine_id)
        if not output.finished:
            await self.client.abort_requests_async([sent.engine_id])
        if sent.request.sampling_params.structured_outputs:
            self._names.pop(name)
            reason = getattr(FinishReason, "ERROR", FinishReason.ABORT)
            said = "The engine was started anew, and the answer could not be repeated up to where it was cut."
            return EngineCoreOutput(name, [], finish_reason=reason, stop_reason=said)
        logger.warning("Request %r was not repeated equally by the new engine; it goes on from its tokens.", name)
        request = sent.again(replay=False)
        self._sent[sent.engine_id] = sent
        await self._send(sent, request)
        return None

    async def _restart(self) -> None:
        """Returns when another engine runs and has the requests in flight. Raises EngineDeadError if none can."""
        client = self.client
        self.up.clear()
        self.down = "the engine died"
        cause = await asyncio.to_thread(_cause, client)
        for future in list(getattr(client, "utility_results", {}).values()):
            if isinstance(future, asyncio.Future) and not future.done():
                future.set_exception(engine_ended()())
        while True:
            now = time.monotonic()
            self._restarts = [each for each in self._restarts if now - each < WINDOW]
            if self._changed:
                self._give_up(f"{cause}; it is not started anew, because {self._changed} had given it other weights")
            if len(self._restarts) >= self._tries:
                self._give_up(f"{cause}; {self._tries} restarts within {WINDOW:.0f} s did not help")
            self._restarts.append(now)
            which = f"restart {len(self._restarts)} of {self._tries}"
            self.down = f"the engine died ({cause}) and is being started anew, {which}"
            logger.error("npu-gptoss: %s; %d requests wait for it.", self.down, len(self._names))
            try:
                self.client = await asyncio.to_thread(self._start, client)
                break
            except Exception as error:
                self._raise_if_over()
                cause = f"its start failed: {type(error).__name__}: {error}"
        self._raise_if_over()
        logger.info("npu-gptoss: the engine runs again after %.1f s.", self._seconds)
        self.down = ""
        self.up.set()
        self._sent.clear()
        for name, sent in list(self._names.items()):
            if self._names.get(name) is sent:  # not aborted meanwhile
                request = sent.again(sent.replays)
                self._sent[sent.engine_id] = sent
                await self._send(sent, request)

    def _give_up(self, cause: str) -> None:
        self.gave_up, self.over = cause, True
        self.up.set()
        raise engine_ended()()

    def _start(self, old: Any) -> Any:
        """Runs in a thread: ends what is left of the old engine and starts another."""
        self._starts = True  # before it looks whether the server ends
        try:
            old.shutdown()
            _clear(old, self._family, self._memory)
            self._raise_if_over()
            config = copy.deepcopy(self._pristine)
            parallel = config.parallel_config
            if parallel.data_parallel_size > 1:  # the old ports may not be free yet
                parallel.data_parallel_master_port, *parallel._data_parallel_master_port_list = _free_ports(6)
            # a fork would keep the clients' connections open
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
            client = self._started(config)
            if self.over:  # nobody may be left to take it
                client.shutdown()
            return client
        finally:
            self._starts = False

    def _started(self, config: Any) -> Any:
        self._began = time.monotonic()
        client = self._make(config)
        self._seconds = time.monotonic() - self._began
        self._family, self._memory = _belongings(client)
        return client

    @property
    def retry_after(self) -> int:
        """Seconds until the start that runs may be over: as long as the last one took."""
        return max(1, round(self._began + self._seconds - time.monotonic()))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def _cause(client: Any) -> str:
    deadline, processes = time.monotonic() + 2.0, engines(client)
    while processes and time.monotonic() < deadline and all(process.exitcode is None for process in processes):
        time.sleep(0.05)
    return cause_of_death(client)


def _belongings(client: Any) -> tuple[list[Any], set[str]]:
    """Returns the processes below the engine's, and the shared memory of all of them."""
    import psutil

    below: list[Any] = []
    shared: set[str] = set()
    for process in engines(client):
        with contextlib.suppress(psutil.Error, OSError):
            own = psutil.Process(process.pid)
            below += own.children(recursive=True)
            for each in (own, *own.children(recursive=True)):
                shared |= _shared_memory(each.pid)
    return below, shared - _shared_memory(os.getpid())


def _shared_memory(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/psm_" in line}  # Python's names


def _clear(client: Any, family: list[Any], memory: set[str]) -> None:
    """Waits until the old engine's processes have ended, ends the rest, and removes their shared memory."""
    import psutil

    deadline = time.monotonic() + LAST_WILL
    for process in engines(client):
        process.join(max(0.0, deadline - time.monotonic()))
    _kill(process for process in engines(client) if process.exitcode is None)
    _, left = psutil.wait_procs(family, max(0.0, deadline - time.monotonic()))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, LAST_WILL)
    for path in memory:
        Path(path).unlink(missing_ok=True)


def _kill(processes: Iterable[Any]) -> None:
    """Kills children of this process, with everything below them."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
        process.kill()
        process.join(LAST_WILL)


async def check(core: Any, *, waits: bool) -> None:
    """Raises Refusal if the engine of this client is dead and being started anew. waits: for it, up to the limit."""
    if not getattr(core, "down", ""):
        return
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(core.up.wait(), envs.get("NPU_GPTOSS_RESTART_WAIT_SECONDS") if waits else 0)
    if core.down:
        said = f"The server cannot answer now: {escaped(core.down, 300)}."
        raise Refusal(said, status=HTTPStatus.SERVICE_UNAVAILABLE, retry_after=core.retry_after)


def objection(config: Any, addresses: Any) -> str:
    """Returns why the engines of this server cannot be started anew by it; empty if they can."""
    parallel = config.parallel_config
    if addresses:
        return "another process has started them; --api-server-count 1 makes this process start them"
    if parallel.data_parallel_size != parallel.data_parallel_size_local or parallel.data_parallel_backend == "ray":
        return "some run on other nodes or in other servers, and data parallel ranks step together"
    return ""


@repair(
    "engine-restart",
    "vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client",
    releases=ALL,
    until="vLLM starts a dead engine anew and resumes its requests",
)
def install(module: ModuleType) -> None:
    """The engine's death ends the server and every stream, also with NPU_GPTOSS_ENGINE_RESTARTS."""
    client = module.EngineCoreClient
    expect_parameters(client.make_async_mp_client, "vllm_config", "client_addresses")
    expect_source(module.AsyncMPClient.get_output_async, "raise self._format_exception(outputs) from None")

    @around(client, "make_async_mp_client")
    def make_async_mp_client(original: Original, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        tries = envs.get("NPU_GPTOSS_ENGINE_RESTARTS")
        if not tries:
            return original(vllm_config, *args, **kwargs)
        if reason := objection(vllm_config, kwargs.get("client_addresses")):
            logger.warning("NPU_GPTOSS_ENGINE_RESTARTS has no effect on these engines: %s.", reason)
            return original(vllm_config, *args, **kwargs)
        return Outliving(lambda config: original(config, *args, **kwargs), vllm_config, tries)
