# SPDX-License-Identifier: Apache-2.0
"""Values of our own flags, where no command line checks them: `sglang.Engine(kv_backend="vattn", ..)`."""

from __future__ import annotations

import pytest

from sglang_vattn.args import CHOICES, VattnServerArgs
from sglang_vattn.refusals import Refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_backend", "vatn"),
        ("vattn_read", "row"),
        ("vattn_shared_decode", "on"),
        ("vattn_scrub", True),
        ("vattn_scrub", "no"),
    ],
)
def test_a_value_that_does_not_exist_is_refused(field: str, value: object) -> None:
    args = VattnServerArgs(model_path="nowhere", **{"kv_backend": "vattn", field: value})
    with pytest.raises(Refused, match=f"--{field.replace('_', '-')} {value}: use one of {CHOICES[field][0]}"):
        args.resolve_once()
