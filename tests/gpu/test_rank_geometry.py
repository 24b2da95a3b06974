# SPDX-License-Identifier: Apache-2.0
"""One rank's KV cache of TP = 2, 4 and 8, for an 8B, a 70B, a 32B and a 7B model, through the CUDA driver.

Without the other ranks: the geometry follows from the model and the number of ranks alone.
"""

from __future__ import annotations

import pytest
import torch

from tests.parallel.geometry import RANKS, Rank, check_pool, geometry, small_pool


@pytest.mark.parametrize("rank", RANKS, ids=lambda rank: f"{rank.model}-tp{rank.ranks}")
def test_a_pool_of_it(rank: Rank) -> None:
    before = torch.cuda.mem_get_info()[0]
    pool = small_pool(rank, "cuda")
    g = pool.geometry
    assert (g.token_bytes, g.page_size, g.page_bytes) == (rank.token_bytes, rank.page_size, rank.page_bytes)
    assert g == geometry(rank)
    assert before - torch.cuda.mem_get_info()[0] >= pool.space.physical_bytes
    check_pool(rank, pool)
    torch.cuda.synchronize()
    pool.space.close()
