"""Imported by the scripts that train plainly: no optimizer imports torch's compiler, which takes a second."""

import sys
import types

import torch

_compiler = types.ModuleType("torch._dynamo")
_compiler.disable = lambda function, *args, **kwargs: function
_compiler.graph_break = lambda: None
sys.modules[_compiler.__name__] = torch._dynamo = _compiler
