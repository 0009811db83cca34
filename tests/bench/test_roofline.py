from __future__ import annotations

import pytest

from npu_gptoss.bench import roofline
from npu_gptoss.bench.random_checkpoint import full_config
from npu_gptoss.bench.roofline import (
    H200,
    decode_work,
    dollars_per_million,
    expected_distinct,
    experts_work,
    prefill_work,
)
from npu_gptoss.errors import InputError
from tests.checkpoints import random_config

# milliseconds on an H200 as worked out beside the code, by hand: model, weights, context, batch -> floor
DECODE_FLOORS = {
    **{("20b", "mxfp4", 1024, batch): floor for batch, floor in ((1, 0.78), (8, 1.95), (32, 2.80), (128, 3.42))},
    **{("20b", "mxfp4", 8192, batch): floor for batch, floor in ((1, 0.82), (8, 2.24), (32, 3.97))},
    **{("20b", "fp8", 1024, 1): 1.01, ("20b", "fp8", 8192, 32): 5.81},
    **{("20b", "bf16", 1024, 1): 1.51, ("20b", "bf16", 8192, 128): 13.97},
    **{("120b", "mxfp4", 1024, 1): 1.05, ("120b", "mxfp4", 1024, 128): 14.33},
}
PREFILL_FLOORS = {
    **{("20b", tokens): floor for tokens, floor in ((8192, 0.071), (32768, 0.386), (65536, 1.04), (128000, 3.02))},
    **{("120b", tokens): floor for tokens, floor in ((8192, 0.107), (32768, 0.58), (65536, 1.56), (128000, 4.54))},
}
EXPERTS_FLOORS_US = {1: 11.0, 8: 57.9, 32: 87.0, 64: 88.2}  # one layer of 20b in MXFP4


@pytest.mark.parametrize("point", DECODE_FLOORS)
def test_the_floor_of_decode_is_the_one_worked_out_by_hand(point):
    model, weights, context, batch = point
    work = decode_work(full_config(model), [context] * batch, weights)
    assert work.floor_s(H200) * 1e3 == pytest.approx(DECODE_FLOORS[point], abs=0.0055)


@pytest.mark.parametrize("point", PREFILL_FLOORS)
def test_the_floor_of_prefill_is_the_one_worked_out_by_hand(point):
    model, tokens = point
    floor = prefill_work(full_config(model), tokens, "mxfp4").floor_s(H200)
    assert floor == pytest.approx(PREFILL_FLOORS[point], rel=0.006)


@pytest.mark.parametrize("tokens", EXPERTS_FLOORS_US)
def test_the_floor_of_one_layers_experts_is_the_one_worked_out_by_hand(tokens):
    config, distinct = full_config("20b"), expected_distinct(32, 4, tokens)
    floor = experts_work(config, tokens, "mxfp4", distinct).floor_s(H200) * 1e6
    assert floor == pytest.approx(EXPERTS_FLOORS_US[tokens], abs=0.06)


def test_the_parameters_of_a_tiny_model_are_those_counted_one_by_one():
    sizes = {"hidden": 8, "intermediate": 4, "heads": 2, "kv_heads": 1, "head_dim": 2, "vocab_size": 10}
    config = random_config(**sizes, experts=3, experts_per_token=2)
    # q 4 x 8 + 4, k and v 2 x 8 + 2 each, o 8 x 4 + 8, two norms of 8, two sinks
    assert roofline.attention_parameters(config) == 36 + 18 + 18 + 40 + 16 + 2
    assert roofline.router_parameters(config) == 3 * 8 + 3
    assert roofline.expert_parameters(config) == (8 * 8 + 4 * 8, 8 + 8)
    assert roofline.head_parameters(config) == 80
    assert roofline.kv_bytes_per_token(config) == 2 * 1 * 2 * 2


def test_a_window_layer_reads_its_window_and_a_full_layer_everything():
    config = random_config(layers=4, window=128)
    keys = decode_work(config, [100, 1000], "bf16").kv_bytes / roofline.kv_bytes_per_token(config)
    assert keys == 2 * (100 + 1000) + 2 * (100 + 128)


def test_experts_are_counted_not_expected_where_their_number_is_known():
    config = full_config("20b")
    layers = config.num_hidden_layers
    few, many = (decode_work(config, [1024] * 32, "mxfp4", [n] * layers) for n in (4, 32))
    assert many.expert_bytes == 8 * few.expert_bytes
    assert few.dense_bytes == many.dense_bytes
    with pytest.raises(InputError, match="for each of 24 layers, got 2"):
        decode_work(config, [1024], "mxfp4", [4, 4])


@pytest.mark.parametrize(
    ("experts", "tokens", "expected"), [(32, 1, 4.0), (32, 8, 21.0), (32, 32, 31.6), (128, 32, 81.7)]
)
def test_distinct_experts_of_uniform_routing(experts, tokens, expected):
    assert expected_distinct(experts, 4, tokens) == pytest.approx(expected, abs=0.05)


def test_a_million_tokens_cost_the_time_that_they_take():
    assert dollars_per_million(1_000_000, 3600, 3.0) == pytest.approx(3.0)
    # a batch of 32 every 4 ms: 8 000 tokens a second, 28.8 million an hour
    assert dollars_per_million(32, 4e-3, 2.88) == pytest.approx(0.1)
