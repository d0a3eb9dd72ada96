"""How fast a training YAML's loader is on this machine, and with which settings: `run.py` tries them, `judge.py` chooses.

`tuned.py` is what a rendering takes of it, and imports neither torch nor streaming.
"""
