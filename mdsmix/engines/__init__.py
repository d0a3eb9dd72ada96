"""Engines, which do the work units: processes of this machine, nodes of a Ray cluster, or any other
class that follows `tasks.Engine`.
"""
