"""How fast a training YAML's loader is on this machine, and with which settings: `choice.py` says which, `speed.py` measures them."""
