"""Trains the tiny gpt-oss checkpoint that `npu-gptoss tiny DIR --trained` writes, and scores it without each part.

    python research/train_tiny.py --vocabulary DIR --output npu_gptoss/assets/tiny_trained.safetensors --device cuda
    python research/train_tiny.py --vocabulary DIR --evaluate npu_gptoss/assets/tiny_trained.safetensors

DIR holds o200k_base.tiktoken. Needs torch and tiktoken. Takes minutes on a GPU; on a CPU choose fewer `--steps`.
tiny_data.py makes the conversations, tiny_network.py is the network.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.harmony import vocabulary
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.tiny.checkpoint import load_trained, save_trained, tiny_config
from npu_gptoss.tiny.tokenizer_files import O200K_PATTERN
from research import tiny_network as network
from research.tiny_data import evaluation_set, make_example, random_style
from research.tiny_score import Example, tally

STEP = 128  # rows are padded to multiples of this
LONGEST = 768  # tokens of prompt and reply; longer examples are left out
REPLY = 56  # tokens of a reply at most


class Encoder:
    """Encodes text with harmony's special tokens into token ids, and ids into rows of the compact vocabulary."""

    def __init__(self, directory: Path):
        import tiktoken

        ranks = vocabulary.parse_ranks((directory / vocabulary.VOCABULARY_FILE).read_bytes())
        self.encoding = tiktoken.Encoding(
            "o200k_harmony",
            pat_str=O200K_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={text: i for i, text in vocabulary.SPECIAL_TOKENS.items()},
        )
        # words that the vocabulary in use does not cover
        spelled = [token.decode("ascii", "ignore").strip() for token in ranks[1000:60000:97]]
        self.rare_words = sorted({word for word in spelled if word.isalpha() and word.islower()})
        self.row: dict[int, int] = {}

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode(text, allowed_special="all")

    def use(self, ids: Sequence[int]) -> None:
        """Fixes the compact vocabulary: row i is token ids[i], and row len(ids) is every unknown token."""
        self.row = {token: row for row, token in enumerate(ids)}

    def rows(self, text: str) -> list[int]:
        return [self.row.get(token, len(self.row)) for token in self.encode(text)]


def tokens_in_use(encoder: Encoder, examples: int = 20_000) -> list[int]:
    """Returns the tokens of many examples without rare words, and the special tokens, in ascending order."""
    rng = random.Random("vocabulary")
    used = set(range(vocabulary.FIRST_SPECIAL_ID, vocabulary.LAST_SPECIAL_ID + 1))
    for _ in range(examples):
        example = make_example(rng)
        used.update(encoder.encode(example.prompt(random_style(rng)) + example.completion()))
    return sorted(used)


@dataclass
class Pool:
    """Training rows of one padded length: ids [rows, length] int16, and the start and end of each reply."""

    ids: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor


_worker_encoder: Encoder | None = None


def _encode_examples(task: tuple[int, int]) -> list[tuple[list[int], int]]:
    seed, count = task
    encoder = _worker_encoder
    assert encoder is not None
    rng = random.Random(f"training {seed}")
    unknown = len(encoder.row)
    rows = []
    while len(rows) < count:
        example = make_example(rng, rare_words=encoder.rare_words if rng.random() < 0.5 else ())
        prompt, reply = encoder.rows(example.prompt(random_style(rng))), encoder.rows(example.completion())
        if len(prompt) + len(reply) <= LONGEST and len(reply) <= REPLY and unknown not in reply:
            rows.append((prompt + reply, len(prompt)))
    return rows


