# SPDX-License-Identifier: Apache-2.0
"""Page geometry: how many tokens a page holds so that no token is torn between two pages.

A token's bytes are [layer][K|V][head][dim], all layers together; a page is the smallest number of tokens, from
128 on, that fills a whole number of the driver's granules (design.md, 'Page geometry').

A page may consist of stripes, one allocation each: stripe s holds the s-th part of the layers of all its tokens, so
that tokens lie closer together for the kernel that reads one layer (docs/benchmarks.md, 'Layout').
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PREFERRED_TOKENS = 128  # FA3's tile: then the paged kernel runs its fast form on home slots, too
LARGEST_TOKENS = 2048  # beyond this, a page would hold too much that one request leaves unused
HOST_GRANULE = 4096
CUDA_GRANULE = 2 << 20
STRIPES = 2  # on CUDA, where the layers and the page can be halved; more gained nothing more
# FA3 loads whole tiles of keys, so it may touch up to a tile past the last key of a row. Its largest tiles, by the
# head dimension up to which they are used (sgl-flash-attn, hopper/tile_size.h, tile_size_fwd_sm90):
#     64: 192    96: 144    128: 176    192: 128    256:  80       2 bytes a number
#     64: 160    96: 128    128: 224    192: 160    256: 128       fp8
# One bound for all of them: with pages of 128 tokens, a smaller one would rarely save a page. FA4 takes 144 at most,
# the other kernels read no key that is not theirs (docs/kernels.md). The host neither, but the page that the next
# step needs is mapped before that step there, too.
READ_AHEAD_TOKENS = {"cuda": 224, "cpu": 1}


@dataclass(frozen=True)
class PageGeometry:
    """Sizes of tokens and pages, in bytes and tokens.

    Attributes
    ----------
    layers, kv_heads, k_dim, v_dim, itemsize
        What a token holds: ``layers * kv_heads * (k_dim + v_dim) * itemsize`` bytes.
    granule_bytes
        What the driver maps at least: 2 MiB on CUDA, the operating system's page on the host.
    token_bytes
        Bytes of a token: the payload, padded only where no page of at most 2,048 tokens fits otherwise.
    page_size
        Tokens a page.
    stripes
        Allocations a page.
    """

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int
    granule_bytes: int
    token_bytes: int
    page_size: int
    stripes: int = 1

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.kv_heads * (self.k_dim + self.v_dim) * self.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def token_stride(self) -> int:
        """Bytes from one token to the next, within a stripe."""
        return self.token_bytes // self.stripes

    @property
    def stripe_bytes(self) -> int:
        """Bytes of a page in one stripe."""
        return self.page_bytes // self.stripes

    @property
    def smallest_page(self) -> int:
        """Tokens of the smallest exact fit; every legal page size is a multiple of it."""
        return _smallest_fit(self.token_bytes, self.granule_bytes)

    @property
    def padding(self) -> float:
        """Share of a token's stride that holds nothing."""
        return 1 - self.payload_bytes / self.token_bytes


def page_geometry(
    *,
    layers: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    itemsize: int,
    granule_bytes: int,
    page_size: int | None = None,
    stripes: int | None = None,
) -> PageGeometry:
    """The geometry for a model's KV heads on one rank.

    Parameters
    ----------
    page_size
        Tokens a page as the user asks for, or None for the default.
    stripes
        Allocations a page, or None for the default. They never change the page size.

    Raises
    ------
    ValueError
        If ``page_size`` tears a token (names the page sizes that do not), or if there cannot be so many stripes.
    """
    payload = layers * kv_heads * (k_dim + v_dim) * itemsize
    if payload <= 0:
        raise ValueError(f"a token without KV bytes: {layers=} {kv_heads=} {k_dim=} {v_dim=}")
    # The least padding that lets a page of at most LARGEST_TOKENS fit: with a stride that is a multiple of
    # granule / LARGEST_TOKENS, that many tokens always fill whole granules.
    stride = payload
    if _default_page(stride, granule_bytes) > LARGEST_TOKENS:
        stride = _ceil(payload, max(1, granule_bytes // LARGEST_TOKENS))
    smallest = _smallest_fit(stride, granule_bytes)
    if page_size is None:
        page_size = _default_page(stride, granule_bytes)
    elif page_size <= 0 or page_size % smallest:
        default = _default_page(stride, granule_bytes)
        raise ValueError(
            f"--page-size {page_size} would tear a token between two pages: with --kv-backend vattn this model "
            f"needs a multiple of {smallest} tokens (default {default})"
        )

    def can_have(stripes: int) -> bool:
        return stride == payload and layers % stripes == 0 and page_size * stride % (stripes * granule_bytes) == 0

    if stripes is None:
        stripes = STRIPES if granule_bytes >= CUDA_GRANULE and can_have(STRIPES) else 1
    elif stripes != 1 and not can_have(stripes):
        raise ValueError(f"a page of {page_size} tokens and {layers} layers cannot have {stripes} stripes")
    return PageGeometry(layers, kv_heads, k_dim, v_dim, itemsize, granule_bytes, stride, page_size, stripes)


def _smallest_fit(token_bytes: int, granule_bytes: int) -> int:
    return granule_bytes // math.gcd(token_bytes, granule_bytes)


def _default_page(token_bytes: int, granule_bytes: int) -> int:
    return _ceil(PREFERRED_TOKENS, _smallest_fit(token_bytes, granule_bytes))


def _ceil(value: int, step: int) -> int:
    return -(-value // step) * step
