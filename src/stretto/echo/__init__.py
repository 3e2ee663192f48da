"""Data echoing: use what the input pipeline already produced, shuffled, while it produces more.

    loader.py      EchoLoader: around any loader; epochs and the public surface
    stream.py      fresh batches into residents, by the factor's rule
    passes.py      pass after pass over the loader, enterable anywhere
    upstream.py    the background thread
    residents.py   plan + buffer, and the admission rules
    plan.py        which resident is used when
    buffer.py      what is resident: leaf.py (a tensor pool's columns), tree.py (nested batches)
    factor.py      how many uses an item gets
    keyed.py       counter-based random numbers
    settings.py, lengths.py, stats.py

    stages.py      StagedDataset: a data set as named stages
    wrap.py        stages from a data set with a transform: deferred.py (its calls), compose.py (its members)
    randomness.py  the random state of each use; generators.py finds the generators that transforms hold

Data flows one way: loader -> passes -> upstream -> stream -> residents -> EchoLoader -> training step.
"""
