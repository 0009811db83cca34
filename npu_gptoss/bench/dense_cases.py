"""What a layer computes besides attention and experts, alone at gpt-oss's shapes: projections, router, norms, head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from npu_gptoss import dense
from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.bench.kernels import Case
from npu_gptoss.bench.measure import rotation
from npu_gptoss.bench.random_checkpoint import STD
from npu_gptoss.bench.roofline import BF16_BYTES, Work, kv_bytes_per_token, linear_work
from npu_gptoss.dense import operations as call_of
from npu_gptoss.dense.operations import ADD_NORM, GREEDY, LOGITS, OUTPUT, QKV, ROUTER
from npu_gptoss.kernels import Described, Operation, signature
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import cos_sin_cache

Calls = list[Callable[[], object]]


def dense_cases(
    operation: str, config: GptOssConfig, *, rows: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """One of the family's operations for every number of rows."""
    shapes = DenseShapes(config, device, dtype)
    for count in rows:
        yield shapes.case(operation, count)


class DenseShapes:
    """Builds the cases of one model's shapes; each set of a rotation has weights of its own."""

    def __init__(self, config: GptOssConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.hidden = config.hidden_size
        self.query = config.num_attention_heads * config.head_dim
        self.kv = config.num_key_value_heads * config.head_dim

    def case(self, operation: str, rows: int) -> Case:
        """operation: its full name."""
        hidden = self.dtype
        stream = Work(activation_bytes=2 * rows * self.hidden * BF16_BYTES)
        written = Work(kv_bytes=rows * kv_bytes_per_token(self.config))
        vocabulary, experts = self.config.vocab_size, self.config.num_local_experts
        packed = self.query + 2 * self.kv

        def weight(*shape: int) -> torch.Tensor:
            """As its shape alone."""
            return torch.empty(shape, device="meta", dtype=hidden)

        table: dict[Operation, tuple[Callable[[int, str], Callable[[], object]], Described, Work]] = {
            QKV: (
                self._qkv,
                call_of.qkv_call(rows, hidden, weight(packed, self.hidden), hidden, self.config.head_dim),
                linear_work(rows, self.hidden, packed) + written,
            ),
            OUTPUT: (
                self._output,
                call_of.output_call(rows, hidden, weight(self.hidden, self.query)),
                linear_work(rows, self.query, self.hidden),
            ),
            ROUTER: (
                self._router,
                call_of.router_call(rows, hidden, weight(experts, self.hidden)),
                linear_work(rows, self.hidden, experts) + stream,
            ),
            LOGITS: (
                self._logits,
                call_of.logits_call(rows, hidden, weight(vocabulary, self.hidden)),
                linear_work(rows, self.hidden, vocabulary),
            ),
            GREEDY: (
                self._greedy,
                (signature(logits=hidden), {}),
                Work(activation_bytes=rows * vocabulary * BF16_BYTES),
            ),
            # both inputs read, the sum and its norm written
            ADD_NORM: (self._add_norm, (signature(hidden=hidden), {}), stream + stream),
        }
        found = next(each for each in table if each.name == operation)
        build, (call, traits), work = table[found]

        def calls(kernel: str) -> Calls:
            return [build(rows, kernel) for _ in range(rotation(work.bytes, self.device))]

        return Case(found, f"rows={rows}", call, traits, work, calls)

    def _normal(self, *shape: int, std: float = STD) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(0.0, std)

    def _norm(self) -> torch.Tensor:
        return torch.ones(self.hidden, device=self.device)

    def _qkv(self, rows: int, kernel: str) -> Callable[[], object]:
        config, block_size = self.config, 16
        shape = (rows, block_size, config.num_key_value_heads, config.head_dim)
        table = torch.randperm(rows, device=self.device).to(torch.int32)[:, None]
        metadata = AttentionMetadata(
            query_start_loc=tuple(range(rows + 1)),
            seq_lens=(1,) * rows,
            block_table=table,
            slot_mapping=table[:, 0].long() * block_size,
        )
        return functools.partial(
            dense.qkv,
            self._normal(rows, self.hidden, std=1.0),
            self._normal(rows, self.hidden, std=1.0),
            self._norm(),
            config.rms_norm_eps,
            self._normal(self.query + 2 * self.kv, self.hidden),
            self._normal(self.query + 2 * self.kv),
            _cos_sin(config, self.dtype, self.device),
            torch.randint(0, 1024, (rows,), device=self.device),
            torch.zeros(shape, device=self.device, dtype=self.dtype),
            torch.zeros(shape, device=self.device, dtype=self.dtype),
            metadata,
            kernel=kernel,
        )

    def _output(self, rows: int, kernel: str) -> Callable[[], object]:
        return functools.partial(
            dense.output,
            self._normal(rows, self.query, std=1.0),
            self._normal(self.hidden, self.query),
            self._normal(self.hidden),
            self._normal(rows, self.hidden, std=1.0),
            kernel=kernel,
        )

    def _router(self, rows: int, kernel: str) -> Callable[[], object]:
        return functools.partial(
            dense.router,
            self._normal(rows, self.hidden, std=1.0),
            None,
            self._norm(),
            self.config.rms_norm_eps,
            self._normal(self.config.num_local_experts, self.hidden),
            self._normal(self.config.num_local_experts),
            self.config.num_experts_per_tok,
            kernel=kernel,
        )

    def _logits(self, rows: int, kernel: str) -> Callable[[], object]:
        weight = self._normal(self.config.vocab_size, self.hidden)
        out = torch.empty(rows, self.config.vocab_size, device=self.device, dtype=self.dtype)
        return functools.partial(dense.logits, self._normal(rows, self.hidden, std=1.0), weight, out=out, kernel=kernel)

    def _greedy(self, rows: int, kernel: str) -> Callable[[], object]:
        return functools.partial(dense.greedy, self._normal(rows, self.config.vocab_size, std=1.0), kernel=kernel)

    def _add_norm(self, rows: int, kernel: str) -> Callable[[], object]:
        return functools.partial(
            dense.add_norm,
            self._normal(rows, self.hidden, std=1.0),
            self._normal(rows, self.hidden, std=1.0),
            self._norm(),
            self.config.rms_norm_eps,
            kernel=kernel,
        )


OPERATIONS = tuple(operation.name for operation in (QKV, OUTPUT, ROUTER, ADD_NORM, LOGITS, GREEDY))


@functools.lru_cache(maxsize=1)
def _cos_sin(config: GptOssConfig, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of the first positions: all that a case turns by."""
    return cos_sin_cache(config, 1024, dtype, device)
