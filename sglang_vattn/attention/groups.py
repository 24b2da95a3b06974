# SPDX-License-Identifier: Apache-2.0
"""The groups of a decode batch, as the kernels of a captured graph read them."""

from __future__ import annotations

import numpy as np
import torch

from sglang_vattn.reading import group_room
from sglang_vattn.sharing import Group


class GroupBuffers:
    """The groups of one graph's batch on the device, in buffers that the graph holds the addresses of.

    Attributes
    ----------
    order : (batch,) int32
        Requests by group, those in no group and the graph's padding last.
    position : (batch,) int32
        The inverse: where a request stands in ``order``.
    shared_pages : (batch,) int32
        Leading pages that a request's group reads for it.
    bounds : (room + 1,) int32
        Where each group begins in ``order``; unused room is empty.
    prefix_tokens, rows : (room,) int32
        Each group's prefix length, and the row that holds it.
    """

    def __init__(self, batch: int, page_size: int, device: str) -> None:
        self.page_size, self.room = page_size, group_room(batch)
        self.version = -1
        sizes = [batch, batch, batch, self.room + 1, self.room, self.room]
        self._packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.order, self.position, self.shared_pages, self.bounds, self.prefix_tokens, self.rows = self._packed.split(
            sizes
        )
        self._packed.copy_(self._pack([]))

    def update(self, groups: list[Group], version: int) -> None:
        """Bring the buffers up to these groups, in one copy on the current stream, if they have changed."""
        if version != self.version:
            packed = self._pack(groups)
            self._packed.copy_(packed if self._packed.device.type == "cpu" else packed.pin_memory(), non_blocking=True)
            self.version = version

    def _pack(self, groups: list[Group]) -> torch.Tensor:
        batch = len(self.order)
        order = [member for group in groups for member in group.members]
        shared_pages, bounds = np.zeros(batch, dtype=np.int32), [0]
        for group in groups:
            shared_pages[group.members] = group.node.end
            bounds.append(bounds[-1] + len(group.members))
        grouped = set(order)
        order += [index for index in range(batch) if index not in grouped]
        position = np.empty(batch, dtype=np.int32)
        position[order] = np.arange(batch, dtype=np.int32)
        empty = self.room - len(groups)
        parts = [
            order,
            position,
            shared_pages,
            bounds + [bounds[-1]] * empty,
            [group.node.end * self.page_size for group in groups] + [0] * empty,
            [group.node.row for group in groups] + [0] * empty,
        ]
        return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int32) for part in parts]))
