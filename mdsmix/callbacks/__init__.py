"""Callbacks that show the streams of a run while it trains: how much of each was trained, its loss,
and its planned and reached share.

The files composer.py, trainer.py and lightning.py have one thin callback each. All counting is in
`stream_tally.py`, which knows no trainer. `stream_figures.py` and `run_file.py` import no torch, so
that `mdsmix report` can read a run's file.
"""
