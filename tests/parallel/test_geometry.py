# SPDX-License-Identifier: Apache-2.0
"""What each rank of 2, 4 and 8 has of an 8B, a 70B, a 32B and a 7B model; on the host with CUDA's granules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.geometry import BUDGET, DIM, MODELS, RANKS, Rank, check_pool, geometry, small_pool


@pytest.fixture(params=RANKS, ids=lambda rank: f"{rank.model}-tp{rank.ranks}")
def rank(request: pytest.FixtureRequest) -> Rank:
    found: Rank = request.param
    return found


def test_page_and_tokens(rank: Rank) -> None:
    g = geometry(rank)
    assert (g.token_bytes, g.page_size, g.page_bytes) == (rank.token_bytes, rank.page_size, rank.page_bytes)
    assert g.padding == 0
    assert BUDGET // g.page_bytes * g.page_size == rank.tokens


def test_heads_are_those_that_sglang_gives_the_rank(rank: Rank, tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    layers, query_heads, kv_heads = MODELS[rank.model]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": query_heads * DIM,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": DIM,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig(str(tmp_path)).get_num_kv_heads(rank.ranks) == rank.heads


def test_a_pool_of_it(rank: Rank) -> None:
    pool = small_pool(rank, "cpu")
    check_pool(rank, pool)
    pool.space.close()
