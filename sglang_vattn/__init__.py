# SPDX-License-Identifier: Apache-2.0
"""A virtually contiguous KV cache for SGLang: ``--kv-backend vattn``."""

__version__ = "0.1.0"

SUPPORTED_SGLANG = ("0.5.23",)
