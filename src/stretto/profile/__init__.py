"""Where a training run's time goes, and what to do about it.

in the training process     meter.py     every fetch, every optimizer step -> rows in a file
in the loader's workers     worker.py    every batch's stages, wall and CPU time -> rows in a file
after or beside the run     measure.py   rows -> Pipeline (pipeline.py) and RunRecord (schema.py)
                            model.py     a pipeline's throughput with other settings, by simulation
                            advise.py    what to change, ranked by what the model predicts
                            report.py, html/, trace.py    the record as text, as a page, for Perfetto
"""
