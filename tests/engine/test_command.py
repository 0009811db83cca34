"""`npu-gptoss generate`: standard output is one strict JSON list, everything wrong is one sentence and exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("openai_harmony")

import openai_harmony

from npu_gptoss import cli
from npu_gptoss.engine import Engine, Result, SamplingParams, command
from npu_gptoss.engine.chat import Chats, Reading
from npu_gptoss.engine.command import add_arguments
from npu_gptoss.engine.prompts import PromptEntry
from npu_gptoss.errors import InputError
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE
from npu_gptoss.tiny.tokenizer_files import write_tokenizer_files
from tests.checkpoints import write_random_checkpoint
from tests.engine.conftest import WORDS

COMMON = ("--device", "cpu", "--dtype", "float32", "--num-blocks", "40")


@pytest.fixture(scope="module")
def chat_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real vocabulary and harmony's tokens over random weights."""
    pytest.importorskip("bpe_openai")
    path = tmp_path_factory.mktemp("chat")
    write_random_checkpoint(path, vocab_size=201_088, hidden=32, layers=1)
    write_tokenizer_files(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BASE_VARIABLE, str(path))
        yield path


def strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def generate(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> tuple[int, str, str]:
    code = cli.main(["generate", "--model", str(directory), *COMMON, *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> list[dict[str, Any]]:
    code, out, err = generate(capsys, directory, "--json", *options)
    assert code == 0, err
    assert out.count("\n") == 1
    return strict(out)


def prompts_file(tmp_path: Path, *lines: dict[str, Any]) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_json_equals_the_engines_result(capsys: pytest.CaptureFixture[str], directory: Path, engine: Engine) -> None:
    (row,) = rows(capsys, directory, "--prompt-ids", "1,2, 3", "--max-tokens", "6", "--logprobs", "2")
    result = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=6, logprobs=2))[0]
    assert list(row) == ["prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs"]
    assert row["prompt_token_ids"] == [1, 2, 3]
    assert row["token_ids"] == list(result.token_ids)
    assert (row["text"], row["finish_reason"]) == (None, "length")
    assert [entry["token_id"] for entry in row["logprobs"]] == row["token_ids"]
    for entry, expected in zip(row["logprobs"], result.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(expected.logprob, abs=1e-4)
        assert [best["token_id"] for best in entry["top"]] == [token for token, _ in expected.top]


def test_a_prompts_file_gives_a_row_for_each_line_in_order(capsys, worded_directory, tmp_path) -> None:
    file = prompts_file(tmp_path, {"prompt": "beta alpha"}, {"prompt_token_ids": [4]}, {"prompt": "gamma"})
    got = rows(capsys, worded_directory, "--prompts-file", file, "--max-tokens", "3")
    assert [row["prompt_token_ids"] for row in got] == [[1, 0], [4], [2]]
    assert all(row["text"] and row["logprobs"] is None for row in got)


def test_sampling_options_reach_the_engine(capsys: pytest.CaptureFixture[str], directory: Path, engine: Engine) -> None:
    options = ("--temperature", "1.5", "--top-p", "0.9", "--top-k", "30", "--seed", "4", "--max-tokens", "12")
    (row,) = rows(capsys, directory, "--prompt-ids", "1", *options)
    params = SamplingParams(max_tokens=12, temperature=1.5, top_p=0.9, top_k=30, seed=4)
    assert row["token_ids"] == list(engine.generate([[1]], params)[0].token_ids)
    greedy = rows(capsys, directory, "--prompt-ids", "1", "--max-tokens", "12")[0]["token_ids"]
    assert greedy == list(engine.generate([[1]], SamplingParams(max_tokens=12))[0].token_ids)
    assert greedy != row["token_ids"]


@pytest.mark.parametrize(("prompts", "batch"), [(3, 3), (400, 256)])
def test_every_option_of_the_engine_reaches_it(monkeypatch, directory, tmp_path, prompts, batch) -> None:
    """None of these values is the default, so that an option which is read and forgotten shows."""
    seen: dict[str, Any] = {}

    def engine(model: Path, **options: Any) -> NoReturn:
        seen.update(options, model=model)
        raise InputError("enough")

    monkeypatch.setattr(command, "Engine", engine)
    file = prompts_file(tmp_path, *({"prompt_token_ids": [1]} for _ in range(prompts)))
    given = "--device cpu --dtype bfloat16 --max-batch-tokens 77 --block-size 32 --num-blocks 9 --graphs piecewise"
    given += " --capture-sizes 2,3 --weights fp8"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(InputError, match="enough"):
        command.run(parser.parse_args(["--model", str(directory), "--prompts-file", file, *given.split()]))
    assert seen == {
        "model": directory,
        "device": "cpu",
        "dtype": "bfloat16",
        "max_batch_tokens": 77,
        "block_size": 32,
        "num_blocks": 9,
        "max_batch_size": batch,  # as many as there are prompts, within reason
        "graphs": "piecewise",
        "graph_sizes": [2, 3],
        "weights": "fp8",
        "ranks": None,
        "progress": True,
    }


def test_an_empty_answer_is_printed_as_such_and_not_as_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    entry = PromptEntry("--prompt", "prompt", "Hi", {})
    for text, printed in (("", "\n"), (None, "200002\n")):
        command._print_text(entry, Result((1,), (200002,), text, "stop"), None, alone=True)
        assert capsys.readouterr().out == printed


class Generated:
    """A request of the engine that has generated these tokens, in steps."""

    prompt_length = 1

    def __init__(self, tokens: list[int]) -> None:
        self.all, self.token_ids, self.finish_reason = tokens, [0], None

    def step(self, count: int) -> None:
        self.token_ids += self.all[len(self.token_ids) - 1 :][:count]
        if len(self.token_ids) > len(self.all):
            self.finish_reason = "stop"


TURN = (
    "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
)
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.fixture
def read(chat_directory: Path) -> Any:
    """The reading of a turn that the model writes in answer to a chat, in steps of so many tokens."""
    chats = Chats(chat_directory)

    def reading(text: str, steps: int = 100, **fields: Any) -> tuple[Reading, list[Generated]]:
        made = chats.reading(chats.read({"messages": [USER]} | fields))
        request, cancelled = Generated(chats.library.encode(text, allowed_special="all")), []
        while request.finish_reason is None and not cancelled:
            request.step(steps)
            made.update(request, cancelled.append)
        return made, cancelled

    return reading


def test_a_chat_is_printed_without_its_parts_or_a_call(capsys: pytest.CaptureFixture[str], read: Any) -> None:
    entry = PromptEntry("--prompt", "messages", [], {})
    for steps in (1, 100):
        reading, _ = read(TURN, steps, tools=[TOOL])
        command._print_text(entry, Result((1,), (5, 6), "raw", "stop"), reading, alone=False)
        assert capsys.readouterr().out.splitlines() == [
            "== --prompt (stop, 2 tokens)",
            "[reasoning] I think.",
            "[answer] I look.",
            "[call of f] {}",
        ]
    row = command._row(Result((1,), (5, 6), "raw", "stop"), reading)
    assert row["finish_reason"] == "tool_calls"
    assert row["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_a_chat_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str], chat_directory: Path) -> None:
    chats = Chats(chat_directory)
    request = Generated(chats.library.encode(TURN, allowed_special="all"))
    reading = chats.reading(chats.read({"messages": [USER], "tools": [TOOL]}))
    watch = command._Watch(SimpleNamespace(cancel=None), [reading], sys.stdout, False)
    printed = []
    while request.finish_reason is None:
        request.step(3)
        watch([request])
        printed.append(capsys.readouterr().out)
    assert "".join(printed) == "[reasoning] I think.\n[answer] I look.\n[call of f] {}\n"
    assert len(list(filter(None, printed))) > 3


def test_a_stop_string_does_not_end_the_request(read: Any) -> None:
    text = "<|channel|>final<|message|>One, two, three.<|return|>"
    reading, cancelled = read(text, 1, stop="two")
    assert (reading.message["content"], reading.choice.finish_reason) == ("One, ", "stop")
    (request,) = cancelled
    assert request.finish_reason is None


def test_text_without_json_is_readable(capsys, worded_directory, directory, tmp_path) -> None:
    _, out, err = generate(capsys, worded_directory, "--prompt", WORDS[0], "--max-tokens", "3")
    assert len(out.split()) == 3
    assert "1 of 1 prompts done, 3 tokens" in err
    file = prompts_file(tmp_path, {"prompt": "alpha"}, {"prompt": "beta"})
    _, out, _ = generate(capsys, worded_directory, "--prompts-file", file, "--max-tokens", "3", "--logprobs", "1")
    assert f"== {file} line 2 (length, 3 tokens)" in out
    _, out, _ = generate(capsys, directory, "--prompt-ids", "1", "--max-tokens", "2")  # no tokenizer: ids
    assert len(out.split(",")) == 2


def test_chats_are_rendered_as_harmony_and_their_answers_parsed(capsys, chat_directory, tmp_path) -> None:
    """One run for all forms of prompts: a tokenizer of 201 088 words takes seconds to read."""
    options = ("--date", "2025-11-20", "--reasoning-effort", "low", "--max-tokens", "2", "--ignore-eos")
    hi = {"messages": [{"role": "user", "content": "Hi"}]}
    plain = {"prompt": "<|start|>user<|message|>Hé"}
    file = prompts_file(
        tmp_path, hi, {**hi, "reasoning_effort": "high"}, {**hi, "tools": [TOOL]}, plain, {"prompt_token_ids": [1]}
    )
    low, high, tools, text, ids = rows(capsys, chat_directory, "--prompts-file", file, *options)
    encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    rendered = encoding.decode(low["prompt_token_ids"])
    assert "Current date: 2025-11-20\n\nReasoning: low" in rendered
    assert rendered.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert "Reasoning: high" in encoding.decode(high["prompt_token_ids"])  # what a line says about itself comes first
    assert low["message"]["role"] == "assistant"
    assert {"message"} == low.keys() - text.keys() == low.keys() - ids.keys()
    assert "functions.f" not in encoding.decode(high["prompt_token_ids"])
    assert "type f = " in encoding.decode(tools["prompt_token_ids"])
    assert text["prompt_token_ids"][:3] == [200_006, 1428, 200_008]  # special tokens in a plain prompt are such
    _, out, _ = generate(capsys, chat_directory, "--prompt", "Hi", "--chat", *options)
    assert out == "" or out.startswith(("[answer] ", "[reasoning] ", "[call of "))


@pytest.mark.parametrize("ignore", [False, True])
def test_chats_end_where_harmony_says_unless_they_are_to_go_on(monkeypatch, chat_directory, tmp_path, ignore) -> None:
    """Also where the checkpoint lists fewer stop tokens; a prompt that is no chat has the stop tokens of the
    checkpoint only."""
    asked: list[SamplingParams] = []

    class Recording:
        device, config = SimpleNamespace(type="cpu"), SimpleNamespace(hidden_size=4096)
        encode = staticmethod(list)

        def __init__(self, model: Path, **options: Any) -> None:
            pass

        def check_length(self, ids: list[int]) -> None:
            pass

        def generate(self, prompts: list[list[int]], each: list[SamplingParams], on_step: object) -> NoReturn:
            asked.extend(each)
            raise InputError("enough")

    monkeypatch.setattr(command, "Engine", Recording)
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    file = prompts_file(tmp_path, chat, {"prompt_token_ids": [1]})
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--ignore-eos"] if ignore else []
    with pytest.raises(InputError, match="enough"):
        command.run(parser.parse_args(["--model", str(chat_directory), "--prompts-file", file, *options]))
    stops = set() if ignore else {200002, 200012}  # return and call
    assert [set(params.stop_token_ids) for params in asked] == [stops, set()]
    assert all(params.ignore_eos is ignore for params in asked)


def test_nothing_but_the_answer_reaches_standard_output(directory: Path) -> None:
    """Nor the output of C libraries while the model loads; the noise here goes to file descriptor 1 directly."""
    code = (
        "import os, sys; from npu_gptoss import cli; from npu_gptoss.model.transformer import GptOss;"
        "load = GptOss.load.__func__;"
        "GptOss.load = classmethod(lambda c, *a, **k: (os.write(1, b'noise'), print('noise'), load(c, *a, **k))[-1]);"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "generate", "--model", str(directory), *COMMON, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--prompt-ids", "1,2", "--max-tokens", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert len(strict(done.stdout)[0]["token_ids"]) == 2
    assert done.stderr.count("noise") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-ids", ""), "--prompt-ids: the prompt is empty"),
        (("--prompt-ids", "1,x"), "--prompt-ids must be whole numbers with commas between, got '1,x'"),
        (("--prompt-ids", "1,,2"), "--prompt-ids must be whole numbers"),
        (("--prompt-ids", "1,512"), "--prompt-ids: token id 512 is not in the vocabulary"),
        (("--prompt-ids", ",".join(["1"] * 641)), "the prompt has 641 tokens, but the cache holds 640"),
        (("--prompt", "alpha"), "tokenizer.json is missing"),
        (("--prompts-file", "/nowhere.jsonl"), "/nowhere.jsonl cannot be read"),
        (("--prompt-ids", "1", "--chat"), "--prompt-ids: --chat turns texts into messages"),
        (("--prompt", "", "--chat"), "--prompt: the message is empty"),
        (("--prompt-ids", "1", "--dtype", "float16"), "float16 cannot hold"),
        (("--prompt-ids", "1", "--temperature", "nan"), "temperature must be a finite number"),
        (("--prompt-ids", "1", "--model", "/nowhere"), "/nowhere: "),
        (("--prompt", "alpha", "--model", "/nowhere"), "/nowhere: expected a gpt-oss checkpoint"),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_code_2(capsys, directory, options, message) -> None:
    code, out, err = generate(capsys, directory, *options)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_a_bad_line_of_a_prompts_file_is_named_whatever_is_wrong_with_it(capsys, directory, tmp_path) -> None:
    for bad, message in (
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [512]}, "token id 512 is not in the vocabulary"),
        ({"text": "x"}, "must be a JSON object with one of"),
    ):
        file = prompts_file(tmp_path, {"prompt_token_ids": [1]}, bad)
        code, out, err = generate(capsys, directory, "--prompts-file", file)
        assert (code, out) == (2, "")
        assert f"{file} line 2" in err
        assert message in err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format: the offline engine"),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": "required"}, "tools: the offline engine"),
        ({"messages": [USER], "temperature": 1}, "nothing reads 'temperature'"),
    ],
)
def test_a_bad_conversation_in_a_prompts_file_is_not_named(capsys, chat_directory, tmp_path, fields, message) -> None:
    file = prompts_file(tmp_path, {"messages": [USER]}, fields)
    code, _, err = generate(capsys, chat_directory, "--prompts-file", file)
    assert code == 2
    assert f"{file} line 2: {message}" in err
