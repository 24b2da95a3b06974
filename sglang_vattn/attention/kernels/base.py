# SPDX-License-Identifier: Apache-2.0
"""What an attention kernel over rows is: causal attention of a batch's newest tokens to their requests' rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch


class Span(NamedTuple):
    """One request of a batch, as host integers: its queries ``[start, end)``, its row, the row's length in tokens."""

    start: int
    end: int
    row: int
    length: int


@dataclass(frozen=True)
class RowBatch:
    """The requests of one forward, the same for all its layers.

    Attributes
    ----------
    index : (batch,) int32
        The row of each request.
    lengths : (batch,) int32
        Tokens in each row, those of this forward included: attention is causal, aligned to the end.
    q_bounds : (batch + 1,) int32
        Where each request's queries begin.
    longest_q, longest : int
        Upper bounds of the queries a request, and of ``lengths``.
    """

    index: torch.Tensor
    lengths: torch.Tensor
    q_bounds: torch.Tensor
    longest_q: int
    longest: int

    @cached_property
    def spans(self) -> list[Span]:
        """For kernels that take one request at a time. Waits for the GPU, so not within a captured graph."""
        bounds = self.q_bounds.tolist()
        return [
            Span(*span) for span in zip(bounds, bounds[1:], self.index.tolist(), self.lengths.tolist(), strict=False)
        ]

    def begins(self, row_tokens: int) -> torch.Tensor:
        """Where each request's row begins in all rows' tokens, int32 (batch + 1,).

        For kernels that take packed sequences by their bounds, and beside them how much of each is used: then bounds
        need not ascend, and the last is not read.
        """
        return torch.nn.functional.pad(self.index * row_tokens, (0, 1))

    @cached_property
    def is_decode(self) -> bool:
        return self.longest_q == 1


class KernelMissing(RuntimeError):
    """This machine lacks the kernel; the message says what to install or what to use."""


class RowKernel(ABC):
    """An attention kernel that knows no page table.

    A kernel is made once a process and called once a layer; :meth:`plan` is called once a forward, before its first
    layer. It must read no token past a row's length by more than ``geometry.READ_AHEAD_TOKENS``; what it reads there is
    finite, and may be anything.
    """

    name: ClassVar[str]
    package: ClassVar[str]  # what to install
    module: ClassVar[str]  # by which its presence is told, without an import of it
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    kv_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    capturable: ClassVar[bool] = True  # runs within a captured graph: no host value, no wait
    softcap: ClassVar[bool] = True

    @abstractmethod
    def __init__(self) -> None:
        """Import the package.

        Raises
        ------
        ImportError, KernelMissing
            If this machine lacks it.
        """

    def check_rows(self, k_rows: torch.Tensor, v_rows: torch.Tensor) -> None:  # noqa: B027
        """Called once, before serving, with a layer's rows.

        Raises
        ------
        KernelMissing
            If it cannot read rows of these shapes and strides.
        """

    def plan(self, batch: RowBatch) -> None:  # noqa: B027
        """Look at the next forward's batch. Most kernels need not."""

    @abstractmethod
    def __call__(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        batch: RowBatch,
        *,
        scale: float,
        softcap: float = 0.0,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        need_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one layer.

        Parameters
        ----------
        q : (queries, q_heads, dim)
            All requests' queries, one request after the other.
        k_rows, v_rows : (rows, row_tokens, kv_heads, dim), (rows, row_tokens, kv_heads, v_dim)
            Views with the last dimension dense; not to be copied as a whole.
        scale
            Of the scores, before ``softcap * tanh(scores / softcap)`` where softcap is not 0.
        k_scale, v_scale : (1,) float32, or None
            What fp8 keys and values are multiplied by; None for 1.

        Returns
        -------
        out : (queries, q_heads, v_dim)
        lse : (queries, q_heads) float32
            Natural log-sum-exp of the scores; may be None unless it is asked for.
        """
