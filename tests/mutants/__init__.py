"""Do the tests notice a fault? `make mutants` plants faults one at a time, a sample of all that mutmut knows."""
