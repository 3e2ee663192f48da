"""Data echoing inside torch's worker processes: what an EchoDataLoader is made of.

    main process                                              a worker
    sampler -> order.py -> lanes.py -> epoch.py    torch's     memory.py: EchoedDataset -> collate
               (keyed)     (when)      (batches)   queues      parts.py: read | echo point | finish
               |--- batch_plan.py: EchoPlan ---|
    stream_position.py: StreamPosition                         stream.py: EchoedStream -> collate

    batch_plan.py    EchoPlan, a batch sampler: epochs, position, state
    epoch.py         one epoch of it, as far as torch has drawn it and the training step has been given it
    lanes.py         which example is used when, and by which worker
    memory.py        what a worker keeps; parts.py: what it does with an example
    room.py          how much that is
    stream.py, stream_position.py      the same for iterable data sets
    pace.py          the factor of "auto"
    board.py         counters in shared memory
    consumer.py      which loader draws from the plan, and which epoch comes next
    ranks.py         what ranks agree on

Life cycle: `iter(loader)` has torch start the workers and draw the first batches of the plan, which begins an
epoch there: the sampler's order, the lanes. Workers read an example at its first use, keep it for the uses to come
and let it go after the last. The epoch ends with its last batch, or with the next `iter()`.
"""
