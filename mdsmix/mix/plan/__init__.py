"""Before the money is spent: what a run on so many nodes comes to, in closed form, from indexes and
manifests alone.
"""
