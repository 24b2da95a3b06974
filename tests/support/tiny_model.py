# SPDX-License-Identifier: Apache-2.0
"""A tiny random model and a byte-level tokenizer, written to a folder without any download.

Four layers, two KV heads of 32 dimensions: 2 KiB of KV a token in float32, so a host page
of 4 KiB holds two tokens. The weights are seeded and spread wide (`initializer_range`), so
greedy output varies with the whole prompt: one wrong byte of KV changes the tokens.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "qwen2"]

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


def write_tiny_model(folder: Path, family: Family = "llama") -> None:
    """Write weights, configuration and tokenizer of a `family` model into `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    tokenizer = _tokenizer()
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
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(head_dim=32, **shape))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_of_text(folder: Path) -> int:
    """The token at which a request ends unless it says to ignore it."""
    return int(json.loads((folder / "config.json").read_text())["eos_token_id"])


def tiny_model(cache: Path, family: Family = "llama") -> Path:
    """The folder of a `family` model under `cache`, written in a sub-process if absent.

    The sub-process keeps torch (0.5 GB) out of the caller, which only talks HTTP.
    """
    folder = cache / f"tiny-{family}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"tiny-{family}.lock").open("w") as lock:
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
    chosen: Family = "qwen2" if sys.argv[2] == "qwen2" else "llama"
    write_tiny_model(Path(sys.argv[1]), chosen)
