# SPDX-License-Identifier: Apache-2.0
"""Page geometry over the shapes of public models: no token is torn, nothing is padded without need."""

from __future__ import annotations

import pytest

from sglang_vattn.geometry import CUDA_GRANULE, HOST_GRANULE, LARGEST_TOKENS, page_geometry

# layers, KV heads, head dim (of K and V, or both), bytes a number
MODELS = {
    "Llama-3.2-1B": (16, 8, 64, 2),
    "Llama-3.2-3B": (28, 8, 128, 2),
    "Llama-3.1-8B": (32, 8, 128, 2),
    "Llama-3.1-70B": (80, 8, 128, 2),
    "Llama-3.1-405B": (126, 8, 128, 2),
    "Llama-2-7B": (32, 32, 128, 2),
    "Llama-2-13B": (40, 40, 128, 2),
    "Mistral-7B": (32, 8, 128, 2),
    "Mixtral-8x7B": (32, 8, 128, 2),
    "Mistral-Small-24B": (40, 8, 128, 2),
    "Qwen2.5-0.5B": (24, 2, 64, 2),
    "Qwen2.5-1.5B": (28, 2, 128, 2),
    "Qwen2.5-7B": (28, 4, 128, 2),
    "Qwen2.5-32B": (64, 8, 128, 2),
    "Qwen3-30B-A3B": (48, 4, 128, 2),
    "Gemma-2-9B": (42, 8, 256, 2),
    "Phi-3-mini": (32, 32, 96, 2),
    "Phi-2": (32, 32, 80, 2),
    "StarCoder2-3B": (30, 2, 128, 2),
    "Falcon-7B": (32, 1, 64, 2),
    "tiny Llama of the tests": (4, 2, 32, 4),
    "K and V differ": (27, 16, (192, 128), 2),
    "an odd 576": (27, 1, 576, 2),
    "Llama-3.1-8B in fp8": (32, 8, 128, 1),
}


def geometry(name: str, granule: int, page_size: int | None = None):
    layers, heads, dims, itemsize = MODELS[name]
    k_dim, v_dim = dims if isinstance(dims, tuple) else (dims, dims)
    return page_geometry(
        layers=layers, kv_heads=heads, k_dim=k_dim, v_dim=v_dim, itemsize=itemsize,
        granule_bytes=granule, page_size=page_size,
    )  # fmt: skip


@pytest.mark.parametrize("granule", [HOST_GRANULE, CUDA_GRANULE])
@pytest.mark.parametrize("name", MODELS)
def test_pages_are_whole_granules_and_hold_whole_tokens(name: str, granule: int) -> None:
    g = geometry(name, granule)
    assert g.page_bytes == g.page_size * g.token_bytes
    assert g.page_bytes % granule == 0
    assert 128 <= g.page_size <= LARGEST_TOKENS
    assert g.token_bytes >= g.payload_bytes
    # smallest: no smaller page of at least 128 tokens fills whole granules
    assert not [n for n in range(128, g.page_size) if n * g.token_bytes % granule == 0]
    # least padding: no smaller stride has a page of up to 2,048 tokens
    for stride in range(g.payload_bytes, g.token_bytes):
        assert not [n for n in range(128, LARGEST_TOKENS + 1) if n * stride % granule == 0], stride
    assert (g.padding == 0) == (g.token_bytes == g.payload_bytes)


@pytest.mark.parametrize("granule", [HOST_GRANULE, CUDA_GRANULE])
@pytest.mark.parametrize("name", MODELS)
def test_every_multiple_of_the_smallest_fit_is_legal_and_nothing_else(name: str, granule: int) -> None:
    smallest = geometry(name, granule).smallest_page
    for page_size in {1, 16, 64, smallest - 1, smallest, smallest + 1, 2 * smallest, 3 * smallest, 128, 0, -smallest}:
        if page_size > 0 and page_size % smallest == 0:
            assert geometry(name, granule, page_size).page_bytes % granule == 0
        else:
            with pytest.raises(ValueError, match=rf"--page-size {page_size} .* multiple of {smallest} tokens"):
                geometry(name, granule, page_size)


@pytest.mark.parametrize("name", MODELS)
def test_stripes_change_no_page_and_tear_nothing(name: str) -> None:
    g = geometry(name, CUDA_GRANULE)
    assert g.stripe_bytes * g.stripes == g.page_bytes
    assert g.stripe_bytes % CUDA_GRANULE == 0
    assert g.token_stride * g.page_size == g.stripe_bytes
    assert g.layers % g.stripes == 0
    assert g.stripes in (1, 2)
    could = g.layers % 2 == 0 and g.page_bytes % (2 * CUDA_GRANULE) == 0 and g.padding == 0
    assert (g.stripes == 2) == could
    assert geometry(name, HOST_GRANULE).stripes == 1
    with pytest.raises(ValueError, match="stripes"):
        page_geometry(layers=3, kv_heads=1, k_dim=64, v_dim=64, itemsize=2, granule_bytes=4096, stripes=2)


def test_the_sizes_that_the_design_names() -> None:
    llama, qwen = geometry("Llama-3.1-8B", CUDA_GRANULE), geometry("Qwen2.5-7B", CUDA_GRANULE)
    assert (llama.token_bytes, llama.page_size, llama.page_bytes) == (128 << 10, 128, 16 << 20)
    assert (qwen.token_bytes, qwen.page_size, qwen.page_bytes) == (56 << 10, 256, 14 << 20)
    assert (llama.stripes, qwen.stripes) == (2, 1)
    assert geometry("tiny Llama of the tests", HOST_GRANULE).page_size == 128


@pytest.mark.parametrize("granule", [HOST_GRANULE, CUDA_GRANULE])
def test_fp8_takes_half_the_bytes_a_token(granule: int) -> None:
    half, whole = geometry("Llama-3.1-8B in fp8", granule), geometry("Llama-3.1-8B", granule)
    assert 2 * half.token_bytes == whole.token_bytes and 2 * half.page_bytes == whole.page_bytes
