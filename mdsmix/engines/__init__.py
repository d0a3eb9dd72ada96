"""Engines convert work units (parts of a source): in processes of this machine, on the nodes of a
Ray cluster, or by any other class that follows `tasks.Engine`.
"""
