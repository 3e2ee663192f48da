"""The demonstration: a training job starved by a slow object store, with and without data echoing.

SeaweedFS <- upload     (a store of the user's own takes the place of both)
    |
  Link: latency, rate per connection
    |
obstore in a DataLoader's workers -> stretto.echo -> training step

    run.py          all of it, to a record of plain containers
    calibrate.py    t_down, t_up, and the link's rate for the R asked for
    conditions.py   where and how often to echo
    race.py         one run to the target accuracy, with both clocks
    job.py          model, augmentation, update
    page.py         the record as one HTML page
    server.py, guard.py   the store and its end;  link.py, proxy.py   latency and rate
    fashion.py, shards.py, reader.py, client.py   the data: files, objects, and a data set that reads them
"""
