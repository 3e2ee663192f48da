"""`stretto run`: a training script as a child process, with hooks that it does not know of.

parent.py   starts the command, forwards signals, collects the files, makes the record
inject/     the folder in front of the child's PYTHONPATH: its sitecustomize waits for torch to be imported
child.py    then hooks DataLoader and Optimizer: the meter, and with --echo the echo
echoing.py  puts an EchoLoader in the place of a training loader, in the middle of its first iteration
"""
