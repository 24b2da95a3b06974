# SPDX-License-Identifier: Apache-2.0
"""Test only: lets the unmodified `sglang` wheel run on a machine without an accelerator.

It is for `--device cpu --attention-backend torch_native` and a CPU build of torch, with
SGLANG_USE_CPU_ENGINE unset: then the pool and allocator branches are those of CUDA.
`make env` copies this file and `sglang_on_cpu.pth` into the virtual environment's
site-packages. The .pth file imports it when an interpreter starts, so every process that
SGLang spawns has it too. It is no part of the wheel, and it imports nothing heavy.
"""

from __future__ import annotations

import sys
import types


def _stub(name: str, **attributes: object) -> None:
    # Only "package.module" goes into sys.modules, never "package" itself: then
    # `from package.module import x` works, while `import package` and
    # importlib.util.find_spec("package") still say that it is not installed.
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules.setdefault(name, module)


def _rotary_embedding(*_args: object, **_kwargs: object) -> None:
    raise NotImplementedError("vllm is not installed; forward_native does not need it")


# PyPI's torchvision is a CUDA build: its extension does not load beside a CPU torch, and
# then it fails at registering fake kernels for its (missing) operators. Nothing here calls
# those operators: skip the two modules that register them.
_stub("torchvision._meta_registrations")
_stub("torchvision._autograd_registrations")

# SGLang's RotaryEmbedding.__init__ imports this name when it detects no platform, and never
# calls it: on the CPU the layer runs forward_native.
_stub("vllm._custom_ops", rotary_embedding=_rotary_embedding)