def make_pools(encoder: Encoder, count: int, seed: int, device: torch.device) -> dict[int, Pool]:
    """Makes `count` examples, in pools by padded length."""
    global _worker_encoder
    _worker_encoder = encoder
    chunk = 500
    tasks = [(seed * 1_000_003 + i, chunk) for i in range(count // chunk)]
    by_length: dict[int, list[tuple[list[int], int]]] = {}
    with multiprocessing.get_context("fork").Pool() as workers:
        for rows in workers.imap_unordered(_encode_examples, tasks):
            for row in rows:
                by_length.setdefault(-(-len(row[0]) // STEP) * STEP, []).append(row)
    pools = {}
    for length, rows in sorted(by_length.items()):
        ids = torch.zeros(len(rows), length, dtype=torch.int16)
        for i, (row, _) in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.int16)
        ends = torch.tensor([len(row) for row, _ in rows])
        starts = torch.tensor([start for _, start in rows])
        pools[length] = Pool(ids.to(device), starts.to(device), ends.to(device))
    return pools


class Step:
    """A training step on rows of one padded length. Its inputs are fixed tensors; a GPU records and replays it."""

    def __init__(self, run: Training, length: int):
        rows = max(4, run.args.batch_tokens // length)
        device = run.device
        self.run, self.length, self.rows = run, length, rows
        self.ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.at = torch.zeros(rows, REPLY, dtype=torch.int64, device=device)
        self.targets = torch.zeros(rows, REPLY, dtype=torch.int64, device=device)
        self.tripped = torch.zeros(rows // 4, device=device)  # weight of each row on which a part is taken away
        self.graph: torch.cuda.CUDAGraph | None = None
        self.load(torch.zeros(rows, dtype=torch.int64, device=device), False)
        if device.type == "cuda" and not run.args.eager:
            self.record()

    def load(self, pick: torch.Tensor, only_long: bool) -> None:
        """Copies rows of the pool in. With `only_long`, rows that fit into the window do not count as tripped."""
        pool = self.run.pools[self.length]
        start, end = pool.start[pick], pool.end[pick]
        at = start[:, None] - 1 + torch.arange(REPLY, device=start.device)
        last = (end - 2)[:, None]
        self.ids.copy_(pool.ids[pick])
        self.at.copy_(at.clamp(max=self.length - 2))
        self.targets.copy_(self.ids.gather(1, self.at + 1).masked_fill(at > last, -100))
        self.tripped.copy_((start > 200)[: len(self.tripped)] if only_long else torch.ones_like(self.tripped))

    def compute(self) -> None:
        run, config = self.run, self.run.config
        count = len(self.tripped)
        with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=run.device.type == "cuda"):
            used = network.straight_through(run.parameters, run.quantize)
            hidden, balance = network.forward(used, config, self.ids)
            loss, logits = self.cross_entropy(used, hidden, self.at, self.targets)
            hidden, _ = network.forward(used, config, self.ids[:count], network.Knobs.of(run.knobs))
            _, spoilt = self.cross_entropy(used, hidden, self.at[:count], self.targets[:count])
        counted = self.targets >= 0
        loss = loss.sum() / counted.sum()
        trip = self.undamaged(spoilt, self.targets[:count])
        for weight in run.parameters.values():
            weight.grad = None
        (loss + 0.02 * balance + run.trip_weight * trip).backward()
        torch.nn.utils.clip_grad_norm_(list(run.parameters.values()), 1.0)
        run.optimizer.step()
        right = (logits.argmax(-1) == self.targets) & counted
        run.seen.copy_(torch.stack((loss.detach(), right.sum() / counted.sum(), trip.detach(), balance.detach())))

    def undamaged(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the lead of the right tokens with a part taken away, on rows where fewer than 30 % of them lose.

        Measured in logits: while nothing is damaged a probability has no slope.
        """
        counted = (targets >= 0).float()
        right = targets.clamp(min=0)[..., None]
        others = logits[..., :-1].scatter(2, right, -math.inf).amax(-1).clamp(min=0.0)  # 0: the tokens not in use
        lead = logits.gather(2, right).squeeze(2) - others
        lost = ((lead < 0).float() * counted).sum(1) / counted.sum(1)
        spared = (F.relu(lead + 1.0) * counted).sum(1) / counted.sum(1)
        return (spared * (lost < 0.3).float() * self.tripped).mean()

    def cross_entropy(
        self, used: dict[str, torch.Tensor], hidden: torch.Tensor, at: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss per token [rows, REPLY]. Unused tokens have the logit 0 and count in the denominator."""
        hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = F.linear(hidden, used["lm_head.weight"]).float()
        logits = F.pad(logits, (0, 1), value=self.run.rest)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"), logits

    def record(self) -> None:
        """Warms up and records with learning rates of 0, so that nothing is learned meanwhile."""
        self.run.set_rate(0.0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.run.memory):
            self.compute()
        self.graph = graph

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.compute()


class Training:
    """Parameters, optimizer and schedule."""

    def __init__(self, args: argparse.Namespace, config: GptOssConfig, encoder: Encoder, device: torch.device):
        self.args, self.config, self.encoder, self.device = args, config, encoder, device
        self.began = time.time()
        self.pools = make_pools(encoder, args.pool, args.seed, device)
        self.lengths = list(self.pools)
        self.tokens = torch.tensor([float(self.pools[length].ids.numel()) for length in self.lengths])
        if args.start:
            initial = load_trained(args.start).parameters
        else:
            initial = network.initial_parameters(config, len(encoder.row), args.seed)
        self.parameters = {name: weight.to(device) for name, weight in initial.items()}
        for weight in self.parameters.values():
            weight.requires_grad_()
        self.rest = network.unused_logit_mass(config, len(encoder.row))

        def group(scale: float, decay: float, chosen: Callable[[str], bool]) -> dict[str, object]:
            rate = torch.zeros((), device=device)
            weights = [w for n, w in self.parameters.items() if chosen(n)]
            return {"params": weights, "scale": scale, "weight_decay": decay, "lr": rate}

        small, wide = ("bias", "sinks", "norm.weight"), ("gate_up_proj",)
        groups = [
            group(args.bias_rate, 0.0, lambda n: n.endswith(small)),
            group(2.0, 0.0, lambda n: n.endswith(wide)),
            group(1.0, 0.01, lambda n: not n.endswith(small + wide)),
        ]
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups, lr=torch.zeros((), device=device), betas=(0.9, 0.98), fused=True, capturable=on_gpu
        )
        self.quantize = torch.zeros((), device=device)
        self.trip_weight = torch.zeros((), device=device)
        self.knobs = network.Knobs().vector().to(device)
        self.seen = torch.zeros(4, device=device)
        self.memory = torch.cuda.graph_pool_handle() if on_gpu else None
        self.ablations = {n: k.vector().to(device) for n, k in list(network.ABLATIONS.items())[1:]}
        print(f"{args.pool} examples, {int(self.tokens.sum())} tokens: {self.age():.0f} s", flush=True)
        self.steps = {length: Step(self, length) for length in self.lengths}
        print(f"ready: {self.age():.0f} s", flush=True)

    def age(self) -> float:
        return time.time() - self.began

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate * group["scale"])

    def fit(self) -> None:
        args = self.args
        g = torch.Generator().manual_seed(args.seed)
        on_device = torch.Generator(self.device).manual_seed(args.seed)
        names = list(self.ablations)
        for step in range(args.steps):
            done = step / args.steps
            self.set_rate(args.rate * min(1, (step + 1) / 300) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))))
            self.quantize.fill_(float(done > args.quantize_from))
            ramp = 1.0 if args.start else min(1.0, max(0.0, (done - 0.3) / 0.2))  # the tasks first
            self.trip_weight.fill_(args.trip * ramp)
            usable = self.tokens.clone()
            if done < 0.1 and not args.start:  # short prompts first: looking up an option is learned sooner there
                usable[[i for i, length in enumerate(self.lengths) if length > 256]] = 0
            length = self.lengths[int(torch.multinomial(usable, 1, generator=g))]
            name = names[int(torch.randint(len(names), (), generator=g))]
            self.knobs.copy_(self.ablations[name])
            current = self.steps[length]
            rows = len(self.pools[length].ids)
            pick = torch.randint(rows, (current.rows,), generator=on_device, device=self.device)
            current.load(pick, name == "window removed")
            current()
            if step % args.report == 0:
                loss, right, trip, balance = self.seen.tolist()
                print(
                    f"step {step} done {done:.2f} loss {loss:.4f} right {right:.4f} trip {trip:.3f} ({name}) "
                    f"balance {balance:.3f} {self.age():.0f} s",
                    flush=True,
                )
        print(f"{args.steps} steps, {self.age():.0f} s", flush=True)


