# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: one at a time, in its own process group, on the host or on a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serve_ab import ENGINE, LLAMA_3_8B
from tests.support.client import Client
from tests.support.server import LAUNCH, LIFETIME_S, NO_PLUGINS, Server, ServerError
from tests.support.tiny_model import tiny_model

MODELS = Path(__file__).resolve().parent.parent / "build" / "models"


class Arm(NamedTuple):
    """Flags and environment that tell one server from another."""

    flags: tuple[str, ...]
    env: Mapping[str, str]


ARMS = {
    "vattn": Arm(("--kv-backend=vattn",), {}),
    "stock_page1": Arm(("--page-size=1",), NO_PLUGINS),
    "stock_page128": Arm(("--page-size=128",), NO_PLUGINS),
    # The same code path without a hit: what the prefix cache is worth.
    "stock_no_hits": Arm(("--page-size=1",), {**NO_PLUGINS, "SGLANG_RADIX_FORCE_MISS": "1"}),
}
HOST_POOL = "--max-total-tokens=65536"


def flags_of(engine: Mapping[str, Any]) -> list[str]:
    """Engine arguments as the server's flags."""
    out = []
    for name, value in engine.items():
        if value is not False:
            flag = "--" + name.replace("_", "-")
            if isinstance(value, list):
                out += [flag, *map(str, value)]
            else:
                out.append(flag if value is True else f"{flag}={value}")
    return out


class GpuServer(Server):
    """A server with SGLang's own defaults but for `ENGINE`, which serve_ab.py shares."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        flags: Sequence[str],
        env: Mapping[str, str],
        command: Sequence[str] = LAUNCH,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        super().__init__(model, folder, flags, env, command, forked=False, lifetime_s=lifetime_s)
        port = self.base.rsplit(":", 1)[1]
        engine = {name: value for name, value in ENGINE.items() if name != "skip_tokenizer_init"}
        self._arguments = ["--model-path", str(model), "--host=127.0.0.1", f"--port={port}", *flags_of(engine), *flags]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "VATTN_"))}
        self._env = {**inherited, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **env}


# A model that is served on a CPU: SmolLM2-135M, a small Llama.
SMOLLM2_135M: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def dummy_llama(folder: Path, config: Mapping[str, Any] = LLAMA_3_8B) -> Path:
    """A Llama's configuration, for dummy weights, and a tokenizer with a word for each id."""
    if (folder / "tokenizer.json").exists():
        return folder
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


def model_for(device: str) -> Path:
    return dummy_llama(MODELS / "dummy-llama-8b") if device == "cuda" else tiny_model(MODELS)


@contextmanager
def serving(name: str, device: str, folder: Path, extra: Sequence[str] = ()) -> Iterator[Client]:
    """The arm's server, stopped at the end whatever happens."""
    arm, model = ARMS[name], model_for(device)
    server: Server
    if device == "cuda":
        server = GpuServer(model, folder / name, [*arm.flags, *extra], arm.env)
    else:
        server = Server(model, folder / name, [HOST_POOL, *arm.flags, *extra], arm.env)
    with server:
        yield server


# Four servers of 8B on one GPU: 15 GiB of weights, 12 of KV and a few of graphs and activations each. Few sizes are
# captured, which is a third of a server's start. The same for every arm.
SMALL_POOL_TOKENS = 98304
BESIDE_OTHERS: dict[str, Any] = {
    "mem_fraction_static": 0.92,
    "max_total_tokens": SMALL_POOL_TOKENS,
    "cuda_graph_max_bs_decode": 64,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
    "cuda_graph_bs_prefill": [16, 64, 128, 256, 512, 1024, 2048, 4096, 8192],
}


@contextmanager
def all_serving(names: Sequence[str], device: str, folder: Path) -> Iterator[dict[str, Client]]:
    """The servers of several arms on one device, to be measured in turns. On a GPU they start at the same time.

    An arm whose server does not start is left out, and the end of its log printed; RuntimeError if none is left.
    """
    model_for(device)  # not several at once
    extra = flags_of(BESIDE_OTHERS) if device == "cuda" else ()
    with ExitStack() as stack, ThreadPoolExecutor(len(names) if device == "cuda" else 1) as pool:
        started = [pool.submit(stack.enter_context, serving(name, device, folder, extra)) for name in names]
        clients = {}
        for name, one in zip(names, started, strict=True):
            try:
                clients[name] = one.result()
            except ServerError as error:
                print(f"{name} is left out: {error}", flush=True)
        if not clients:
            raise RuntimeError("no server started")
        yield clients


def counters(client: Client) -> dict[str, int]:
    """The pool's counters of a vattn server; empty for stock."""
    states = client.info()["internal_states"]
    return dict(states[0].get("vattn") or {})
