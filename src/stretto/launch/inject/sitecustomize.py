"""Runs at the start of every Python that `stretto run` starts: hooks torch as soon as the script has imported it.

Kept to the standard library and small: most of these processes never import torch.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    try:
        from stretto.launch.child import start

        start()
    except Exception:  # the script must go on, also one that outlives `stretto run` and its folder
        path = os.path.join(os.environ["STRETTO_RUN_DIRECTORY"], f"error-{os.getpid()}.txt")
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(f"{sys.executable}\n{traceback.format_exc()}")


class _AfterTorch:
    """Finds torch as usual, and has `_start` called when it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ARG004
        if name != "torch":
            return None
        sys.meta_path.remove(_AfterTorch)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                _start()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_the_other_sitecustomize() -> None:
    """The one that ours stands in front of, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _end_with_parent() -> None:
    """On Linux the script gets SIGTERM when `stretto run` itself is killed."""
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
if "STRETTO_RUN_DIRECTORY" in os.environ:
    sys.meta_path.insert(0, _AfterTorch)
    if os.environ.get("STRETTO_RUN_PARENT") == str(os.getppid()):
        _end_with_parent()
_run_the_other_sitecustomize()