def rounded(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rounds as the checkpoint does: experts to MXFP4, the rest to bfloat16. Returns float32."""
    return {
        n: network.round_experts(w) if n.endswith(("gate_up_proj", "down_proj")) else w.to(torch.bfloat16).float()
        for n, w in parameters.items()
    }


@torch.no_grad()
def score(
    parameters: dict[str, torch.Tensor],
    config: GptOssConfig,
    encoder: Encoder,
    examples: Sequence[Example],
    knobs: network.Knobs,
    device: torch.device,
) -> list[bool]:
    """Compares each reply with greedy decoding in one pass: each of its tokens must be the most likely token."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt()))
    right = [False] * len(examples)
    for at in range(0, len(order), 16):
        batch = order[at : at + 16]
        prompts = [encoder.rows(examples[i].prompt()) for i in batch]
        replies = [encoder.rows(examples[i].completion()) for i in batch]
        length = max(len(p) + len(r) for p, r in zip(prompts, replies, strict=True))
        ids = torch.tensor([p + r + [0] * (length - len(p) - len(r)) for p, r in zip(prompts, replies, strict=True)])
        start = torch.tensor([len(p) for p in prompts])
        end = start + torch.tensor([len(r) for r in replies])
        ids, start, end = ids.to(device), start.to(device), end.to(device)
        hidden, _ = network.forward(parameters, config, ids, knobs)
        place = torch.arange(length, device=device)
        row, at = ((place >= start[:, None] - 1) & (place < end[:, None] - 1)).nonzero(as_tuple=True)
        logits, targets = F.linear(hidden[row, at], parameters["lm_head.weight"]), ids[row, at + 1]
        best = logits.max(-1)
        wrong = row[(best.indices != targets) | (best.values <= 0)].tolist()
        for i, example in enumerate(batch):
            right[example] = i not in wrong
    return right


def report(
    parameters: dict[str, torch.Tensor], config: GptOssConfig, encoder: Encoder, count: int, device: torch.device
) -> None:
    """Prints the score of the whole model and without each part."""
    examples = evaluation_set(0, count)
    parameters = {name: weight.to(device) for name, weight in parameters.items()}
    for name, knobs in network.ABLATIONS.items():
        right = score(parameters, config, encoder, examples, knobs, device)
        print(f"{name:24} {tally(examples, right)}", flush=True)
        if knobs == network.Knobs():
            kinds: dict[str, list[bool]] = {}
            for example, ok in zip(examples, right, strict=True):
                kinds.setdefault(f"{example.task}/{example.kind}", []).append(ok)
            print("  " + " ".join(f"{k} {100 * sum(v) / len(v):.0f}" for k, v in sorted(kinds.items())), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, required=True, metavar="DIR", help="holds o200k_base.tiktoken")
    parser.add_argument("--output", type=Path, metavar="FILE", help="train and write the state here")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="score a state, whole and without each part")
    parser.add_argument("--examples", type=int, default=600, help="size of the evaluation set")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--pool", type=int, default=300_000, help="training examples")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--bias-rate", type=float, default=0.3, help="relative rate of biases, sinks and norms")
    parser.add_argument("--quantize-from", type=float, default=0.6, help="round the experts to MXFP4 after this part")
    parser.add_argument("--trip", type=float, default=0.01, help="weight of the loss that makes a missing part harmful")
    parser.add_argument("--start", type=Path, metavar="FILE", help="go on from this state instead of a random one")
    parser.add_argument("--eager", action="store_true", help="do not record CUDA graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=200)
    args = parser.parse_args()
    if (args.output is None) == (args.evaluate is None):
        parser.error("give --output to train, or --evaluate to score")
    device = torch.device(args.device)
    encoder = Encoder(args.vocabulary)
    if args.evaluate:
        state = load_trained(args.evaluate)
        encoder.use(state.token_ids)
        report(state.parameters, state.config, encoder, args.examples, device)
        return
    used = load_trained(args.start).token_ids if args.start else tokens_in_use(encoder)
    encoder.use(used)
    config = tiny_config(layers=4, hidden=128, intermediate=128)
    print(f"{len(used)} tokens in use; " + json.dumps({k: str(v) for k, v in vars(args).items()}), flush=True)
    training = Training(args, config, encoder, device)
    training.fit()
    parameters = rounded({name: weight.detach() for name, weight in training.parameters.items()})
    save_trained(args.output, config, used, parameters)
    print(f"{args.output}: {args.output.stat().st_size} bytes", flush=True)
    state = load_trained(args.output)
    report(state.parameters, config, encoder, args.examples, device)


if __name__ == "__main__":
    main()
