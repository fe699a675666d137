"""Copied into site-packages by ``python -m vllm_graft.testing.environment``; runs at every start.

No other way into the child processes of ``vllm serve`` is early enough. It imports little."""

import gc
import os
import sys


class _Watch:
    """Finds no module: only acts just before one is loaded."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            from vllm_graft.testing import torchvision_import

            torchvision_import.install()
        elif fullname in ("triton", "vllm") and os.environ.get("VLLM_GRAFT_INTERPRET") == "1":
            # Triton reads this while it is imported. Its import cannot start another one of
            # itself, so the back end is added when vLLM, its only reader, is imported.
            os.environ["TRITON_INTERPRET"] = "1"
            if fullname == "vllm":
                from vllm_graft.testing.interpreter import install as interpreter

                interpreter.install()
                # vLLM's imports leave no garbage, and looking for some is a sixth of their time.
                gc.set_threshold(100_000, 50, 50)


sys.meta_path.insert(0, _Watch)
