import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.pipelining.groups import Group


def test_ctrl_c_does_not_cut_a_message() -> None:
    # What C code calls, as a backend's `send`: Ctrl-C comes in the first call of three.
    interrupt = ctypes.PyDLL(None).PyErr_SetInterrupt
    interrupt.argtypes, interrupt.restype = (ctypes.py_object, ctypes.c_int, ctypes.c_int), None
    group = object.__new__(Group)
    group._host = SimpleNamespace(send=interrupt)
    works: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        group.send([torch.zeros(1)] * 3, 1, works)
    assert len(works) == 3
