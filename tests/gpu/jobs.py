# SPDX-License-Identifier: Apache-2.0
"""The model and the prompts of the quality comparison."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VOCABULARY = 512
PAGE = (
    128  # tokens a page of the model below: 8 layers x 8 heads x 2 x 128 x 2 bytes = 32 KiB a token, 64 tokens = 2 MiB
)


NAN_TOKEN = VOCABULARY - 1  # its embedding is NaN, so a prompt that holds it makes NaN in K and V
LONG_PROMPT = 128_000


def write_model(path: Path, *, layers: int = 8, context: int = 131072) -> None:
    """A bf16 Llama with seeded random weights, 32 query and 8 KV heads of 128."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_TOKEN] = float("nan")
        model.lm_head.weight[NAN_TOKEN] = 0  # and it is not what the model says
    model.save_pretrained(path)


def prompt_groups(count: int = 200, seed: int = 1) -> list[list[dict[str, Any]]]:
    """Groups of jobs; a group is sent at once. Prefixes of k pages + {-1, 0, 1}, nested, branching, whole prompts."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(2, NAN_TOKEN) for _ in range(n)]

    base = tokens(6 * PAGE)
    branches = [base[: 2 * PAGE + 37] + tokens(3 * PAGE) for _ in range(3)]
    cuts = [max(1, k * PAGE + d) for k in range(5) for d in (-1, 0, 1)]
    jobs = [base + tokens(5)]
    for cut in cuts:
        jobs += [base[:cut], base[:cut] + tokens(1), base[:cut] + tokens(rng.randrange(2, 200))]
    for branch in branches:
        jobs += [branch, branch[: rng.randrange(PAGE, len(branch))] + tokens(17), branch + tokens(PAGE)]
    while len(jobs) < count:
        source = rng.choice([base, *branches])
        jobs.append(source[: rng.randrange(1, len(source) + 1)] + tokens(rng.randrange(1, 300)))
    groups, at = [], 0
    while at < len(jobs):
        size = rng.choice([1, 2, 8, 16, 32])
        groups.append([{"ids": ids, "output": rng.randrange(8, 40)} for ids in jobs[at : at + size]])
        at += size
    return groups


def filler(tokens: int = 300_000, each: int = 20_000) -> list[list[dict[str, Any]]]:
    """Prompts that only take slots: what comes after them lies past 2**31 elements of 8,192 a slot (and stripe)."""
    rng = random.Random(2)
    prompts = [[rng.randrange(2, NAN_TOKEN) for _ in range(each)] for _ in range(tokens // each)]
    return [[{"ids": ids, "output": 1, "skip": True}] for ids in prompts]


def long_prompt() -> list[list[dict[str, Any]]]:
    rng = random.Random(3)
    return [[{"ids": [rng.randrange(2, NAN_TOKEN) for _ in range(LONG_PROMPT)], "output": 24}]]


def with_nan(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The same groups, each with a request of its own that makes NaN."""
    rng = random.Random(4)
    poison = [[rng.randrange(2, NAN_TOKEN) for _ in range(rng.randrange(1, 400))] + [NAN_TOKEN] for _ in groups]
    return [[*group, {"ids": ids, "output": 30, "skip": True}] for group, ids in zip(groups, poison, strict=True)]


def spec(model: Path, groups: list[list[dict[str, Any]]], **engine: Any) -> str:
    arguments = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "attention_backend": "fa3",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.9,  # of what is free; several engines start at once
        "max_total_tokens": 512 * 1024,
        "max_running_requests": 64,
        "cuda_graph_max_bs_decode": 40,
        "cuda_graph_max_bs_prefill": 2048,
        "log_level": "info",
        "skip_server_warmup": True,
        "random_seed": 0,
        **engine,
    }
    return json.dumps({"vocabulary": VOCABULARY, "engine": arguments, "groups": groups})
