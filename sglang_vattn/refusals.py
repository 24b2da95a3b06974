# SPDX-License-Identifier: Apache-2.0
"""What ``--kv-backend vattn`` does not support, refused before the model loads, in one line that names the flag."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any, NoReturn

import torch

from sglang_vattn.args import CHOICES

# Fields whose mere use is refused. The flag's name is the field's with dashes, unless told otherwise.
UNSUPPORTED_FIELDS = (
    "speculative_algorithm",
    "enable_pd_role_switch",
    "disaggregation_decode_enable_offload_kvcache",
    "disaggregation_decode_enable_radix_cache",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "enable_hisparse",
    "enable_unified_memory",
    "enable_page_major_kv_layout",
    "enable_kv_cache_sharding",
    "enable_prefill_cp",
    "enable_mixed_chunk",
    "enable_memory_saver",
    "enable_pdmux",
    "enable_two_batch_overlap",
    "enable_streaming_session",
    "enable_session_radix_cache",
    "enable_dynamic_chunking",
    "enable_nvidia_megakernel",
    "enable_amd_monokernel",
    "prefill_only_disable_kv_cache",
    "dllm_algorithm",
    "kv_canary",
    "kv_events_config",
    "elastic_ep_backend",
    "enable_dp_attention",  # ranks with other requests each, which replay decode graphs in step: see ranks.py
    "strip_thinking_cache",
    "use_ray",
    "radix_cache_backend",
)
# Fields with one or a few values that are supported, the first being the one to use.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "disaggregation_mode": ("null", None),
    "pp_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "radix_eviction_policy": ("lru", "lfu", "slru", "priority"),
    "kv_cache_dtype": ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2"),
}
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
UNSUPPORTED_ENVIRONMENT = (
    "SGLANG_USE_HND_KVCACHE",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
    "SGLANG_NATIVE_MOVE_KV_CACHE",
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
)
ATTENTION_BACKENDS = {"cpu": ("torch_native",), "cuda": ("fa3", "triton", "flashinfer")}
_OFF: tuple[Any, ...] = (None, False, "", "none", "None", 0, [], {})


class Refused(ValueError):
    """The server cannot honour ``--kv-backend vattn`` with these arguments."""


def check_choices(server_args: Any) -> None:
    """Refuse a value that our own flags do not have (raises ``Refused``): ``sglang.Engine`` does not check them."""
    for field, choices in CHOICES.items():
        if (value := getattr(server_args, field)) not in choices:
            raise Refused(f"{_flag(field)} {value}: use one of {', '.join(choices)}")


def check_input(server_args: Any) -> None:
    """Refuse what the operator asked for, before SGLang resolves anything.

    Raises
    ------
    Refused
        Naming the flag or the environment variable to change.
    """
    for field in UNSUPPORTED_FIELDS:
        if getattr(server_args, field, None) not in _OFF:
            raise Refused(_unsupported(_flag(field)))
    for field, values in SUPPORTED_VALUES.items():
        value = getattr(server_args, field, values[0])
        if value not in values and value is not None:
            allowed = ", ".join(str(each) for each in values if each is not None)
            raise Refused(f"--kv-backend vattn does not support {_flag(field)} {value}: use one of {allowed}")
    for name in UNSUPPORTED_ENVIRONMENT:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            raise Refused(f"--kv-backend vattn does not support the environment variable {name}: unset it")
    if server_args.vattn_rows is not None and server_args.vattn_rows < 2:
        raise Refused(f"--vattn-rows {server_args.vattn_rows}: at least 2 rows are needed")


def check_model(model_config: Any) -> None:
    """Refuse models whose KV cache is not plain multi-head attention."""
    reasons = [
        (model_config.attention_arch.name != "MHA", f"{model_config.attention_arch.name} attention"),
        (getattr(model_config, "is_hybrid_swa", False), "hybrid sliding-window attention"),
        (getattr(model_config, "is_encoder_decoder", False), "an encoder and a decoder"),
        (getattr(model_config, "linear_attn_registry_result", None) is not None, "linear attention"),
    ]
    for refused, what in reasons:
        if refused:
            raise Refused(
                f"--kv-backend vattn does not support models with {what} "
                f"({model_config.hf_config.architectures[0]}): use --kv-backend default"
            )


def check_resolved(view: Any, *, page_size: int) -> None:
    """Refuse what SGLang's own resolution turned the arguments into.

    Parameters
    ----------
    view
        SGLang's view of the resolved values.
    page_size
        Tokens a page that the vattn geometry asked for.
    """
    device = str(view.device).split(":")[0]
    if device not in ATTENTION_BACKENDS:
        raise Refused(f"--kv-backend vattn does not support --device {device}: use cuda, or cpu without a GPU")
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(view, field, None)
        if value is not None and value not in ATTENTION_BACKENDS[device]:
            allowed = ", ".join(ATTENTION_BACKENDS[device])
            raise Refused(
                f"--kv-backend vattn does not support {_flag(field)} {value} on {device}: use one of {allowed}"
            )
    if view.vattn_kernel != "auto":
        from sglang_vattn.attention.kernels import refusal

        decode = getattr(view.cuda_graph_config, "decode", None)
        graphs = device == "cuda" and getattr(decode, "backend", "disabled") != "disabled"
        kv_dtype = FP8_DTYPES.get(view.kv_cache_dtype)
        if reason := refusal(view.vattn_kernel, device=device, kv_dtype=kv_dtype, graphs=graphs):
            raise Refused(reason)
    if view.page_size != page_size:
        raise Refused(f"--kv-backend vattn needs --page-size {page_size}, another option made it {view.page_size}")
    if view.radix_cache_backend != "vattn":
        raise Refused(_unsupported("--radix-cache-backend"))


def stop(server_args: Any, error: Refused) -> NoReturn:
    """Raise ``error``; at the command line, end with its one line instead of a traceback."""
    at_command_line = getattr(server_args, "_launch_command", None) is not None
    if at_command_line and multiprocessing.parent_process() is None:
        raise SystemExit(f"error: {error}") from None
    raise error


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _unsupported(flag: str) -> str:
    return f"--kv-backend vattn does not support {flag}: remove it, or use --kv-backend default"
