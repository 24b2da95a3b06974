# SPDX-License-Identifier: Apache-2.0
"""Tiny random models and a byte-level tokenizer, written to a folder without any download.

Four layers, two KV heads of 32 dimensions: 2 KiB of KV a token in float32, so a host page
of 4 KiB holds two tokens. The weights are seeded and spread wide (`initializer_range`), so
greedy output varies with the whole prompt: one wrong byte of KV changes the tokens.

`FAMILIES` says how each family departs from that, `GEOMETRIES` which heads its published models have: those are
for a GPU, in bfloat16, with few layers and a small vocabulary.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SEED = 0
VOCABULARY = 320  # 256 bytes, four specials, and a few ids that no text has
CONTEXT = 4096  # tokens


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(bytes_only)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


class Family(NamedTuple):
    """A family's name in transformers (`<name>Config`, `<name>ForCausalLM`), and what is not as in the tiny Llama."""

    name: str
    shape: dict[str, Any]


_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
FAMILIES = {
    "llama": Family("Llama", {"head_dim": 32}),
    "qwen2": Family("Qwen2", {}),  # biases on Q, K and V
    "qwen3": Family("Qwen3", {"head_dim": 64}),  # Q and K normed, heads wider than hidden_size / heads
    "mistral": Family("Mistral", {"head_dim": 32, "sliding_window": None}),
    "gemma": Family("Gemma", {"head_dim": 256, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "mixtral": Family("Mixtral", {"head_dim": 32, "sliding_window": None, **_EXPERTS}),
    "qwen3_moe": Family(
        "Qwen3Moe",
        {
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": Family(  # every other layer sees a window; SGLang's soft cap of logits is a Triton kernel, so none here
        "Gemma2",
        {
            "head_dim": 64,
            "sliding_window": 64,
            "hidden_act": "gelu_pytorch_tanh",
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
        },
    ),
}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
#: query heads, KV heads, head dimension, and what else is not as in FAMILIES
GEOMETRIES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama": (32, 8, 128, {}),  # Llama-3.1-8B
    "qwen2": (28, 4, 128, {"hidden_size": 28 * 128}),  # Qwen2.5-7B
    "qwen3": (32, 8, 128, {}),  # Qwen3-8B
    "mistral": (32, 8, 128, {}),  # Mistral-7B
    "gemma": (8, 1, 256, {}),  # Gemma-2B
    "gemma2": (16, 8, 256, {"sliding_window": 256, "final_logit_softcapping": 30.0}),  # Gemma-2-9B
    "mixtral": (32, 8, 128, {"num_local_experts": 8, "hidden_size": 32 * 128}),  # Mixtral-8x7B
    "qwen3_moe": (32, 4, 128, _QWEN3_EXPERTS),  # Qwen3-30B-A3B
}
LORA_NAMES = ("lora-a", "lora-b")  # adapters in the tiny Llama's folder
LORA_RANK = 4


def _listen(model: Any, family: str) -> None:
    """Make what a Gemma-2 says depend on its context: with weights as they come it repeats the last token.

    SGLang multiplies by the embedding once more to get logits, and Gemma-2 norms what each layer adds: beside that the
    token's own embedding weighs too much. A smaller embedding, and logits brought back to their size by the last norm.
    """
    import torch

    if family == "gemma2":
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(0.1)
            model.model.norm.weight.fill_(9.0)  # Gemma adds 1


def write_tiny_model(folder: Path, family: str = "llama") -> None:
    """Write weights, configuration and tokenizer of a `family` model into `folder`."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    tokenizer = _tokenizer()
    name, own = FAMILIES[family]
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "dtype": "float32",
    }
    config = getattr(transformers, f"{name}Config")(**shape | own)
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    _listen(model, family)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_model_of_geometry(folder: Path, family: str) -> None:
    """Write a bfloat16 model with the heads of `GEOMETRIES` into `folder`: four layers, 512 tokens."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    name, tiny = FAMILIES[family]
    q_heads, kv_heads, dim, own = GEOMETRIES[family]
    shape: dict[str, Any] = {
        **tiny,
        "vocab_size": 512,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "dtype": "bfloat16",
        **({"head_dim": dim} if family != "qwen2" else {}),
        **own,
    }
    config = getattr(transformers, f"{name}Config")(**shape)
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    _listen(model, family)
    model.to(torch.bfloat16).save_pretrained(folder)


def write_lora(folder: Path, base: Path, seed: int) -> None:
    """Write an adapter of the model in `base`, on Q, K, V and the output projection, in the layout of PEFT."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    widths = {
        "q_proj": (hidden, config["num_attention_heads"] * dim),
        "o_proj": (config["num_attention_heads"] * dim, hidden),
    }
    widths |= dict.fromkeys(("k_proj", "v_proj"), (hidden, config["num_key_value_heads"] * dim))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (fan_in, fan_out) in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(LORA_RANK, fan_in, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(fan_out, LORA_RANK, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


def end_of_text(folder: Path) -> int:
    """The token at which a request ends unless it says to ignore it."""
    return int(json.loads((folder / "config.json").read_text())["eos_token_id"])


def tiny_model(cache: Path, family: str = "llama") -> Path:
    """The folder of a `family` model under `cache`, written in a sub-process if absent.

    The sub-process keeps torch (0.5 GB) out of the caller, which only talks HTTP.
    """
    version = hashlib.sha1(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = cache / f"tiny-{family}-{version}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs in one checkout write it once
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            subprocess.run(
                [sys.executable, __file__, str(unfinished), family],
                check=True,
                timeout=300,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            unfinished.rename(folder)
    return folder


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]), sys.argv[2])
