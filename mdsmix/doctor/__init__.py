"""Looks, before anything is converted, whether this machine and its stores will let a recipe's run do what it does."""
