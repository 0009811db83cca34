"""Starts vLLM's server of each release with a script in place of its engine (`tests/serving/scripted.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import requests

pytest.importorskip("vllm")

from tokenizers import Tokenizer

from npu_gptoss.frontend.request import Defaults
from npu_gptoss.harmony.encoding import Encoder, load_encoder
from npu_gptoss.harmony.library import load_encoding
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_FILE
from scripts import serve_here
from tests.serving import on_cpu
from tests.serving.scripted import SAMPLING
from tests.serving.server import START_LIMIT, free_port

TRAINED = "Zyxglorp"  # a token that training added
ROOT = Path(__file__).resolve().parents[3]
NAME, MAX_LEN = "gpt-oss", 8192
# options that the front end honours; test_http.py tests their effects
FLAGS: tuple[str, ...] = ("--enable-log-requests", "--enable-log-outputs")
FLAGS += ("--return-tokens-as-token-ids", "--enable-force-include-usage", "--response-role", "tutor")
LATER = ("--default-chat-template-kwargs", '{"reasoning_effort": "high", "model_identity": "You are Tiny."}')
FLAGS_OF = {
    "0.11": FLAGS,
    "0.23": FLAGS + LATER,
    "0.33": (
        *(FLAGS + LATER),
        "--enable-per-request-metrics",
        "--enable-scale-out",
        *("--reasoning-effort-map", '{"max": "high"}', "--anthropic-disabled-thinking-effort", "medium"),
    ),
}
VARIABLES_OF = {"0.23": {"VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "1"}}
DEFAULTS = Defaults(effort="high", identity="You are Tiny.")
DEFAULTS_OF = {
    "0.11": Defaults(),
    "0.23": replace(DEFAULTS, instructions_in_system=True),
    "0.33": replace(DEFAULTS, efforts={"max": "high"}),
}
RELEASES = ("0.11", pytest.param("0.23", marks=pytest.mark.emulated), pytest.param("0.33", marks=pytest.mark.vllm033))


def python_of(release: str) -> tuple[Path, dict[str, str]]:
    """Returns the interpreter of a release's environment, and variables for its processes."""
    if release == "0.11":
        return Path(sys.executable), {}
    if release == "0.33":
        return on_cpu.PYTHON, {"CUDA_VISIBLE_DEVICES": ""}
    from ascend_emulator.launch import Machine, environment

    from emulator.tests.machine import venv

    machine = Machine("9.1")
    return venv(machine) / "bin/python", environment(machine, venv(machine))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.text
        return self.json["error"]

    @property
    def lines(self) -> list[str]:
        """The events of a stream of chat chunks, without its end."""
        lines = [line for line in self.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return lines[:-1]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The data of a stream with named events."""
        found = []
        for event in filter(None, self.text.split("\n\n")):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


@dataclass(frozen=True)
class Server:
    release: str
    url: str
    model: Path
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def defaults(self) -> Defaults:
        """The defaults that its options set."""
        return DEFAULTS_OF[self.release]

    def prompt(self, **fields: Any) -> str:
        """The prompt of a chat, as text."""
        answer = self.chat(return_token_ids=True, **fields)
        assert answer.status == 200, answer.text
        return load_encoding(self.model).decode(answer.json["prompt_token_ids"])

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        reply = requests.post(self.url + path, raw, headers=headers, timeout=60)
        return Answer(reply.status_code, reply.headers, reply.content.decode())

    def chat(self, written: str = "", /, **fields: Any) -> Answer:
        """Returns the answer of a chat for which the model writes this text."""
        fields.setdefault("messages", [{"role": "user", "content": written}])
        return self.post("/v1/chat/completions", {"model": NAME} | fields)

    def respond(self, written: str = "", /, **fields: Any) -> Answer:
        return self.post("/v1/responses", {"model": NAME, "input": written} | fields)

    def tokenize(self, **fields: Any) -> list[int]:
        answer = self.post("/tokenize", {"model": NAME} | fields)
        assert answer.status == 200, answer.text
        return answer.json["tokens"]

    def told(self, fields: Mapping[str, Any] = MappingProxyType({}), api: str = "chat") -> dict[str, Any]:
        """Returns the structure that the engine received, for the answer or a forced call."""
        text = f"<|channel|>final<|message|>{SAMPLING}<|return|>"
        if api == "completions":
            answer = self.post("/v1/completions", {"model": NAME, "prompt": SAMPLING, "max_tokens": 4000, **fields})
            assert answer.status == 200, answer.text
            return json.loads(answer.json["choices"][0]["text"])
        answer = self.ask(api)(text, **({"max_tokens": 4000} if api == "messages" else {}) | fields)
        assert answer.status == 200, answer.text
        if api == "messages":
            return json.loads(answer.json["content"][0]["text"])
        if api == "responses":
            (item,) = answer.json["output"]
            return json.loads(item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
        message = answer.json["choices"][0]["message"]
        return json.loads(message["content"] or message["tool_calls"][0]["function"]["arguments"])

    def ask(self, api: str) -> Callable[..., Answer]:
        return {"chat": self.chat, "responses": self.respond, "messages": self.message}[api]

    def message(self, written: str = "", /, **fields: Any) -> Answer:
        fields.setdefault("messages", [{"role": "user", "content": written}])
        return self.post("/v1/messages", {"model": NAME, "max_tokens": 500} | fields)


@contextlib.contextmanager
def serve(release: str, model: Path, log: Path, *flags: str, **settings: str) -> Iterator[Server]:
    """settings: of the server's environment. It must not end before the tests do."""
    python, variables = python_of(release)
    port = free_port()
    command = [str(python), "-m", "tests.serving.scripted", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--served-model-name", NAME, "--max-model-len", str(MAX_LEN), "--enable-prompt-tokens-details", *flags]
    settings |= {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    settings["PYTHONPATH"] = str(ROOT)
    settings.setdefault("NPU_GPTOSS_ENGINE_RESTARTS", "100000")  # of test_outliving.py
    # the vocabulary has to come from the checkpoint, without the network
    settings |= dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    settings |= {"TIKTOKEN_RS_CACHE_DIR": str(log.parent / "nothing"), "XDG_CACHE_HOME": str(log.parent / "cache")}
    # else vLLM imports everything once more, to inspect the model's class
    settings.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm"))
    environment = os.environ | variables | settings
    environment.pop(BASE_VARIABLE, None)  # an earlier test of this process may have set it
    process = serve_here.start(command, environment, log)
    server = Server(release, f"http://127.0.0.1:{port}", model, log, process)
    try:
        serve_here.wait_until_ready(process, server.url, log, timeout=START_LIMIT)
        yield server
        assert process.poll() is None, f"the server ended during the tests:\n{log.read_text()[-3000:]}"
    finally:
        serve_here.stop(process)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer training has padded, cut and grown, saved by transformers 5."""
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("scripted") / "model"
    write_tiny(folder, trained=True, mxfp4=True)
    (folder / VOCABULARY_FILE).unlink()  # as in a published checkpoint
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([TRAINED])
    tokenizer.enable_padding(length=64, pad_id=199999, pad_token="<|endoftext|>")
    tokenizer.enable_truncation(8)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|constrain|>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="package", params=RELEASES)
def server(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("scripted") / f"{request.param}.log"
    with serve(request.param, tiny, log, *FLAGS_OF[request.param], **VARIABLES_OF.get(request.param, {})) as running:
        yield running


@pytest.fixture(scope="session")
def encoder(tiny: Path) -> Encoder:
    return load_encoder(tiny)
