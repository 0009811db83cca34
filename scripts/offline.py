"""One prompt through stock vLLM without a server: `LLM` with the Ascend article's settings, eager or with graphs.

    offline.py --model DIR                      with the stack's graphs (on a CPU: eager)
    offline.py --model DIR --mode eager --profile traces

Prints the model's thought and answer. `--profile DIR` runs the prompt once to warm up and once under vLLM's
profiler; the trace goes to DIR. Exit status 1 when the profiler wrote none. On the emulated 910B: npu-gptoss emulate --
python scripts/offline.py --model DIR
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_gptoss.frontend.turn import Turn
from npu_gptoss.harmony.encoding import load_encoder
from npu_gptoss.harmony.parser import Kind
from npu_gptoss.serving.releases import here

if TYPE_CHECKING:
    from vllm import RequestOutput

PROMPT = "Who are you? Please introduce yourself and analyze your relationship with OpenAI."
GRAPHS = {"piecewise": "PIECEWISE", "full": "FULL_DECODE_ONLY"}
CAPTURE_SIZES = [16, 4, 2, 1]
PROFILER_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
NO_TRACE = (
    "no trace: vLLM's profiler wrote nothing to {folder}; its lines above say why. On the emulated 910B the emulator "
    "writes one: npu-gptoss emulate --trace FILE -- python scripts/offline.py …"
)


def engine_options(options: argparse.Namespace, mode: str | None) -> dict[str, Any]:
    """The keyword arguments of vLLM's `LLM`: the article's, and the stack's graphs without a mode."""
    chosen = {"cudagraph_mode": GRAPHS[mode]} if mode in GRAPHS else {}
    graphs = {"compilation_config": {**chosen, "cudagraph_capture_sizes": CAPTURE_SIZES}}
    return {
        "model": options.model,
        "tensor_parallel_size": options.cards,
        "max_model_len": options.max_len,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.95,
        **({"enforce_eager": True} if mode == "eager" else graphs),
        **(here().module("vllm").profiler_options(str(options.profile.resolve())) if options.profile else {}),
    }


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables to set before vLLM is imported; the user's own stay."""
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(options.model).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if options.on == "cpu":
        wanted |= {"NPU_GPTOSS_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if options.profile:
        wanted[PROFILER_VARIABLE] = str(options.profile.resolve())
    return {name: value for name, value in wanted.items() if name not in os.environ}


def refusal(options: argparse.Namespace) -> str | None:
    """The reason why the options cannot be served; None where they can."""
    if options.on == "cpu" and options.mode in GRAPHS:
        return f"there are no graphs on a CPU; leave out --mode {options.mode}"
    if not Path(options.model).is_dir():
        if "/" not in options.model or options.model.startswith(("/", ".")):
            return f"--model {options.model} is neither a folder nor a name on the hub such as openai/gpt-oss-20b"
    elif not (Path(options.model) / "config.json").is_file():
        return f"{options.model} holds no config.json: it is not a checkpoint in the official layout"
    return None


def show(output: RequestOutput, directory: Path) -> None:
    completion, tokens = output.outputs[0], len(output.prompt_token_ids)
    turn = Turn(load_encoder(directory).parser())
    turn.read(completion.token_ids, completion.finish_reason)
    print(f"thought: {turn.texts(Kind.REASONING) or ''}")
    answer = turn.texts(Kind.ANSWER)
    print(f"answer: {answer}" if answer else f"no answer yet, the end of the text: {completion.text[-200:]!r}")
    print(f"{tokens} tokens in, {len(completion.token_ids)} out, ended by {completion.finish_reason}")


def profiled(llm: Any, folder: Path, run: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `run` under vLLM's profiler, and the number of files of a trace that it wrote.

    torch_npu's profiler writes profiler_info and profiler_metadata also where it recorded nothing.
    """
    before = set(folder.rglob("*"))
    llm.start_profile()
    result = run()
    llm.stop_profile()
    described = set(folder.rglob("profiler_*.json"))
    written = [path for path in folder.rglob("*") if path not in before | described and path.is_file()]
    return result, sum(path.stat().st_size > 0 for path in written)


def generate(options: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Returns the exit status."""
    from vllm import LLM, SamplingParams

    from npu_gptoss.serving.openai.engine import checkpoint_directory

    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens, skip_special_tokens=False)
    messages = [{"role": "user", "content": options.prompt}]

    def run() -> RequestOutput:
        return llm.chat(messages, sampling, use_tqdm=False)[0]

    output, files = run(), 1  # under the profiler again: what happens only once does not belong into the trace
    if options.profile:
        folder = Path(os.environ.get(PROFILER_VARIABLE) or options.profile.resolve())
        output, files = profiled(llm, folder, run)
        print(f"trace: {files} files in {folder}" if files else NO_TRACE.format(folder=folder), flush=True)
    show(output, checkpoint_directory(llm.llm_engine.model_config) or Path(options.model))
    return 0 if files else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or a name on the hub")
    parser.add_argument("--on", choices=("npu", "cpu"), default="npu", help="where; the emulated 910B counts as npu")
    parser.add_argument("--mode", choices=("eager", *GRAPHS), help="default the stack's, on a CPU eager")
    parser.add_argument("--cards", type=int, default=1, help="tensor parallel size: 4 or 8 for 120b (default 1)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=512, help="of the reply, reasoning included (default 512)")
    parser.add_argument("--max-len", type=int, default=16384, help="tokens of prompt and reply (default 16384)")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of vLLM's profiler there")
    parser.add_argument("--dry-run", action="store_true", help="print environment and call, run nothing")
    options = parser.parse_args(arguments)
    words = refusal(options)
    if words:
        print(f"offline.py: {words}.", file=sys.stderr)
        return 2
    settings = engine_options(options, options.mode or ("eager" if options.on == "cpu" else None))
    variables = environment(options)
    call = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    print(" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()), f"LLM({call})", flush=True)
    if not options.dry_run:
        os.environ.update(variables)
        return generate(options, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
