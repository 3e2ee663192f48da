"""Prints what a script can see of how it was started, and ends as its first argument says."""

import builtins
import json
import os
import sys

seen = {
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": os.path.basename(__file__),
    "cwd": os.getcwd(),
    "stdin": sys.stdin.read(),
    "pythonpath": os.environ["PYTHONPATH"].split(os.pathsep)[-1],
    "own sitecustomize": getattr(builtins, "own_sitecustomize", None),
}
print(json.dumps(seen))
sys.stdout.buffer.write(b"\xff\x00 no text\n")
print("a word on stderr", file=sys.stderr)
ending = sys.argv[1]
sys.stdout.flush()
if ending == "raise":
    raise RuntimeError("what went wrong")
if ending == "at once":
    os._exit(4)
sys.exit(int(ending))
